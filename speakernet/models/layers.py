"""What several model families share: masks for different lengths, squeeze-and-excitation, residual blocks.

Convolution trunks see `(batch, channels, mels, frames)`. With `lengths` (valid frames of each utterance) every layer
leaves frames past an utterance's end at zero, which is what a convolution finds past the end of the utterance alone.
Without `lengths` (training on crops) nothing is masked and nothing is paid for it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from speakernet.frontend.features import valid_frames

# Channels that oneDNN's kernels take at once.
ONEDNN_BLOCK = 16


def mask_frames(features: Tensor, lengths: Tensor | None) -> Tensor:
    """Zero what lies past each utterance's end along the last axis.

    Args:
        features: (batch, …, frames).
        lengths: (batch,) valid frames, or None when all are full.
    """
    if lengths is None:
        return features
    valid = valid_frames(lengths, features.shape[-1])
    shape = (features.shape[0], *(1 for _ in features.shape[1:-1]), features.shape[-1])
    return features.masked_fill(~valid.view(shape), 0.0)


def mean_over_frames(features: Tensor, lengths: Tensor | None) -> Tensor:
    """Mean over the valid frames of (batch, channels, frames), (batch, channels); past the end must be zeros."""
    if lengths is None:
        return features.mean(dim=-1)
    return features.sum(dim=-1) / lengths.to(features.dtype).unsqueeze(1)


def strided_length(lengths: Tensor | None, stride: int) -> Tensor | None:
    """Valid frames behind a convolution that keeps length but for its stride (padding = half the kernel)."""
    return None if lengths is None else (lengths - 1) // stride + 1


def valid_length(lengths: Tensor | None, kernel: int, stride: int, padding: int = 0) -> Tensor | None:
    """Valid frames behind a convolution or pooling with that kernel, stride and padding."""
    return None if lengths is None else (lengths + 2 * padding - kernel) // stride + 1


def relu(features: Tensor) -> Tensor:
    """ReLU, in place in eager networks.

    A network compiled for a CPU keeps the result for the backward pass: torch's compiler would keep a mask of bytes,
    which its code for CPUs stores and loads one at a time (a compiled residual block takes 2.7 times as long with it).
    """
    if torch.compiler.is_compiling() and features.requires_grad and features.device.type == "cpu":
        return CompiledReLU.apply(features)
    return features.relu_()


class CompiledReLU(torch.autograd.Function):
    """ReLU whose gradient is taken from its result."""

    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        """max(features, 0)."""
        result = features.relu()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The gradient where the result is above zero."""
        (result,) = ctx.saved_tensors
        return gradients[0] * result.sign()


def is_safe_in_channels_last(net: nn.Module) -> bool:
    """Whether every 2-D convolution of `net` may run in channels_last on a CPU.

    oneDNN (in torch 2.14) writes past the end of its buffers in the weight gradient of strided convolutions of one
    point with fewer than 16 input channels, which ends the process.
    """
    return not any(
        isinstance(part, nn.Conv2d)
        and max(part.kernel_size) == 1
        and max(part.stride) > 1
        and part.in_channels < ONEDNN_BLOCK
        for part in net.modules()
    )


class SqueezeExcitation(nn.Module):
    """Scale every channel by a gate computed from the means of all channels.

    Source: Hu et al. 2018, "Squeeze-and-Excitation Networks", equations 2 to 4.
    """

    def __init__(self, channels: int, reduction: int = 8) -> None:
        super().__init__()
        self.squeeze = nn.Linear(channels, channels // reduction)
        self.excite = nn.Linear(channels // reduction, channels)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:
        """(batch, channels, mels, frames) in and out."""
        if lengths is None and features.requires_grad:
            weights = self.squeeze.weight, self.squeeze.bias, self.excite.weight, self.excite.bias
            return TrainingGate.apply(features, *weights)
        means = mean_over_frames(features.mean(dim=2), lengths)  # (batch, channels)
        gate = self.excite(self.squeeze(means).relu()).sigmoid()
        return features * gate[:, :, None, None]


class TrainingGate(torch.autograd.Function):
    """Squeeze-and-excitation of full crops as one function: its gradient is one pass over the features.

    Autograd would write the scaled gradient first and add the share of the means in a second pass, several times slower
    than the first on a CPU. The gate is computed in the precision of its weights, not in that of autocast.
    """

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, squeeze: Tensor, squeeze_bias: Tensor, excite: Tensor, excite_bias: Tensor
    ) -> Tensor:
        """The scaled features, in their precision.

        Args:
            ctx: torch's.
            features: (batch, channels, mels, frames).
            squeeze: (hidden, channels).
            squeeze_bias: (hidden,).
            excite: (channels, hidden).
            excite_bias: (channels,).
        """
        with torch.autocast(features.device.type, enabled=False):
            means = _sums(features, squeeze.dtype) / features[0, 0].numel()
            hidden = torch.addmm(squeeze_bias, means, squeeze.t()).relu()
            gate = torch.addmm(excite_bias, hidden, excite.t()).sigmoid()
        ctx.save_for_backward(features, squeeze, excite, means, hidden, gate)
        return features * gate.to(features.dtype)[:, :, None, None]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Gradients of features and weights, in their shapes and precisions."""
        features, squeeze, excite, means, hidden, gate = ctx.saved_tensors
        (gradient,) = gradients
        of_gate = _sums(gradient * features, gate.dtype)
        of_excited = of_gate * gate * (1 - gate)
        of_squeezed = (of_excited @ excite) * hidden.sign()
        of_means = (of_squeezed @ squeeze) / features[0, 0].numel()
        share, factor = (values.to(features.dtype)[:, :, None, None] for values in (of_means, gate))
        of_features = torch.addcmul(share, gradient, factor)
        of_weights = (of_squeezed.t() @ means, of_squeezed.sum(0), of_excited.t() @ hidden, of_excited.sum(0))
        return of_features, *of_weights


def _sums(features: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums over mels and frames, (batch, channels) of `dtype`."""
    # A CPU copies all features to float32 before it adds them into float32; only float16 needs that, lest it overflow.
    is_wide = features.dtype == torch.bfloat16
    return features.sum((2, 3), dtype=features.dtype if is_wide else dtype).to(dtype)


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with batch norm, an optional channel gate, and a shortcut around them.

    Args:
        channels_in: channels of the input.
        channels: channels of the output.
        stride: of the first convolution along mels and frames.
        gated: with squeeze-and-excitation.
        relu_first: ReLU before the first batch norm, as voxceleb_trainer's blocks have it, instead of after.
    """

    def __init__(
        self, channels_in: int, channels: int, stride: int = 1, gated: bool = True, relu_first: bool = False
    ) -> None:
        super().__init__()
        self.stride = stride
        self.relu_first = relu_first
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.gate = SqueezeExcitation(channels) if gated else None
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, channels, mels, frames) and valid frames, in and out."""
        lengths = strided_length(lengths, self.stride)
        hidden = self.conv1(features)
        hidden = self.norm1(relu(hidden)) if self.relu_first else relu(self.norm1(hidden))
        hidden = mask_frames(hidden, lengths)
        hidden = mask_frames(self.norm2(self.conv2(hidden)), lengths)
        if self.gate is not None:
            hidden = self.gate(hidden, lengths)
        return mask_frames(relu(hidden + self.shortcut(features)), lengths), lengths


class ResidualStage(nn.Module):
    """Blocks one after another; only the first one strides and widens."""

    def __init__(
        self,
        channels_in: int,
        channels: int,
        num_blocks: int,
        stride: int,
        gated: bool = True,
        relu_first: bool = False,
    ) -> None:
        super().__init__()
        blocks = [ResidualBlock(channels_in, channels, stride, gated, relu_first)]
        blocks += [ResidualBlock(channels, channels, 1, gated, relu_first) for _ in range(num_blocks - 1)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, channels, mels, frames) and valid frames, in and out."""
        for block in self.blocks:
            features, lengths = block(features, lengths)
        return features, lengths


def initialize_convolutions(module: nn.Module) -> None:
    """Kaiming-normal (fan out, ReLU) for every 2-D convolution, ones and zeros for every 2-D batch norm."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(part, nn.BatchNorm2d):
            nn.init.ones_(part.weight)
            nn.init.zeros_(part.bias)
