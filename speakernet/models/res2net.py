"""Res2Net, ERes2Net and ERes2NetV2: residual networks whose blocks split their channels."""

from functools import partial

import torch
from torch import Tensor, nn

from speakernet.frontend.features import Lengths
from speakernet.models.layers import (
    Foldable,
    MaskedConvolution,
    Passed,
    clipped_relu,
    mask_frames,
    multi_scale,
    norm_then_clipped_relu,
    relu,
    valid_length,
)
from speakernet.models.options.trunks import RESNET34, ERes2NetOptions, Res2NetOptions
from speakernet.models.resnet import ResidualTrunk, Stride, make_shortcut

# The width of a group is channels x base width / 64.
WIDTH_UNIT = 64


class Res2Block(Foldable):
    """A 1 x 1 convolution, Res2Net's split, a 1 x 1 convolution, and a shortcut; ReLUs are clipped
    at 20.
    """

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
        super().__init__()
        self.out_channels = channels * expansion
        self.frame_stride = stride[1]
        self.passed = passed
        width = channels * base_width // WIDTH_UNIT
        num_convs = scale - (passed != "none")
        self.conv_in = nn.Conv2d(channels_in, width * scale, 1, stride=stride, bias=False)
        self.norm_in = nn.BatchNorm2d(width * scale)
        self.convs = nn.ModuleList(MaskedConvolution(width, width) for _ in range(num_convs))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(num_convs))
        self.fusions = nn.ModuleList()
        if fusion is not None:
            self.fusions.extend(fusion(width) for _ in range(num_convs - 1))
        self.conv_out = nn.Conv2d(width * scale, self.out_channels, 1, bias=False)
        self.norm_out = nn.BatchNorm2d(self.out_channels)
        self.shortcut = make_shortcut(channels_in, self.out_channels, stride)
        pairs = {"conv_in": "norm_in", "conv_out": "norm_out"}
        for index in range(num_convs):
            pairs[f"convs.{index}"] = f"norms.{index}"
        self.norm_behind = pairs

    def forward(self, features: Tensor, lengths: Lengths = None) -> tuple[Tensor, Lengths]:
        """(batch, channels, mels, frames) and valid frames, in and out."""
        # A bottleneck whose middle convolution is a chain of narrow ones (see `multi_scale`).
        lengths = valid_length(lengths, 1, self.frame_stride)
        # (batch, scale x width, mels / stride, frames / stride)
        hidden = norm_then_clipped_relu(self.conv_in(features), self.norm_in)
        hidden = multi_scale(
            hidden,
            lengths,
            self.convs,
            self.norms,
            norm_then_clipped_relu,
            self.passed,
            self.fusions,
        )
        hidden = self.norm_out(self.conv_out(hidden))  # (batch, channels x expansion, ...)
        return mask_frames(clipped_relu(hidden + self.shortcut(features)), lengths), lengths


class Res2Net(ResidualTrunk):
    """Res2Net-34 of wespeaker and 3D-Speaker: two groups per block, one of which is convolved.

    Source: Gao et al. 2019, "Res2Net: a new multi-scale backbone architecture"; for speakers Zhou
    et al. 2021.
    """

    def __init__(self, options: Res2NetOptions, num_features: int) -> None:
        block = partial(Res2Block, base_width=32, scale=2, expansion=2, passed="last")
        super().__init__(num_features, options.channels, RESNET34, block)


REDUCTION = 4


class AttentiveFusion(nn.Module):
    """Weighs two inputs against each other, for every value, with a bottleneck over both.

    Source: Chen et al. 2023, "An enhanced Res2Net with local and global feature fusion for speaker
    verification", equations 3 and 4.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = channels // REDUCTION
        self.attention = nn.Sequential(
            nn.Conv2d(2 * channels, hidden, 1),
            nn.BatchNorm2d(hidden),
            nn.SiLU(),
            nn.Conv2d(hidden, channels, 1),
            nn.BatchNorm2d(channels),
        )

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Two inputs (batch, channels, mels, frames) to one."""
        balance = self.attention(torch.cat((first, second), dim=1)).tanh()
        # The factors are in 0..2 and add up to 2; at a balance of 0 this is the plain sum.
        return first * (1.0 + balance) + second * (1.0 - balance)


class ERes2Net(ResidualTrunk):
    """Enhanced Res2Net: groups fused by attention within blocks of the last two stages, and stages
    fused from the bottom up.

    Source: Chen et al. 2023, "An enhanced Res2Net with local and global feature fusion for speaker
    verification"; V2: Chen et al. 2024, "ERes2NetV2: boosting short-duration speaker verification
    performance with computational efficiency", which fuses only the last two stages.
    """

    def __init__(self, options: ERes2NetOptions, num_features: int) -> None:
        added = partial(
            Res2Block,
            base_width=options.base_width,
            scale=options.scale,
            expansion=options.expansion,
            passed="none",
        )
        fused = partial(added, fusion=AttentiveFusion)
        super().__init__(num_features, options.channels, RESNET34, [added, added, fused, fused])
        # Keeps torch's default initial weights: Kaiming's make this network so ill-conditioned that
        # float32 and float64 embeddings differ by 4e-5 of their length.
        self.first_joined_stage = options.first_joined_stage
        first_width = options.channels * options.expansion
        stages = range(self.first_joined_stage, len(RESNET34))
        widths = [first_width * 2**stage for stage in stages]
        self.downsamples = nn.ModuleList(
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False) for width in widths[:-1]
        )
        self.fusions = nn.ModuleList(AttentiveFusion(width) for width in widths[1:])

    def forward(self, features: Tensor, lengths: Lengths = None) -> tuple[Tensor, Lengths]:
        """(batch, mels, frames) to (batch, channels x mels / 8, frames / 8), and the valid frames
        of each.
        """
        # The output is not that of the last stage alone: what earlier stages have found is strided
        # to the size of the next one and fused into it, stage by stage from the bottom up, so that
        # fine detail survives.
        hidden = self.conv1(features.unsqueeze(1))  # (batch, channels, mels, frames)
        hidden = mask_frames(relu(self.norm1(hidden)), lengths)
        for index, stage in enumerate(self.stages):
            hidden, lengths = stage(hidden, lengths)
            joint = index - self.first_joined_stage - 1
            if joint < 0:
                joined = hidden
            else:
                joined = self.fusions[joint](hidden, self.downsamples[joint](joined))
                joined = mask_frames(joined, lengths)
        return joined.flatten(1, 2), lengths  # (batch, channels x mels / 8, frames / 8)
