"""The blocks of ReDimNet and ReDimNet2: over mels and frames, over frames alone, and the sums between them.

Every layer that looks at more than one frame masks its own input; what lies past an utterance's end has no meaning in
between.
"""

import types
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from speakernet.frontend.features import valid_frames
from speakernet.models.layers import (
    FrameConvolution,
    MaskedConvolution,
    MelExcitation,
    mask_frames,
    mean_over_frames,
    relu,
)

EPSILON = 1e-6
HEADS = 4
POSITION_KERNEL = 59
CONTEXT_KERNELS = (7, 19, 31, 59)
WIDE_KERNELS = (7, 15, 31)


class ChannelNorm(nn.Module):
    """Layer norm over the channels of (batch, channels, …)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, features: Tensor) -> Tensor:
        """(batch, channels, …) in and out."""
        last = features.movedim(1, -1)
        return functional.layer_norm(last, last.shape[-1:], self.weight, self.bias, EPSILON).movedim(-1, 1)


class FrameGroupNorm(nn.GroupNorm):
    """Group norm of (batch, channels, frames) whose statistics are of valid frames only."""

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """(batch, channels, frames) in and out."""
        if lengths is None:
            return super().forward(features)
        grouped = mask_frames(features, lengths).unflatten(
            1, (self.num_groups, -1)
        )  # (batch, groups, channels, frames)
        mean = mean_over_frames(grouped.mean(dim=2), lengths)[:, :, None, None]
        centred = mask_frames(grouped - mean, lengths)
        variance = mean_over_frames(centred.square().mean(dim=2), lengths)[:, :, None, None]
        normed = (centred * torch.rsqrt(variance + self.eps)).flatten(1, 2)
        return normed * self.weight.unsqueeze(1) + self.bias.unsqueeze(1)


class WeightedSum(nn.Module):
    """The mean of feature maps under learned weights, one for each map and channel.

    Args:
        num_maps: that are summed; the weight of a single one is kept, frozen, as published checkpoints hold it.
        channels: of each map, or 1 for a weight that all channels share.
    """

    def __init__(self, num_maps: int, channels: int) -> None:
        super().__init__()
        # Zeros: behind the softmax training begins with the plain mean of the maps.
        self.weight = nn.Parameter(torch.zeros(1, num_maps, channels, 1), requires_grad=num_maps > 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Maps of (batch, channels, frames) to one."""
        if len(maps) == 1:
            return maps[0]
        weights = self.weight.softmax(dim=1)
        total = maps[0] * weights[:, 0]
        for index, features in enumerate(maps[1:], start=1):
            total = total + features * weights[:, index]
        return total


class GroupedResidualBlock(nn.Module):
    """Two grouped 3 x 3 convolutions, each followed by a 1 x 1, an optional gate over mels, and a shortcut.

    Args:
        channels: in and out.
        group_channels: of each group of the 3 x 3 convolutions.
        num_mels: bands, for the gate.
        gated: with squeeze-and-excitation over mels.
    """

    norm_behind = types.MappingProxyType({"point2": "norm2"})

    def __init__(self, channels: int, group_channels: int, num_mels: int, gated: bool) -> None:
        super().__init__()
        groups = channels // group_channels
        self.conv1 = MaskedConvolution(channels, channels, groups=groups)
        self.point1 = nn.Conv2d(channels, channels, 1)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = MaskedConvolution(channels, channels, groups=groups)
        self.point2 = nn.Conv2d(channels, channels, 1)
        self.norm2 = nn.BatchNorm2d(channels)
        # The hidden width is `se_channels=min(64, max(c, 32))` of the authors' model.py.
        self.gate = MelExcitation(num_mels, min(64, max(channels, 32))) if gated else None

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:
        """(batch, channels, mels, frames) in and out."""
        hidden = self.norm1(relu(self.point1(self.conv1(features, lengths))))
        hidden = self.norm2(self.point2(self.conv2(hidden, lengths)))
        if self.gate is not None:
            hidden = self.gate(mask_frames(hidden, lengths), lengths)
        return relu(hidden + features)


class ConvNeXtBlock(nn.Module):
    """A grouped convolution, batch norm, an activation, a 1 x 1 convolution, and a shortcut, over mels and frames."""

    norm_behind = types.MappingProxyType({"convs.0": "norm"})

    def __init__(self, channels: int, group_channels: int, kernel: tuple[int, int], activation: nn.Module) -> None:
        super().__init__()
        groups = channels // group_channels
        self.convs = nn.ModuleList([MaskedConvolution(channels, channels, kernel, groups, bias=True)])
        self.norm = nn.BatchNorm2d(channels)
        self.activation = activation
        self.point = nn.Conv2d(channels, channels, 1)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:
        """(batch, channels, mels, frames) in and out."""
        return features + self.point(self.activation(self.norm(self.convs[0](features, lengths))))  # type: ignore[no-any-return]


class FrameConvNeXtBlock(nn.Module):
    """Depthwise convolutions over frames beside each other, batch norm, GELU, a 1 x 1 convolution, and a shortcut."""

    def __init__(self, channels: int, kernels: Sequence[int]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(FrameConvolution(channels, channels, kernel, groups=channels) for kernel in kernels)
        self.norm = nn.BatchNorm1d(channels * len(kernels))
        self.point = nn.Conv1d(channels * len(kernels), channels, 1)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:
        """(batch, channels, frames) in and out."""
        heard = torch.cat([conv(features, lengths) for conv in self.convs], dim=1)
        return features + self.point(functional.gelu(self.norm(heard)))  # type: ignore[no-any-return]


class PositionConvolution(nn.Module):
    """A wide depthwise convolution and a norm, added: what tells attention where a frame is."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = FrameConvolution(channels, channels, POSITION_KERNEL, groups=channels)
        self.norm = ChannelNorm(channels)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:
        """(batch, channels, frames) in and out."""
        return features + self.norm(self.conv(features, lengths))  # type: ignore[no-any-return]


class TransformerLayer(nn.Module):
    """Self-attention and two linear layers, each with a shortcut and a layer norm behind it.

    Args:
        channels: in and out, a multiple of 4, the number of heads.
        hidden: between the two linear layers.

    Raises:
        ValueError: channels that the heads do not share evenly.

    Source: Vaswani et al. 2017, "Attention is all you need", section 3; GELU in its approximation by tanh.
    """

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        if channels % HEADS:
            raise ValueError(
                f"attention shares {HEADS} heads among its channels, found {channels} (channels x mel bands / "
                "reduction); choose another number of mel bands or channels"
            )
        self.query = nn.Linear(channels, channels)
        self.key = nn.Linear(channels, channels)
        self.value = nn.Linear(channels, channels)
        self.out = nn.Linear(channels, channels)
        self.norm1 = nn.LayerNorm(channels, eps=EPSILON)
        self.widen = nn.Linear(channels, hidden)
        self.narrow = nn.Linear(hidden, channels)
        self.norm2 = nn.LayerNorm(channels, eps=EPSILON)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:
        """(batch, channels, frames) in and out."""
        frames = features.transpose(1, 2)
        query, key, value = (
            layer(frames).unflatten(2, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )  # (batch, heads, frames, channels / heads)
        # Keys past the end are not heard; queries there give values without meaning, which nobody reads.
        heard = None if lengths is None else valid_frames(lengths, frames.shape[1])[:, None, None, :]
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=heard)
        frames = self.norm1(frames + self.out(attended.transpose(1, 2).flatten(2)))
        hidden = functional.gelu(self.widen(frames), approximate="tanh")
        return self.norm2(frames + self.narrow(hidden)).transpose(1, 2)  # type: ignore[no-any-return]


class TimeContext(nn.Module):
    """Fewer channels, layers that look along time, the channels back, and a shortcut.

    Args:
        channels: in and out.
        hidden: of the layers.
        kind: name in `CONTEXTS`.
    """

    def __init__(self, channels: int, hidden: int, kind: str) -> None:
        super().__init__()
        self.conv_in = nn.Conv1d(channels, hidden, 1)
        self.norm_in = ChannelNorm(hidden)
        self.layers = nn.ModuleList(CONTEXTS[kind](hidden))
        self.conv_out = nn.Conv1d(hidden, channels, 1)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:
        """(batch, channels, frames) in and out."""
        hidden = self.norm_in(self.conv_in(features))
        for layer in self.layers:
            hidden = layer(hidden, lengths)
        return features + self.conv_out(hidden)  # type: ignore[no-any-return]


def _attention(channels: int) -> list[nn.Module]:
    return [PositionConvolution(channels), TransformerLayer(channels, 2 * channels)]


def _convolution(channels: int) -> list[nn.Module]:
    return [FrameConvNeXtBlock(channels, WIDE_KERNELS) for _ in range(4)]


def _convolution_and_attention(channels: int) -> list[nn.Module]:
    convolutions = [FrameConvNeXtBlock(channels, (kernel,)) for kernel in CONTEXT_KERNELS]
    return [*convolutions, TransformerLayer(channels, channels)]


CONTEXTS: dict[str, Callable[[int], list[nn.Module]]] = {
    "att": _attention,
    "conv": _convolution,
    "conv+att": _convolution_and_attention,
}
"""What looks along time, by the name that the published configurations give it."""

MakeBlock2d = Callable[[int, int, int, tuple[int, int]], nn.Module]
BLOCKS_2D: dict[str, MakeBlock2d] = {
    "basic_resnet": lambda channels, group, mels, kernel: GroupedResidualBlock(channels, group, mels, gated=False),
    "basic_resnet_fwse": lambda channels, group, mels, kernel: GroupedResidualBlock(channels, group, mels, gated=True),
    "convnext_like": lambda channels, group, mels, kernel: ConvNeXtBlock(channels, group, kernel, nn.GELU()),
    "convnext_like_relu": lambda channels, group, mels, kernel: ConvNeXtBlock(channels, group, kernel, nn.ReLU()),
}
"""Blocks over mels and frames from channels, channels of a group, mel bands and kernel, by their published names."""
