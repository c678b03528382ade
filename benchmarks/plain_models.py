"""ResNetSE34L and AM-softmax in plain torch, as a reference for measuring the trainer's step.

Ours differ in memory layout, in-place operations and recomputation; results and parameters are the
same. Parameter names here are voxceleb_trainer's, whose checkpoints fit both. Only benchmarks use
them.

Source: github.com/clovaai/voxceleb_trainer, models/ResNetSE34L.py,
loss/amsoftmax.py.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

BLOCKS = (3, 4, 6, 3)
WIDTHS = (16, 32, 64, 128)
STRIDES = (1, 2, 2, 1)


class PlainGate(nn.Module):
    """Squeeze-and-excitation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(
            nn.Linear(channels, channels // 8),
            nn.ReLU(inplace=True),
            nn.Linear(channels // 8, channels),
            nn.Sigmoid(),
        )

    def forward(self, features: Tensor) -> Tensor:
        """(batch, channels, mels, frames) in and out."""
        means = self.avg_pool(features).flatten(1)
        return features * self.fc(means)[:, :, None, None]


class PlainBlock(nn.Module):
    """Residual block with a gate; ReLU before the first batch norm."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.se = PlainGate(channels)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(channels),
            )

    def forward(self, features: Tensor) -> Tensor:
        """(batch, channels, mels, frames) in and out."""
        # ReLU before the norm: unusual, but so are the published weights.
        hidden = self.bn1(self.relu(self.conv1(features)))
        hidden = self.se(self.bn2(self.conv2(hidden)))
        return self.relu(hidden + self.downsample(features))


class PlainResNetSE34L(nn.Module):
    """ResNetSE34L with SAP: waveforms (batch, samples) -> embeddings (batch, dim)."""

    def __init__(self, front_end: nn.Module, embedding_dim: int) -> None:
        super().__init__()
        self.front_end = front_end
        self.conv1 = nn.Conv2d(1, WIDTHS[0], 7, stride=(2, 1), padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        self.relu = nn.ReLU(inplace=True)
        width_in = WIDTHS[0]
        for number, (width, count, stride) in enumerate(
            zip(WIDTHS, BLOCKS, STRIDES, strict=True), start=1
        ):
            blocks = [PlainBlock(width_in, width, stride)]
            blocks += [PlainBlock(width, width, 1) for _ in range(count - 1)]
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
            width_in = width
        self.sap_linear = nn.Linear(width_in, width_in)
        self.attention = nn.Parameter(torch.empty(width_in, 1))
        nn.init.xavier_normal_(self.attention)
        self.fc = nn.Linear(width_in, embedding_dim)
        # Kaiming-normal with fan out, as in the original.
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, waveforms: Tensor) -> Tensor:
        """(batch, samples) to (batch, dim)."""
        # The front end has nothing to learn, and the original computes it without a graph too.
        with torch.no_grad():
            features = self.front_end(waveforms).unsqueeze(1)
        hidden = self.relu(self.bn1(self.conv1(features)))
        for number in range(1, len(BLOCKS) + 1):
            hidden = getattr(self, f"layer{number}")(hidden)
        # The mean over mels, then attention over frames.
        frames = hidden.mean(dim=2).transpose(1, 2)  # (batch, frames, channels)
        weights = functional.softmax(torch.tanh(self.sap_linear(frames)) @ self.attention, dim=1)
        return self.fc((frames * weights).sum(dim=1))


class PlainAMSoftmax(nn.Module):
    """Additive-margin softmax: embeddings (batch, dim), labels (batch,) -> loss."""

    def __init__(self, embedding_dim: int, num_classes: int, margin: float, scale: float) -> None:
        super().__init__()
        self.margin = margin
        self.scale = scale
        self.W = nn.Parameter(torch.empty(embedding_dim, num_classes))
        nn.init.xavier_normal_(self.W)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy."""
        cosines = functional.normalize(embeddings, dim=1) @ functional.normalize(self.W, dim=0)
        # As in the original: a tensor of the size of the scores for one number a row. Ours changes
        # only the label's column.
        margins = torch.zeros_like(cosines).scatter_(1, labels[:, None], self.margin)
        return functional.cross_entropy(self.scale * (cosines - margins), labels)
