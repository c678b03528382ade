"""ReDimNet2: ReDimNet whose later stages see fewer frames, which are repeated before they join the maps before."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from speakernet.models.layers import MaskedConvolution, check_frames, mask_frames
from speakernet.models.options.redimnet import ReDimNet2Options
from speakernet.models.redim_blocks import EPSILON, ChannelNorm, FrameGroupNorm, WeightedSum
from speakernet.models.redimnet import Grid, Stage, fold, time_context
from speakernet.models.trunk import Trunk


class ReDimNet2(Trunk):
    """Reshape-dimensions network with pooling over time, sizes B0 to B6.

    Args:
        options: stages, blocks, what looks along time, and how the maps join.
        num_features: mel bands of the front end, a multiple of the product of the strides along mels.

    Raises:
        ValueError: mel bands that the strides do not divide.

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
            # Every stage gives its maps at the full number of frames, so the next one strides by all strides so far.
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

        Frames at the end that fill no stride (fewer than four) are not heard.

        Raises:
            ValueError: an utterance shorter than one stride.
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
    """A stage on fewer frames, which gives one map or two of as many frames as there were."""

    joins_both = False
    """Whether what it holds before its context is a map of its own."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        # Here, not in the class: a module set later would stay hidden behind a class attribute.
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
