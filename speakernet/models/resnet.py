"""ResNet: a residual network of any width and depth, for fast training on small machines as well as for large ones."""

from torch import Tensor, nn

from speakernet.models.layers import ResidualStage, initialize_convolutions, mask_frames, relu
from speakernet.models.options import ResNetOptions


class ResNet(nn.Module):
    """Residual network whose size is set by options; the defaults make a small one that trains fast on CPUs.

    Args:
        options: widths, depths and strides.
        num_features: mel bands of the front end.

    Source: He et al. 2016, as wespeaker uses it for speakers (32 channels, blocks 3, 4, 6, 3, TSTP, no gates).
    """

    def __init__(self, options: ResNetOptions, num_features: int) -> None:
        super().__init__()
        channels, stem_stride = options.channels, options.stem_stride
        self.conv1 = nn.Conv2d(1, channels, 3, stride=(stem_stride, 1), padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        stages = []
        width_in, num_mels = channels, -(-num_features // stem_stride)
        for index, num_blocks in enumerate(options.blocks):
            width, stride = channels * 2**index, 1 if index == 0 else 2
            stages.append(ResidualStage(width_in, width, num_blocks, stride, options.gated))
            width_in, num_mels = width, -(-num_mels // stride)
        self.stages = nn.ModuleList(stages)
        self.out_channels = width_in * num_mels
        initialize_convolutions(self)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, mels, frames) to (batch, channels x remaining mels, frames / 8), and the valid frames of each."""
        hidden = mask_frames(relu(self.norm1(self.conv1(features.unsqueeze(1)))), lengths)
        for stage in self.stages:
            hidden, lengths = stage(hidden, lengths)
        return hidden.flatten(1, 2), lengths
