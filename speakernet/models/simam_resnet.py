"""SimAM-ResNet: residual networks whose blocks scale every value by an attention that has no weights."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from speakernet.models.layers import SimilarityAttention
from speakernet.models.residual import ResidualBlock, ResidualTrunk, Stride
from speakernet.models.trunk import sized


class SimAMResNet(ResidualTrunk):
    """Residual network with SimAM attention, 64 to 512 channels.

    Args:
        num_features: mel bands of the front end.
        channels: of the first stage.

    Source: Qin et al. 2022, "Simple attention module based speaker verification with iterative noisy label detection";
    the published weights are those of VoxBlink2 (Lin et al. 2024).
    """

    default_pooling = "ASP"
    pooling_names: ClassVar[Mapping[str, str]] = {"ASP": "ChannelASP"}
    tested_poolings: ClassVar[Sequence[str]] = ("ASP",)
    paper = "Qin et al. 2022"
    blocks: ClassVar[Sequence[int]]

    def __init__(self, num_features: int, channels: int = 64) -> None:
        super().__init__(num_features, channels, self.blocks, _block)


def _block(channels_in: int, channels: int, stride: Stride) -> ResidualBlock:
    return ResidualBlock(channels_in, channels, stride, SimilarityAttention())


SIMAM_RESNETS = sized(
    SimAMResNet, {"SimAM_ResNet34": {"blocks": (3, 4, 6, 3)}, "SimAM_ResNet100": {"blocks": (6, 16, 24, 3)}}
)
