"""SimAM-ResNet: residual networks whose blocks scale every value by an attention that has no weights."""

from speakernet.models.layers import SimilarityAttention
from speakernet.models.options.trunks import SimAMResNetOptions
from speakernet.models.residual import ResidualBlock, ResidualTrunk, Stride


class SimAMResNet(ResidualTrunk):
    """Residual network with SimAM attention, 64 to 512 channels.

    Args:
        options: its width; its depth is a fact of the options class.
        num_features: mel bands of the front end.

    Source: Qin et al. 2022, "Simple attention module based speaker verification with iterative noisy label detection";
    the published weights are those of VoxBlink2 (Lin et al. 2024).
    """

    def __init__(self, options: SimAMResNetOptions, num_features: int) -> None:
        super().__init__(num_features, options.channels, options.blocks, _block)


def _block(channels_in: int, channels: int, stride: Stride) -> ResidualBlock:
    # Where SE-ResNets have their gate: behind the second norm, before the shortcut is added.
    return ResidualBlock(channels_in, channels, stride, SimilarityAttention())
