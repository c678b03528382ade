"""ResNet: a residual network of any width and depth, and the ones of published depth."""

from speakernet.models.layers import initialize_convolutions
from speakernet.models.options.trunks import DeepResNetOptions, ResNetOptions
from speakernet.models.residual import Bottleneck, ResidualBlock, ResidualTrunk, gated_block


class ResNet(ResidualTrunk):
    """Residual network whose size is set by options; the defaults make a small one that trains fast on CPUs.

    Args:
        options: widths, depths and strides.
        num_features: mel bands of the front end.

    Source: He et al. 2016, as wespeaker uses it for speakers (32 channels, blocks 3, 4, 6, 3, TSTP, no gates); strides
    along mels rather than frames: Liu et al. 2023, "Golden Gemini is all you need".
    """

    def __init__(self, options: ResNetOptions, num_features: int) -> None:
        make_block = gated_block if options.gated else ResidualBlock
        super().__init__(
            num_features, options.channels, options.blocks, make_block, options.stem_stride, options.strides
        )
        initialize_convolutions(self)


class DeepResNet(ResidualTrunk):
    """Residual network of a published depth, as wespeaker trains it on VoxCeleb, from torch's own initial weights.

    Args:
        options: its width; its depth is a fact of the options class.
        num_features: mel bands of the front end.

    Source: He et al. 2016; the depths from 152 on by wespeaker (Wang et al. 2023) and its entries to VoxSRC.
    """

    def __init__(self, options: DeepResNetOptions, num_features: int) -> None:
        make_block = Bottleneck if options.has_bottlenecks else ResidualBlock
        super().__init__(num_features, options.channels, options.blocks, make_block)
