"""ResNet: a residual network of any width and depth, and the ones of published depth."""

from collections.abc import Sequence
from typing import Any, ClassVar

from speakernet.models.layers import initialize_convolutions
from speakernet.models.residual import Bottleneck, MakeBlock, ResidualBlock, ResidualTrunk, gated_block
from speakernet.models.trunk import sized

LEAST_CHANNELS = 8


class ResNet(ResidualTrunk):
    """Residual network whose size is set by options; the defaults make a small one that trains fast on CPUs.

    Args:
        num_features: mel bands of the front end.
        channels: of the first stage; each following stage has twice as many.
        blocks: residual blocks of each stage; (3, 4, 6, 3) is ResNet-34.
        stem_stride: stride along mels of the first convolution; 2 halves all later work.
        gated: squeeze-and-excitation in every block.

    Source: He et al. 2016, as wespeaker uses it for speakers (32 channels, blocks 3, 4, 6, 3, TSTP, no gates).
    """

    front_end_defaults: ClassVar[dict[str, Any]] = {"name": "log_mel"}
    tested_poolings: ClassVar[Sequence[str]] = ("TSTP", "ASP", "ChannelASP")
    paper = "He et al. 2016"

    def __init__(
        self,
        num_features: int,
        channels: int = 16,
        blocks: Sequence[int] = (2, 2, 2, 2),
        stem_stride: int = 1,
        gated: bool = False,
    ) -> None:
        if not blocks or min(blocks) < 1 or channels < LEAST_CHANNELS or stem_stride < 1:
            raise ValueError(
                f"ResNet got channels {channels}, blocks {list(blocks)}, stem_stride {stem_stride}; "
                "expected at least 8 channels, a list of block counts of at least 1, and a stride of at least 1"
            )
        super().__init__(num_features, channels, blocks, gated_block if gated else ResidualBlock, stem_stride)
        initialize_convolutions(self)


class DeepResNet(ResidualTrunk):
    """Residual network of a published depth, as wespeaker trains it on VoxCeleb, from torch's own initial weights.

    Args:
        num_features: mel bands of the front end.
        channels: of the first stage.
        two_layers: two embedding layers (`two_emb_layer` in wespeaker).

    Source: He et al. 2016; the depths from 152 on by wespeaker (Wang et al. 2023) and its entries to VoxSRC.
    """

    paper = "He et al. 2016"
    blocks: ClassVar[Sequence[int]]
    make_block: ClassVar[MakeBlock]

    def __init__(self, num_features: int, channels: int = 32, two_layers: bool = False) -> None:
        super().__init__(num_features, channels, self.blocks, type(self).make_block)
        if two_layers:
            self.embedding_layer = "two_linear"


RESNETS = sized(
    DeepResNet,
    {
        "ResNet18": {"blocks": (2, 2, 2, 2), "make_block": ResidualBlock},
        "ResNet34": {"blocks": (3, 4, 6, 3), "make_block": ResidualBlock},
        "ResNet50": {"blocks": (3, 4, 6, 3), "make_block": Bottleneck},
        "ResNet101": {"blocks": (3, 4, 23, 3), "make_block": Bottleneck},
        "ResNet152": {"blocks": (3, 8, 36, 3), "make_block": Bottleneck},
        "ResNet221": {"blocks": (6, 16, 48, 3), "make_block": Bottleneck},
        "ResNet293": {"blocks": (10, 20, 64, 3), "make_block": Bottleneck},
    },
)
