"""ReDimNet: maps of mels and frames folded into sequences of frames and back, so that both see all that came before."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from speakernet.models.layers import MaskedConvolution, mask_frames
from speakernet.models.options.redimnet import ReDimNetOptions
from speakernet.models.redim_blocks import BLOCKS_2D, EPSILON, ChannelNorm, TimeContext, WeightedSum
from speakernet.models.trunk import Trunk


@dataclass(frozen=True)
class Grid:
    """How the values of a frame are laid out: always channels x mels of them."""

    channels: int
    num_mels: int

    def unfold(self, frames: Tensor) -> Tensor:
        """(batch, mels x channels, frames) to (batch, channels, mels, frames)."""
        # Mels vary slowest, as in the authors' `to2d`: in another order published weights would meet other values.
        return frames.unflatten(1, (self.num_mels, self.channels)).transpose(1, 2)


def fold(features: Tensor) -> Tensor:
    """(batch, channels, mels, frames) to (batch, mels x channels, frames)."""
    return features.transpose(1, 2).flatten(1, 2)


class ReDimNet(Trunk):
    """Reshape-dimensions network of Yakovlev et al., sizes B0 to B6.

    Args:
        options: stages, blocks and what looks along time.
        num_features: mel bands of the front end, a multiple of the product of the strides along mels.

    Raises:
        ValueError: mel bands that the strides do not divide.

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
            # The first stage has one map and, in the authors' `weigth1d(C=1)`, one weight without effect.
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
    """Sum of all maps before, unfolded, strided, through blocks, narrowed, folded, and through what looks along time.

    Args:
        grid: how the maps unfold.
        aggregate: sums them.
        conv: strides and widens.
        num_blocks: over mels and frames.
        block: what they are, a name of `redim_blocks.BLOCKS_2D`.
        group_channels: channels of a group in their convolutions.
        narrow: from their channels to those that fold into as many values as before; None where they do already.
        kernel: of blocks that have a choice.

    Raises:
        ValueError: mel bands that the stride does not divide.
    """

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
        """What the blocks over mels and frames make of the maps; `lengths` are those behind the stride."""
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
    """What looks along time, with `size / divisor` channels inside."""
    return TimeContext(size, size // divisor, kind)
