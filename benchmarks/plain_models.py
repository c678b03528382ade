"""The classic networks in plain torch, as a reference for measuring the trainer's step.

Ours differ in memory layout, in-place operations and recomputation; results and parameters are the
same. Parameter names here are voxceleb_trainer's, whose checkpoints fit both. Only benchmarks use
these networks.

Source: github.com/clovaai/voxceleb_trainer, models/ResNetSE34L.py, ResNetSE34V2.py, VGGVox.py,
loss/amsoftmax.py.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from speakernet.options import lookup

BLOCKS = (3, 4, 6, 3)


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
        hidden = self.bn1(self.relu(self.conv1(features)))
        hidden = self.se(self.bn2(self.conv2(hidden)))
        return self.relu(hidden + self.downsample(features))


class PlainResNetSE(nn.Module):
    """ResNetSE34L with SAP, or ResNetSE34V2 with ASP: waveforms (batch, samples) -> embeddings
    (batch, dim).
    """

    def __init__(
        self, front_end: nn.Module, embedding_dim: int, *, num_mels: int, is_light: bool
    ) -> None:
        super().__init__()
        self.front_end = front_end
        self.is_light = is_light
        widths = (16, 32, 64, 128) if is_light else (32, 64, 128, 256)
        strides = (1, 2, 2, 1) if is_light else (1, 2, 2, 2)
        self.conv1: nn.Module
        if is_light:
            self.conv1 = nn.Conv2d(1, widths[0], 7, stride=(2, 1), padding=3, bias=False)
        else:
            self.conv1 = nn.Conv2d(1, widths[0], 3, padding=1)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU(inplace=True)
        channels_in = widths[0]
        for number, (width, count, stride) in enumerate(
            zip(widths, BLOCKS, strides, strict=True), start=1
        ):
            blocks = [
                PlainBlock(channels_in, width, stride),
                *(PlainBlock(width, width, 1) for _ in range(count - 1)),
            ]
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
            channels_in = width
        if is_light:
            self.sap_linear = nn.Linear(channels_in, channels_in)
            self.attention: Any = nn.Parameter(torch.empty(channels_in, 1))
            nn.init.xavier_normal_(self.attention)
            self.fc = nn.Linear(channels_in, embedding_dim)
        else:
            outputs = channels_in * (num_mels // 8)
            self.attention = nn.Sequential(
                nn.Conv1d(outputs, 128, 1),
                nn.ReLU(),
                nn.BatchNorm1d(128),
                nn.Conv1d(128, outputs, 1),
                nn.Softmax(dim=2),
            )
            self.fc = nn.Linear(2 * outputs, embedding_dim)
        initialize(self)

    def forward(self, waveforms: Tensor) -> Tensor:
        """(batch, samples) to (batch, dim)."""
        with torch.no_grad():
            features = self.front_end(waveforms).unsqueeze(1)
        hidden = self.conv1(features)
        # ResNetSE34V2 normalises after the ReLU, like the blocks of both.
        hidden = self.relu(self.bn1(hidden)) if self.is_light else self.bn1(self.relu(hidden))
        for number in range(1, len(BLOCKS) + 1):
            hidden = getattr(self, f"layer{number}")(hidden)
        return self.fc(
            self._self_attentive(hidden) if self.is_light else self._attentive_statistics(hidden)
        )

    def _self_attentive(self, hidden: Tensor) -> Tensor:
        frames = hidden.mean(dim=2).transpose(1, 2)  # (batch, frames, channels)
        weights = functional.softmax(torch.tanh(self.sap_linear(frames)) @ self.attention, dim=1)
        return (frames * weights).sum(dim=1)

    def _attentive_statistics(self, hidden: Tensor) -> Tensor:
        frames = hidden.flatten(1, 2)  # (batch, channels x mels, frames)
        weights = self.attention(frames)
        mean = (frames * weights).sum(dim=2)
        # The original's floor: the variance of equal frames may round below 0, and the root's slope
        # at 0 is infinite.
        deviation = ((frames**2 * weights).sum(dim=2) - mean**2).clamp(min=1e-5).sqrt()
        return torch.cat((mean, deviation), dim=1)


class PlainVGGVox(nn.Module):
    """VGG-M with SAP on 40 mel bands: waveforms (batch, samples) -> embeddings (batch, dim)."""

    def __init__(self, front_end: nn.Module, embedding_dim: int) -> None:
        super().__init__()
        self.front_end = front_end
        self.netcnn = nn.Sequential(
            *_convolution(1, 96, (5, 7), stride=(1, 2), padding=(2, 2)),
            nn.MaxPool2d((1, 3), stride=(1, 2)),
            *_convolution(96, 256, (5, 5), stride=(2, 2), padding=(1, 1)),
            nn.MaxPool2d((3, 3), stride=(2, 2)),
            *_convolution(256, 384, (3, 3), padding=(1, 1)),
            *_convolution(384, 256, (3, 3), padding=(1, 1)),
            *_convolution(256, 256, (3, 3), padding=(1, 1)),
            nn.MaxPool2d((3, 3), stride=(2, 2)),
            *_convolution(256, 512, (4, 1)),
        )
        self.sap_linear = nn.Linear(512, 512)
        self.attention = nn.Parameter(torch.empty(512, 1))
        nn.init.xavier_normal_(self.attention)
        self.fc = nn.Linear(512, embedding_dim)

    def forward(self, waveforms: Tensor) -> Tensor:
        """(batch, samples) to (batch, dim)."""
        with torch.no_grad():
            features = self.front_end(waveforms).unsqueeze(1)
        frames = self.netcnn(features).squeeze(2).transpose(1, 2)
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
        margins = torch.zeros_like(cosines).scatter_(1, labels[:, None], self.margin)
        return functional.cross_entropy(self.scale * (cosines - margins), labels)


PLAIN_MODELS: dict[str, Callable[[nn.Module, int, int], nn.Module]] = {
    "ResNetSE34L": lambda front_end, dim, num_mels: PlainResNetSE(
        front_end, dim, num_mels=num_mels, is_light=True
    ),
    "ResNetSE34V2": lambda front_end, dim, num_mels: PlainResNetSE(
        front_end, dim, num_mels=num_mels, is_light=False
    ),
    "VGGVox": lambda front_end, dim, num_mels: PlainVGGVox(front_end, dim),
}


def plain_model(name: str, front_end: nn.Module, embedding_dim: int, num_mels: int) -> nn.Module:
    """A network in plain torch, by name; `front_end` maps (batch, samples) to (batch, mels,
    frames).

    Raises:
        ValueError: there is no plain definition of the network.
    """
    build = lookup(PLAIN_MODELS, name, "plain definition")
    return cast(nn.Module, build(front_end, embedding_dim, num_mels))


def initialize(net: nn.Module) -> None:
    """Kaiming-normal convolutions (fan out), as in the original."""
    for part in net.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")


def _convolution(
    channels_in: int,
    channels: int,
    kernel: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
) -> list[nn.Module]:
    convolution = nn.Conv2d(channels_in, channels, kernel, stride=stride, padding=padding)
    return [convolution, nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
