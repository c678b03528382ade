"""ERes2Net and ERes2NetV2: Res2Net with attention that fuses groups within a block and stages with each other."""

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from speakernet.models.layers import mask_frames
from speakernet.models.res2net import BLOCKS, Res2Block
from speakernet.models.residual import ResidualTrunk
from speakernet.models.trunk import sized

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
            nn.SiLU(inplace=True),
            nn.Conv2d(hidden, channels, 1),
            nn.BatchNorm2d(channels),
        )

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """(batch, channels, mels, frames) twice, to one."""
        balance = self.attention(torch.cat((first, second), dim=1)).tanh()
        return first * (1.0 + balance) + second * (1.0 - balance)


class ERes2Net(ResidualTrunk):
    """Enhanced Res2Net: groups fused within blocks of the later stages, and stages fused from the bottom up.

    Args:
        num_features: mel bands of the front end.
        channels: of the first stage; 0 for those of the named size.
        base_width: channels of a group, in 64ths of the stage's; 0 for those of the named size.
        scale: groups.
        expansion: channels of a block's output, in the stage's.
        two_layers: two embedding layers (`two_emb_layer`).
        variance_floor: added to the variance in TSTP; 1e-7 in wespeaker, 1e-8 in 3D-Speaker.

    Source: Chen et al. 2023, "An enhanced Res2Net with local and global feature fusion for speaker verification"; V2:
    Chen et al. 2024, "ERes2NetV2: boosting short-duration speaker verification performance with computational
    efficiency", which fuses the last two stages only.
    """

    paper = "Chen et al. 2023"
    published_dim = 192
    default_channels: ClassVar[int]
    default_base_width: ClassVar[int] = 32
    first_joined_stage: ClassVar[int] = 0
    """The first stage that is fused with those after it."""

    def __init__(
        self,
        num_features: int,
        channels: int = 0,
        base_width: int = 0,
        scale: int = 2,
        expansion: int = 2,
        two_layers: bool = False,
        variance_floor: float = 1e-7,
    ) -> None:
        channels = channels or self.default_channels
        plain = partial(
            Res2Block,
            base_width=base_width or self.default_base_width,
            scale=scale,
            expansion=expansion,
            passed="none",
        )
        fused = partial(plain, fusion=AttentiveFusion)
        kinds = [plain if index < FIRST_FUSED_STAGE else fused for index in range(len(BLOCKS))]
        super().__init__(num_features, channels, BLOCKS, kinds)
        if two_layers:
            self.embedding_layer = "two_linear"
        self.pooling_options = {"variance_floor": variance_floor}
        widths = [channels * expansion * 2**index for index in range(self.first_joined_stage, len(BLOCKS))]
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


ERES2NETS = sized(ERes2Net, {"ERes2NetBase": {"default_channels": 32}, "ERes2NetLarge": {"default_channels": 64}})
ERES2NETV2S = sized(
    ERes2Net,
    {
        "ERes2NetV2": {
            "default_channels": 64,
            "default_base_width": 26,
            "first_joined_stage": 2,
            "paper": "Chen et al. 2024",
        }
    },
)
