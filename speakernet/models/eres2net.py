"""ERes2Net and ERes2NetV2: Res2Net with attention that fuses groups within a block and stages with each other."""

from functools import partial

import torch
from torch import Tensor, nn

from speakernet.models.layers import mask_frames
from speakernet.models.options.trunks import RESNET34, ERes2NetOptions
from speakernet.models.res2net import Res2Block
from speakernet.models.residual import ResidualTrunk

REDUCTION = 4
# The stages from this one on fuse their groups by attention; those before add them.
FIRST_FUSED_STAGE = 2


class AttentiveFusion(nn.Module):
    """Weigh two inputs against each other, for every value, by a bottleneck that sees both.

    Source: Chen et al. 2023, "An enhanced Res2Net with local and global feature fusion for speaker verification",
    equations 3 and 4.
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
        """(batch, channels, mels, frames) twice, to one."""
        balance = self.attention(torch.cat((first, second), dim=1)).tanh()
        # The factors lie in 0..2 and add up to two: where the attention has no preference this is the plain sum.
        return first * (1.0 + balance) + second * (1.0 - balance)


class ERes2Net(ResidualTrunk):
    """Enhanced Res2Net: groups fused within blocks of the later stages, and stages fused from the bottom up.

    Args:
        options: widths and groups; which stages are fused is a fact of the options class.
        num_features: mel bands of the front end.

    Source: Chen et al. 2023, "An enhanced Res2Net with local and global feature fusion for speaker verification"; V2:
    Chen et al. 2024, "ERes2NetV2: boosting short-duration speaker verification performance with computational
    efficiency", which fuses the last two stages only.
    """

    def __init__(self, options: ERes2NetOptions, num_features: int) -> None:
        plain = partial(
            Res2Block,
            base_width=options.base_width,
            scale=options.scale,
            expansion=options.expansion,
            passed="none",
        )
        fused = partial(plain, fusion=AttentiveFusion)
        kinds = [plain if index < FIRST_FUSED_STAGE else fused for index in range(len(RESNET34))]
        super().__init__(num_features, options.channels, RESNET34, kinds)
        # With torch's own first weights: Kaiming's make this network so ill-conditioned that float32 and float64
        # embeddings differ by 4e-5 of their length.
        self.first_joined_stage = options.first_joined_stage
        wide = options.channels * options.expansion
        widths = [wide * 2**index for index in range(self.first_joined_stage, len(RESNET34))]
        self.downsamples = nn.ModuleList(
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False) for width in widths[:-1]
        )
        self.fusions = nn.ModuleList(AttentiveFusion(width) for width in widths[1:])

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, mels, frames) to (batch, channels x mels / 8, frames / 8), and the valid frames of each."""
        hidden = self.stem(features, lengths)
        joined = hidden
        for index, stage in enumerate(self.stages):
            hidden, lengths = stage(hidden, lengths)
            place = index - self.first_joined_stage
            if place <= 0:
                joined = hidden
            else:
                below = self.downsamples[place - 1](joined)
                joined = mask_frames(self.fusions[place - 1](hidden, below), lengths)
        return joined.flatten(1, 2), lengths
