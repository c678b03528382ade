"""Res2Net and its block, which ERes2Net builds on."""

import types
from functools import partial

from torch import Tensor, nn

from speakernet.models.layers import MaskedConvolution, mask_frames, strided_length
from speakernet.models.multi_scale import Passed, clipped_relu, multi_scale, norm_then_clipped_relu
from speakernet.models.options.trunks import RESNET34, Res2NetOptions
from speakernet.models.residual import Block, ResidualTrunk, Stride, make_shortcut

# The width of a group is channels x base width / 64.
WIDTH_UNIT = 64


class Res2Block(Block):
    """A 1 x 1 convolution, Res2Net's split, a 1 x 1 convolution, and a shortcut; ReLUs end at 20.

    Args:
        channels_in: channels of the input.
        channels: of the stage; the block gives `expansion` times as many.
        stride: of the first convolution along mels and frames.
        base_width: channels of a group, in 64ths of the stage's.
        scale: groups.
        expansion: channels of the output, in the stage's.
        passed: the group without convolution.
        fusion: makes the module that joins a group and the result before it from a number of channels; None adds them.
    """

    norm_behind = types.MappingProxyType({"conv_in": "norm_in", "convs": "norms", "conv_out": "norm_out"})

    def __init__(
        self,
        channels_in: int,
        channels: int,
        stride: Stride = (1, 1),
        *,
        base_width: int,
        scale: int,
        expansion: int,
        passed: Passed,
        fusion: type[nn.Module] | None = None,
    ) -> None:
        wide = channels * expansion
        super().__init__(wide, stride)
        width = channels * base_width // WIDTH_UNIT
        num_convs = scale - (passed != "none")
        self.passed = passed
        self.conv_in = nn.Conv2d(channels_in, width * scale, 1, stride=stride, bias=False)
        self.norm_in = nn.BatchNorm2d(width * scale)
        self.convs = nn.ModuleList(MaskedConvolution(width, width) for _ in range(num_convs))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(num_convs))
        self.fusions = nn.ModuleList(fusion(width) for _ in range(num_convs - 1)) if fusion else nn.ModuleList()
        self.conv_out = nn.Conv2d(width * scale, wide, 1, bias=False)
        self.norm_out = nn.BatchNorm2d(wide)
        self.shortcut = make_shortcut(channels_in, wide, stride)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, channels, mels, frames) and valid frames, in and out."""
        lengths = strided_length(lengths, self.frame_stride)
        hidden = norm_then_clipped_relu(self.conv_in(features), self.norm_in)
        hidden = multi_scale(hidden, lengths, self.convs, self.norms, norm_then_clipped_relu, self.passed, self.fusions)
        hidden = self.norm_out(self.conv_out(hidden))
        return mask_frames(clipped_relu(hidden + self.shortcut(features)), lengths), lengths


class Res2Net(ResidualTrunk):
    """Res2Net-34 of wespeaker and 3D-Speaker: two groups a block, one of which is convolved.

    Args:
        options: its width.
        num_features: mel bands of the front end.

    Source: Gao et al. 2019, "Res2Net: a new multi-scale backbone architecture"; for speakers Zhou et al. 2021.
    """

    def __init__(self, options: Res2NetOptions, num_features: int) -> None:
        block = partial(Res2Block, base_width=32, scale=2, expansion=2, passed="last")
        super().__init__(num_features, options.channels, RESNET34, block)
