"""ReDimNet and ReDimNet2: maps of mels and frames folded into sequences of frames and back.

Every layer that reads several frames masks its own input; frames past an utterance's end have no meaning between.
"""

import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from speakernet.frontend.features import valid_frames
from speakernet.models.layers import (
    FrameConvolution,
    MaskedConvolution,
    MelExcitation,
    Trunk,
    check_frames,
    mask_frames,
    mean_over_frames,
    relu,
)
from speakernet.models.options.redimnet import ReDimNet2Options, ReDimNetOptions

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
    """Group norm of (batch, channels, frames) with statistics of the valid frames only."""

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
    """The mean of feature maps under learned weights, one for each map and channel."""

    def __init__(self, num_maps: int, channels: int) -> None:
        super().__init__()
        # Zeros: through the softmax, training starts with the plain mean of the maps.
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
    """Two grouped 3 x 3 convolutions, each followed by a 1 x 1, an optional gate over mels, and a shortcut."""

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
    """Parallel depthwise convolutions over frames, batch norm, GELU, a 1 x 1 convolution, and a shortcut."""

    def __init__(self, channels: int, kernels: Sequence[int]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(FrameConvolution(channels, channels, kernel, groups=channels) for kernel in kernels)
        self.norm = nn.BatchNorm1d(channels * len(kernels))
        self.point = nn.Conv1d(channels * len(kernels), channels, 1)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:
        """(batch, channels, frames) in and out."""
        hidden = torch.cat([conv(features, lengths) for conv in self.convs], dim=1)
        return features + self.point(functional.gelu(self.norm(hidden)))  # type: ignore[no-any-return]


class PositionConvolution(nn.Module):
    """A wide depthwise convolution and a norm, added: the position encoding of the attention."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = FrameConvolution(channels, channels, POSITION_KERNEL, groups=channels)
        self.norm = ChannelNorm(channels)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:
        """(batch, channels, frames) in and out."""
        return features + self.norm(self.conv(features, lengths))  # type: ignore[no-any-return]


class TransformerLayer(nn.Module):
    """Self-attention and two linear layers, each with a shortcut and then a layer norm.

    Source: Vaswani et al. 2017, "Attention is all you need", section 3; GELU in its approximation by tanh.
    """

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        if channels % HEADS:
            raise ValueError(
                f"attention with {HEADS} heads of {channels} channels (channels x mel bands / reduction); choose other "
                "numbers of mel bands or channels"
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
        # Keys past the end are masked; queries there give values that nothing reads.
        valid = None if lengths is None else valid_frames(lengths, frames.shape[1])[:, None, None, :]
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=valid)
        frames = self.norm1(frames + self.out(attended.transpose(1, 2).flatten(2)))
        hidden = functional.gelu(self.widen(frames), approximate="tanh")
        return self.norm2(frames + self.narrow(hidden)).transpose(1, 2)  # type: ignore[no-any-return]


class TimeContext(nn.Module):
    """Fewer channels, layers along time, the channels back, and a shortcut."""

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
"""Layers along time, by the name in the published configurations."""

MakeBlock2d = Callable[[int, int, int, tuple[int, int]], nn.Module]
BLOCKS_2D: dict[str, MakeBlock2d] = {
    "basic_resnet": lambda channels, group, mels, kernel: GroupedResidualBlock(channels, group, mels, gated=False),
    "basic_resnet_fwse": lambda channels, group, mels, kernel: GroupedResidualBlock(channels, group, mels, gated=True),
    "convnext_like": lambda channels, group, mels, kernel: ConvNeXtBlock(channels, group, kernel, nn.GELU()),
    "convnext_like_relu": lambda channels, group, mels, kernel: ConvNeXtBlock(channels, group, kernel, nn.ReLU()),
}
"""Blocks over mels and frames of (channels, channels of a group, mel bands, kernel), by their published names."""


@dataclass(frozen=True)
class Grid:
    """The layout of the values of a frame: channels x mels."""

    channels: int
    num_mels: int

    def unfold(self, frames: Tensor) -> Tensor:
        """(batch, mels x channels, frames) to (batch, channels, mels, frames)."""
        # Mels vary slowest, as in the authors' `to2d` and so in published weights.
        return frames.unflatten(1, (self.num_mels, self.channels)).transpose(1, 2)


def fold(features: Tensor) -> Tensor:
    """(batch, channels, mels, frames) to (batch, mels x channels, frames)."""
    return features.transpose(1, 2).flatten(1, 2)


class ReDimNet(Trunk):
    """Reshape-dimensions network of Yakovlev et al., sizes B0 to B6.

    Source: Yakovlev et al. 2024, "Reshape dimensions network for speaker recognition"; sizes as in wespeaker.
    """

    def __init__(self, options: ReDimNetOptions, num_features: int) -> None:
        super().__init__()
        channels, group_channels = options.channels, options.group_channels
        block, context = options.block, options.context
        size = channels * num_features
        self.stem = nn.Sequential(MaskedConvolution(1, channels, bias=True), ChannelNorm(channels))
        grid, made = Grid(channels, num_features), []
        for index, sizes in enumerate(options.stages):
            stride, num_blocks, width, divisor = int(sizes[0]), int(sizes[1]), sizes[2], int(sizes[3])
            # The first stage has one map and, as in the authors' `weigth1d(C=1)`, one weight without effect.
            aggregate = WeightedSum(index + 1, size if index else 1)
            wide = int(stride * grid.channels * width)
            conv = nn.Conv2d(grid.channels, wide, (stride, 1), stride=(stride, 1))
            narrow = narrowing(wide, stride * grid.channels, group_channels) if width != 1 else None
            stage = Stage(grid, aggregate, conv, num_blocks, block, group_channels, narrow)
            if divisor:
                stage.context = time_context(size, divisor, context)
            made.append(stage)
            grid = stage.grid_out
        self.stages = nn.ModuleList(made)
        self.aggregate = WeightedSum(len(made) + 1, size)
        self.head: nn.Module = nn.Identity()
        aggregate_channels = options.aggregate_channels
        if aggregate_channels:
            self.head = nn.Sequential(nn.Conv1d(size, aggregate_channels, 1), nn.BatchNorm1d(aggregate_channels))
        self.out_channels = aggregate_channels or size

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, mels, frames) to (batch, channels x mels, frames), and the valid frames of each."""
        maps = [fold(self.stem(mask_frames(features, lengths).unsqueeze(1)))]
        for stage in self.stages:
            maps.append(stage(tuple(maps), lengths))
        return mask_frames(self.head(self.aggregate(maps)), lengths), lengths


class Stage(nn.Module):
    """The sum of all maps so far, unfolded, strided, through blocks, narrowed, folded, and through a time context."""

    def __init__(
        self,
        grid: Grid,
        aggregate: WeightedSum,
        conv: nn.Conv2d,
        num_blocks: int,
        block: str,
        group_channels: int,
        narrow: nn.Module | None,
        kernel: tuple[int, int] = (3, 3),
    ) -> None:
        super().__init__()
        stride = conv.stride[0]
        if grid.num_mels % stride:
            raise ValueError(
                f"ReDimNet's stride of {stride} does not divide {grid.num_mels} mel bands; set frontend.num_mels to a "
                "multiple of the product of all strides, such as 72"
            )
        self.grid = grid
        self.grid_out = Grid(grid.channels * stride, grid.num_mels // stride)
        self.aggregate = aggregate
        self.conv = conv
        make = BLOCKS_2D[block]
        self.blocks = nn.ModuleList(
            make(conv.out_channels, group_channels, self.grid_out.num_mels, kernel) for _ in range(num_blocks)
        )
        self.narrow = narrow
        self.context: nn.Module | None = None

    def folded(self, maps: Sequence[Tensor], lengths: Tensor | None) -> Tensor:
        """The output of the blocks over mels and frames; `lengths` are those after the stride."""
        hidden = self.conv(self.grid.unfold(self.aggregate(maps)))
        for block in self.blocks:
            hidden = block(hidden, lengths)
        if self.narrow is not None:
            hidden = self.narrow(mask_frames(hidden, lengths))
        return fold(hidden)

    def forward(self, maps: Sequence[Tensor], lengths: Tensor | None = None) -> Tensor:
        """Maps of (batch, channels, frames) to one more."""
        hidden = self.folded(maps, lengths)
        return hidden if self.context is None else self.context(hidden, lengths)  # type: ignore[no-any-return]


def narrowing(wide: int, channels: int, group_channels: int) -> nn.Sequential:
    """A grouped 3 x 3 convolution to fewer channels, batch norm, GELU, and a 1 x 1 convolution."""
    return nn.Sequential(
        MaskedConvolution(wide, channels, groups=channels // group_channels, bias=True),
        nn.BatchNorm2d(channels, eps=EPSILON),
        nn.GELU(),
        nn.Conv2d(channels, channels, 1),
    )


def time_context(size: int, divisor: int, kind: str) -> TimeContext:
    """The time context, with `size / divisor` channels inside."""
    return TimeContext(size, size // divisor, kind)


class ReDimNet2(Trunk):
    """ReDimNet2: ReDimNet whose later stages have fewer frames, repeated before they join the maps; sizes B0 to B6.

    Source: "ReDimNet2: scaling speaker verification via time-pooled dimension reshaping", Interspeech 2026; sizes as in
    wespeaker, which has them from the authors.
    """

    def __init__(self, options: ReDimNet2Options, num_features: int) -> None:
        super().__init__()
        channels = options.channels
        size = channels * num_features
        self.stem = nn.Sequential(MaskedConvolution(1, channels, bias=True), ChannelNorm(channels))
        self.stem_norm = FrameGroupNorm(channels, size) if options.map_norm else None
        grid, num_maps, frame_stride, made = Grid(channels, num_features), 1, 1, []
        for sizes in options.stages:
            stride, num_blocks, width, divisor = int(sizes[0]), int(sizes[2]), sizes[3], int(sizes[6])
            # Every stage returns maps at the full number of frames, so the next one strides by all strides so far.
            frame_stride *= int(sizes[1])
            wide = int(stride * grid.channels * width)
            groups = math.gcd(grid.channels, wide) if options.grouped_strides else 1
            strides = (stride, frame_stride)
            conv = nn.Conv2d(grid.channels, wide, strides, stride=strides, groups=groups)
            narrow = None
            if width != 1:
                inner = stride * grid.channels
                narrow = nn.Sequential(nn.Conv2d(wide, inner, 1), nn.BatchNorm2d(inner, eps=EPSILON))
            kernel = (int(sizes[4]), int(sizes[5]))
            aggregate = WeightedSum(num_maps, size)
            stage = PooledStage(
                grid, aggregate, conv, num_blocks, options.block, options.group_channels, narrow, kernel
            )
            if divisor:
                stage.context = time_context(size, divisor, options.context)
                stage.joins_both = options.joins_both
            if options.map_norm:
                stage.norms = nn.ModuleList(FrameGroupNorm(channels, size) for _ in range(1 + stage.joins_both))
            made.append(stage)
            num_maps += 1 + stage.joins_both
            grid = stage.grid_out
        self.stages = nn.ModuleList(made)
        self.frame_stride = self.min_frames = frame_stride
        self.aggregate = WeightedSum(num_maps, size)
        self.grid_out = grid if options.keeps_mels else None
        self.head: nn.Module = nn.Identity()
        self.out_channels = size
        if options.aggregate_channels:
            self.out_channels = options.aggregate_channels
            if options.keeps_mels:
                self.head = nn.Conv2d(grid.channels, self.out_channels, 1)
                self.out_channels *= grid.num_mels
            else:
                self.head = nn.Conv1d(size, self.out_channels, 1)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, mels, frames) to (batch, channels, frames), and the valid frames of each.

        Frames at the end that do not fill a stride are dropped.
        """
        check_frames(features, lengths, self.min_frames, "ReDimNet2")
        features = features[:, :, : features.shape[2] // self.frame_stride * self.frame_stride]
        if lengths is not None:
            lengths = lengths // self.frame_stride * self.frame_stride
        hidden = fold(self.stem(mask_frames(features, lengths).unsqueeze(1)))
        maps = [hidden if self.stem_norm is None else self.stem_norm(hidden, lengths)]
        for stage in self.stages:
            maps.extend(stage(tuple(maps), lengths))
        hidden = self.aggregate(maps)
        if self.grid_out is None:
            return mask_frames(self.head(hidden), lengths), lengths
        return mask_frames(self.head(self.grid_out.unfold(hidden)).flatten(1, 2), lengths), lengths


class PooledStage(Stage):
    """A stage on fewer frames, which returns one map or two with all frames."""

    joins_both = False
    """Whether the values before its context are a second map."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        # Here, not in the class: a class attribute would hide a module set later.
        self.norms: nn.ModuleList | None = None

    def forward(self, maps: Sequence[Tensor], lengths: Tensor | None = None) -> list[Tensor]:  # type: ignore[override]
        """Maps of (batch, channels, frames) to one more, or two."""
        stride = self.conv.stride[1]
        fewer = None if lengths is None else lengths // stride
        hidden = self.folded(maps, fewer)
        results = [hidden] if self.joins_both else []
        results.append(hidden if self.context is None else self.context(hidden, fewer))
        results = [one.repeat_interleave(stride, dim=2) if stride > 1 else one for one in results]
        if self.norms is None:
            return results
        return [norm(one, lengths) for norm, one in zip(self.norms, results, strict=True)]
