"""ReDimNet2: ReDimNet whose later stages see fewer frames, which are repeated before they join the maps before."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from speakernet.models.layers import MaskedConvolution, check_frames, mask_frames
from speakernet.models.redim_blocks import EPSILON, ChannelNorm, FrameGroupNorm, WeightedSum
from speakernet.models.redimnet import Grid, Stage, fold, time_context
from speakernet.models.trunk import Trunk, sized

StageSize = tuple[int, int, int, float, int, int, int]
"""Strides along mels and frames, blocks, how much wider they are inside, their kernel along mels and frames, and by
what the context divides its channels (0: no context)."""


class ReDimNet2(Trunk):
    """Reshape-dimensions network with pooling over time, sizes B0 to B6.

    What is 0, empty or None follows the named size.

    Args:
        num_features: mel bands of the front end, a multiple of the product of the strides along mels.
        channels: of the first stage.
        stages: for each stage its strides along mels and frames, blocks, inner width, the kernel of blocks that have a
            choice along mels and frames, and the context's divisor (0: no context).
        block: what the blocks over mels and frames are, a name of `redim_blocks.BLOCKS_2D`.
        context: what looks along time, a name of `redim_blocks.CONTEXTS`.
        group_channels: channels of a group in the blocks' convolutions.
        grouped_strides: the striding convolutions are grouped as far as their channels allow.
        aggregate_channels: of the last 1 x 1 convolution; -1 for none.
        keeps_mels: whether that convolution sees mels and frames, else frames alone.
        joins_both: what each stage holds before and behind its context joins the maps (`dual_agg`).
        map_norm: group norm of every map before it joins the others (`agg_gnorm`).
        embedding_norm: batch norm behind the embedding layer (`emb_bn`).

    Raises:
        ValueError: mel bands that the strides do not divide, or unknown names.

    Source: "ReDimNet2: scaling speaker verification via time-pooled dimension reshaping", Interspeech 2026; sizes as in
    wespeaker, which has them from the authors.
    """

    front_end_defaults: ClassVar[dict[str, Any]] = {"name": "fbank", "num_mels": 72}
    default_pooling = "GlobalASTP"
    tested_poolings: ClassVar[Sequence[str]] = ("GlobalASTP",)
    paper = "ReDimNet2 2026"
    published_dim = 192
    published_mels = 72
    has_norm_after_pooling = True
    default_channels: ClassVar[int]
    default_stages: ClassVar[Sequence[StageSize]]
    default_aggregate_channels: ClassVar[int] = 64
    default_keeps_mels: ClassVar[bool] = False

    def __init__(
        self,
        num_features: int,
        channels: int = 0,
        stages: Sequence[Sequence[float]] = (),
        block: str = "basic_resnet",
        context: str = "conv+att",
        group_channels: int = 1,
        grouped_strides: bool = True,
        aggregate_channels: int = 0,
        keeps_mels: bool | None = None,
        joins_both: bool = False,
        map_norm: bool = False,
        embedding_norm: bool = False,
    ) -> None:
        super().__init__()
        channels = channels or self.default_channels
        if embedding_norm:
            self.embedding_layer = "normed_linear"
        size = channels * num_features
        self.stem = nn.Sequential(MaskedConvolution(1, channels, bias=True), ChannelNorm(channels))
        self.stem_norm = FrameGroupNorm(channels, size) if map_norm else None
        grid, num_maps, frame_stride, made = Grid(channels, num_features), 1, 1, []
        for sizes in stages or self.default_stages:
            stride, num_blocks, width, divisor = int(sizes[0]), int(sizes[2]), sizes[3], int(sizes[6])
            frame_stride *= int(sizes[1])
            wide = int(stride * grid.channels * width)
            groups = math.gcd(grid.channels, wide) if grouped_strides else 1
            strides = (stride, frame_stride)
            conv = nn.Conv2d(grid.channels, wide, strides, stride=strides, groups=groups)
            narrow = None
            if width != 1:
                inner = stride * grid.channels
                narrow = nn.Sequential(nn.Conv2d(wide, inner, 1), nn.BatchNorm2d(inner, eps=EPSILON))
            kernel = (int(sizes[4]), int(sizes[5]))
            aggregate = WeightedSum(num_maps, size)
            stage = PooledStage(grid, aggregate, conv, num_blocks, block, group_channels, narrow, kernel)
            if divisor:
                stage.context = time_context(size, divisor, context)
                stage.joins_both = joins_both
            if map_norm:
                stage.norms = nn.ModuleList(FrameGroupNorm(channels, size) for _ in range(1 + stage.joins_both))
            made.append(stage)
            num_maps += 1 + stage.joins_both
            grid = stage.grid_out
        self.stages = nn.ModuleList(made)
        self.frame_stride = frame_stride
        self.aggregate = WeightedSum(num_maps, size)
        self._make_head(grid, size, aggregate_channels, keeps_mels)

    def _make_head(self, grid: Grid, size: int, aggregate_channels: int, keeps_mels: bool | None) -> None:
        wanted = aggregate_channels or self.default_aggregate_channels
        self.grid_out = grid if (self.default_keeps_mels if keeps_mels is None else keeps_mels) else None
        self.head: nn.Module = nn.Identity()
        self.out_channels = size
        if wanted < 0:
            return
        if self.grid_out is not None:
            self.head = nn.Conv2d(grid.channels, wanted, 1)
            self.out_channels = wanted * grid.num_mels
        else:
            self.head = nn.Conv1d(size, wanted, 1)
            self.out_channels = wanted

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, mels, frames) to (batch, channels, frames), and the valid frames of each.

        Frames at the end that fill no stride (fewer than four) are not heard.

        Raises:
            ValueError: an utterance shorter than one stride.
        """
        check_frames(features, lengths, self.frame_stride, "ReDimNet2")
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


def _stages(divisors: Sequence[int], widths: Sequence[float]) -> tuple[StageSize, ...]:
    """Six stages that halve mels and frames in turn."""
    blocks = (2, 3, 4, 5, 4, 3)
    strides = ((1, 1), (2, 1), (1, 2), (2, 1), (1, 2), (2, 1))
    return tuple(
        (*stride, num_blocks, width, 3, 3, divisor)
        for stride, num_blocks, width, divisor in zip(strides, blocks, widths, divisors, strict=True)
    )


NARROW = (2, 1, 1, 1, 1, 1)
WIDE = (4, 3, 2, 1, 1, 1)
REDIMNET2S = sized(
    ReDimNet2,
    {
        "ReDimNet2B0": {"default_channels": 12, "default_stages": _stages((36, 36, 36, 36, 18, 18), NARROW)},
        "ReDimNet2B1": {"default_channels": 16, "default_stages": _stages((32, 32, 32, 32, 16, 16), NARROW)},
        "ReDimNet2B2": {
            "default_channels": 20,
            "default_stages": (
                *((1, 1, 2, 2, 3, 5, 40), (2, 1, 3, 1, 3, 5, 30), (1, 2, 4, 1, 3, 5, 30)),
                *((3, 1, 5, 1, 3, 5, 20), (1, 2, 4, 1, 3, 7, 20), (2, 1, 3, 1, 3, 7, 10)),
            ),
        },
        "ReDimNet2B3": {"default_channels": 24, "default_stages": _stages((36, 36, 36, 36, 18, 18), NARROW)},
        "ReDimNet2B4": {
            "default_channels": 32,
            "default_stages": _stages((24, 24, 24, 24, 24, 24), WIDE),
            "default_aggregate_channels": -1,
        },
        "ReDimNet2B5": {
            "default_channels": 48,
            "default_stages": _stages((48, 48, 48, 48, 32, 32), WIDE),
            "default_aggregate_channels": 256,
        },
        "ReDimNet2B6": {
            "default_channels": 64,
            "default_stages": (
                *((1, 1, 3, 3, 3, 3, 64), (2, 1, 4, 2, 3, 3, 64), (1, 2, 5, 2, 3, 3, 48)),
                *((2, 1, 5, 1, 3, 3, 48), (1, 2, 4, 0.75, 3, 3, 32), (2, 1, 3, 0.5, 3, 3, 24)),
            ),
            "default_aggregate_channels": 224,
            "default_keeps_mels": True,
        },
    },
)
