"""ReDimNet and ReDimNet2: maps of mels and frames folded into sequences of frames and back.

Every layer that reads several frames masks its own input; between layers, frames past an
utterance's end are undefined.
"""

import math
import types
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from speakernet.frontend.features import Lengths, valid_frames
from speakernet.models.layers import (
    Foldable,
    MaskedConvolution,
    SqueezeExcitation,
    Trunk,
    check_frames,
    mask_frames,
    mean_over_frames,
    relu,
    valid_length,
)
from speakernet.models.options.redimnet import ReDimNet2Options, ReDimNetOptions
from speakernet.models.tdnn import FrameConvolution

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
        last = features.movedim(1, -1)  # (batch, …, channels)
        normed = functional.layer_norm(last, last.shape[-1:], self.weight, self.bias, EPSILON)
        return normed.movedim(-1, 1)


class FrameGroupNorm(nn.GroupNorm):
    """Group norm of (batch, channels, frames) with statistics of the valid frames only."""

    def forward(self, features: Tensor, lengths: Lengths = None) -> Tensor:  # type: ignore[override]
        """(batch, channels, frames) in and out."""
        if lengths is None:
            return super().forward(features)
        # (batch, groups, channels, frames)
        grouped = mask_frames(features, lengths).unflatten(1, (self.num_groups, -1))
        mean = mean_over_frames(grouped.mean(dim=2), lengths)[:, :, None, None]
        centred = mask_frames(grouped - mean, lengths)
        variance = mean_over_frames(centred.square().mean(dim=2), lengths)[:, :, None, None]
        # (batch, groups x channels, frames)
        normed = (centred * torch.rsqrt(variance + self.eps)).flatten(1, 2)
        return normed * self.weight.unsqueeze(1) + self.bias.unsqueeze(1)


class WeightedSum(nn.Module):
    """Weighted mean of feature maps, with one learned weight for each map and channel."""

    def __init__(self, num_maps: int, channels: int) -> None:
        super().__init__()
        # With zeros the softmax starts as the plain mean of the maps.
        self.weight = nn.Parameter(
            torch.zeros(1, num_maps, channels, 1), requires_grad=num_maps > 1
        )

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Maps of (batch, channels, frames) to one."""
        if len(maps) == 1:
            return maps[0]
        weights = self.weight.softmax(dim=1)  # (1, maps, channels, 1)
        total = maps[0] * weights[:, 0]
        for index, features in enumerate(maps[1:], start=1):
            total = total + features * weights[:, index]
        return total


class MelExcitation(SqueezeExcitation):
    """Squeeze-and-excitation with mel bands in place of channels.

    Source: Thienpondt et al. 2021, "Integrating frequency translational invariance in TDNNs and
    frequency positional information in 2D ResNets", section 3.2.
    """

    def forward(self, features: Tensor, lengths: Lengths = None) -> Tensor:
        """(batch, channels, mels, frames) in and out; frames past an utterance's end must be
        zero.
        """
        means = mean_over_frames(features.mean(dim=1), lengths)  # (batch, mels)
        return features * self.gate(means)[:, None, :, None]


class GroupedResidualBlock(Foldable):
    """Two grouped 3 x 3 convolutions, each followed by a 1 x 1, an optional gate over mels, and a
    shortcut.
    """

    norm_behind = types.MappingProxyType({"point2": "norm2"})

    def __init__(
        self, channels: int, groups: int, num_mels: int, kernel: tuple[int, int], gated: bool
    ) -> None:
        super().__init__()
        self.conv1 = MaskedConvolution(channels, channels, groups=groups)
        self.point1 = nn.Conv2d(channels, channels, 1)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = MaskedConvolution(channels, channels, groups=groups)
        self.point2 = nn.Conv2d(channels, channels, 1)
        self.norm2 = nn.BatchNorm2d(channels)
        # `se_channels=min(64, max(c, 32))` in the authors' model.py.
        self.gate = MelExcitation(num_mels, min(64, max(channels, 32))) if gated else None

    def forward(self, features: Tensor, lengths: Lengths = None) -> Tensor:
        """(batch, channels, mels, frames) in and out."""
        hidden = self.norm1(relu(self.point1(self.conv1(features, lengths))))
        hidden = self.norm2(self.point2(self.conv2(hidden, lengths)))
        if self.gate is not None:
            hidden = self.gate(mask_frames(hidden, lengths), lengths)
        return relu(hidden + features)


class ConvNeXtBlock(Foldable):
    """A grouped convolution, batch norm, an activation, a 1 x 1 convolution, and a shortcut, over
    mels and frames.
    """

    norm_behind = types.MappingProxyType({"convs.0": "norm"})

    def __init__(
        self,
        channels: int,
        groups: int,
        num_mels: int,
        kernel: tuple[int, int],
        activation: type[nn.Module],
    ) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [MaskedConvolution(channels, channels, kernel, groups, bias=True)]
        )
        self.norm = nn.BatchNorm2d(channels)
        self.activation = activation()
        self.point = nn.Conv2d(channels, channels, 1)

    def forward(self, features: Tensor, lengths: Lengths = None) -> Tensor:
        """(batch, channels, mels, frames) in and out."""
        hidden = self.norm(self.convs[0](features, lengths))
        return features + self.point(self.activation(hidden))  # type: ignore[no-any-return]


class FrameConvNeXtBlock(nn.Module):
    """Parallel depthwise convolutions over frames, batch norm, GELU, a 1 x 1 convolution, and a
    shortcut.
    """

    def __init__(self, channels: int, kernels: Sequence[int]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            FrameConvolution(channels, channels, kernel, groups=channels) for kernel in kernels
        )
        self.norm = nn.BatchNorm1d(channels * len(kernels))
        self.point = nn.Conv1d(channels * len(kernels), channels, 1)

    def forward(self, features: Tensor, lengths: Lengths = None) -> Tensor:
        """(batch, channels, frames) in and out."""
        # (batch, kernels x channels, frames)
        hidden = torch.cat([conv(features, lengths) for conv in self.convs], dim=1)
        hidden = functional.gelu(self.norm(hidden))
        return features + self.point(hidden)  # type: ignore[no-any-return]


class PositionConvolution(nn.Module):
    """A wide depthwise convolution with norm and shortcut: the position encoding of the
    attention.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = FrameConvolution(channels, channels, POSITION_KERNEL, groups=channels)
        self.norm = ChannelNorm(channels)

    def forward(self, features: Tensor, lengths: Lengths = None) -> Tensor:
        """(batch, channels, frames) in and out."""
        return features + self.norm(self.conv(features, lengths))  # type: ignore[no-any-return]


class TransformerLayer(nn.Module):
    """Self-attention and two linear layers, each with a shortcut followed by a layer norm.

    Source: Vaswani et al. 2017, "Attention is all you need", section 3; with the tanh approximation
    of GELU.
    """

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        if channels % HEADS:
            raise ValueError(
                f"attention with {HEADS} heads cannot split {channels} channels (channels x mel "
                "bands / divisor); choose a different number of mel bands or channels"
            )
        self.query = nn.Linear(channels, channels)
        self.key = nn.Linear(channels, channels)
        self.value = nn.Linear(channels, channels)
        self.out = nn.Linear(channels, channels)
        self.norm1 = nn.LayerNorm(channels, eps=EPSILON)
        self.widen = nn.Linear(channels, hidden)
        self.narrow = nn.Linear(hidden, channels)
        self.norm2 = nn.LayerNorm(channels, eps=EPSILON)

    def forward(self, features: Tensor, lengths: Lengths = None) -> Tensor:
        """(batch, channels, frames) in and out."""
        frames = features.transpose(1, 2)  # (batch, frames, channels)
        query = split_heads(self.query(frames))
        key = split_heads(self.key(frames))
        value = split_heads(self.value(frames))
        valid = None
        if lengths is not None:
            # Keys past the end are masked; the output of queries past the end is never read.
            valid = valid_frames(lengths, frames.shape[1])[:, None, None, :]
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=valid)
        attended = attended.transpose(1, 2).flatten(2)  # (batch, frames, channels)
        frames = self.norm1(frames + self.out(attended))
        hidden = functional.gelu(self.widen(frames), approximate="tanh")
        frames = self.norm2(frames + self.narrow(hidden))
        return frames.transpose(1, 2)  # type: ignore[no-any-return]


def split_heads(frames: Tensor) -> Tensor:
    """(batch, frames, channels) to (batch, heads, frames, channels / heads)."""
    return frames.unflatten(2, (HEADS, -1)).transpose(1, 2)


class TimeContext(nn.Module):
    """Reduces the channels, applies layers along time, restores the channels, and adds a
    shortcut.
    """

    def __init__(self, channels: int, hidden: int, kind: str) -> None:
        super().__init__()
        self.conv_in = nn.Conv1d(channels, hidden, 1)
        self.norm_in = ChannelNorm(hidden)
        self.layers = nn.ModuleList()
        if kind == "att":
            self.layers.extend([PositionConvolution(hidden), TransformerLayer(hidden, 2 * hidden)])
        elif kind == "conv":
            self.layers.extend(FrameConvNeXtBlock(hidden, WIDE_KERNELS) for _ in range(4))
        else:
            self.layers.extend(FrameConvNeXtBlock(hidden, (kernel,)) for kernel in CONTEXT_KERNELS)
            self.layers.append(TransformerLayer(hidden, hidden))
        self.conv_out = nn.Conv1d(hidden, channels, 1)

    def forward(self, features: Tensor, lengths: Lengths = None) -> Tensor:
        """(batch, channels, frames) in and out."""
        hidden = self.norm_in(self.conv_in(features))  # (batch, hidden channels, frames)
        for layer in self.layers:
            hidden = layer(hidden, lengths)
        return features + self.conv_out(hidden)  # type: ignore[no-any-return]


BLOCKS: dict[str, Callable[[int, int, int, tuple[int, int]], nn.Module]] = {
    "basic_resnet": partial(GroupedResidualBlock, gated=False),
    "basic_resnet_fwse": partial(GroupedResidualBlock, gated=True),
    "convnext_like": partial(ConvNeXtBlock, activation=nn.GELU),
    "convnext_like_relu": partial(ConvNeXtBlock, activation=nn.ReLU),
}
"""Blocks over mels and frames by their published names; arguments are channels, groups, mel bands,
kernel."""


def fold(features: Tensor) -> Tensor:
    """(batch, channels, mels, frames) to (batch, mels x channels, frames)."""
    return features.transpose(1, 2).flatten(1, 2)


def unfold(frames: Tensor, channels: int) -> Tensor:
    """(batch, mels x channels, frames) to (batch, channels, mels, frames)."""
    # Mels vary slowest, as in the authors' `to2d` and therefore in published weights.
    return frames.unflatten(1, (-1, channels)).transpose(1, 2)


class Stage(nn.Module):
    """Sums all maps so far, unfolds, strides, applies blocks, narrows, folds, and applies a time
    context.

    It returns one map or two with the full number of frames, repeating each strided frame.
    """

    def __init__(
        self,
        options: ReDimNetOptions | ReDimNet2Options,
        aggregate: WeightedSum,
        channels: int,
        num_mels: int,
        strides: tuple[int, int],
        sizes: tuple[float, ...],
    ) -> None:
        super().__init__()
        num_blocks, width, kernel_mels, kernel_frames, divisor = sizes
        if num_mels % strides[0]:
            raise ValueError(
                f"ReDimNet: a stride of {strides[0]} does not divide {num_mels} mel bands; set "
                "frontend.num_mels to a multiple of the product of all strides, such as 72"
            )
        later = options if isinstance(options, ReDimNet2Options) else None
        self.channels = channels
        inner = channels * strides[0]
        self.num_mels = num_mels // strides[0]
        self.out_channels = inner
        size = channels * num_mels
        wide = int(inner * width)
        self.aggregate = aggregate
        groups = 1
        if later and later.grouped_strides:
            groups = math.gcd(channels, wide)
        self.conv = nn.Conv2d(channels, wide, strides, stride=strides, groups=groups)
        kernel = (int(kernel_mels), int(kernel_frames))
        self.blocks = nn.ModuleList(
            BLOCKS[options.block](wide, wide // options.group_channels, self.num_mels, kernel)
            for _ in range(int(num_blocks))
        )
        self.narrow: nn.Module | None = None
        if width != 1 and later:
            self.narrow = nn.Sequential(
                nn.Conv2d(wide, inner, 1), nn.BatchNorm2d(inner, eps=EPSILON)
            )
        elif width != 1:
            self.narrow = nn.Sequential(
                MaskedConvolution(wide, inner, groups=inner // options.group_channels, bias=True),
                nn.BatchNorm2d(inner, eps=EPSILON),
                nn.GELU(),
                nn.Conv2d(inner, inner, 1),
            )
        self.context: TimeContext | None = None
        if divisor:
            self.context = TimeContext(size, size // int(divisor), options.context)
        self.num_maps = 1
        if later and later.joins_both and divisor:
            self.num_maps = 2
        self.norms = nn.ModuleList()
        if later and later.map_norm:
            self.norms.extend(FrameGroupNorm(options.channels, size) for _ in range(self.num_maps))

    def forward(self, maps: Sequence[Tensor], lengths: Lengths = None) -> list[Tensor]:
        """From maps of (batch, channels, frames) to a new map, or two: before and after the
        context.
        """
        # Two views of the same values: as an image, in which convolutions see neighbouring mels,
        # and as a sequence of long vectors, in which the context sees neighbouring frames. Folding
        # costs nothing, so a stage can do both.
        stride = self.conv.stride[1]
        strided = valid_length(lengths, stride, stride)
        image = unfold(self.aggregate(maps), self.channels)  # (batch, channels, mels, frames)
        hidden = self.conv(image)  # (batch, wide, mels / stride, frames / stride)
        for block in self.blocks:
            hidden = block(hidden, strided)
        if self.narrow is not None:
            hidden = self.narrow(mask_frames(hidden, strided))
        new_maps = [fold(hidden)]  # (batch, channels x mels, frames / stride)
        if self.context is not None:
            new_maps.append(self.context(new_maps[0], strided))
        new_maps = new_maps[-self.num_maps :]
        if stride > 1:
            # Back to the full number of frames, so that all maps can be added.
            new_maps = [new_map.repeat_interleave(stride, dim=2) for new_map in new_maps]
        for index, norm in enumerate(self.norms):
            new_maps[index] = norm(new_maps[index], lengths)
        return new_maps


class ReDimNet(Trunk):
    """Reshape-dimensions network, and ReDimNet2, whose later stages see fewer frames; sizes B0 to
    B6 of each.

    Source: Yakovlev et al. 2024, "Reshape dimensions network for speaker recognition"; "ReDimNet2:
    scaling speaker verification via time-pooled dimension reshaping", Interspeech 2026. Sizes as in
    wespeaker, which took those of ReDimNet2 from the authors.
    """

    def __init__(self, options: ReDimNetOptions | ReDimNet2Options, num_features: int) -> None:
        super().__init__()
        later = options if isinstance(options, ReDimNet2Options) else None
        size = options.channels * num_features
        self.stem = nn.Sequential(
            MaskedConvolution(1, options.channels, bias=True), ChannelNorm(options.channels)
        )
        self.stem_norm: FrameGroupNorm | None = None
        if later and later.map_norm:
            self.stem_norm = FrameGroupNorm(options.channels, size)
        channels = options.channels
        num_mels = num_features
        num_maps = 1
        self.stages = nn.ModuleList()
        for numbers in options.stages:
            if later:
                stride, frame_stride, *sizes = numbers
            else:
                stride, num_blocks, width, divisor = numbers
                frame_stride = 1
                sizes = [num_blocks, width, 3, 3, divisor]
            # Every stage returns maps at the full number of frames, so the next one strides by all
            # strides so far.
            self.min_frames *= int(frame_stride)
            # The first stage of ReDimNet has one weight without effect, as in the authors'
            # `weigth1d(C=1)`.
            aggregate = WeightedSum(num_maps, size if later or self.stages else 1)
            strides = (int(stride), self.min_frames)
            stage = Stage(options, aggregate, channels, num_mels, strides, tuple(sizes))
            self.stages.append(stage)
            channels = stage.out_channels
            num_mels = stage.num_mels
            num_maps += stage.num_maps
        self.aggregate = WeightedSum(num_maps, size)
        self.unfolded_channels = channels if later and later.keeps_mels else 0
        self.head: nn.Module = nn.Identity()
        self.out_channels = options.aggregate_channels or size
        if options.aggregate_channels and self.unfolded_channels:
            self.head = nn.Conv2d(channels, self.out_channels, 1)
            self.out_channels *= num_mels
        elif options.aggregate_channels:
            self.head = nn.Conv1d(size, self.out_channels, 1)
            if not later:
                self.head = nn.Sequential(self.head, nn.BatchNorm1d(self.out_channels))

    def forward(self, features: Tensor, lengths: Lengths = None) -> tuple[Tensor, Lengths]:
        """(batch, mels, frames) to (batch, channels, frames), and the valid frames of each.

        Frames at the end that do not fill a stride are dropped.
        """
        # All maps have the same number of values, whatever their channels and mels: a stage that
        # halves the mels doubles the channels. So every stage can read a learned sum of the stem
        # and of all stages before it, and so does the head.
        stride = self.min_frames
        if stride > 1:
            check_frames(features, lengths, stride, "ReDimNet2")
            features = features[:, :, : features.shape[2] // stride * stride]
            if lengths is not None:
                lengths = lengths // stride * stride
        image = mask_frames(features, lengths).unsqueeze(1)  # (batch, 1, mels, frames)
        hidden = fold(self.stem(image))  # (batch, channels x mels, frames)
        if self.stem_norm is not None:
            hidden = self.stem_norm(hidden, lengths)
        maps = [hidden]
        for stage in self.stages:
            maps.extend(stage(tuple(maps), lengths))
        hidden = self.aggregate(maps)
        if self.unfolded_channels:
            image = unfold(hidden, self.unfolded_channels)  # (batch, channels, mels, frames)
            hidden = self.head(image).flatten(1, 2)  # (batch, channels x mels, frames)
        else:
            hidden = self.head(hidden)
        return mask_frames(hidden, lengths), lengths
