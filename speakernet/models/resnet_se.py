"""ResNetSE34L and ResNetSE34V2: the 34-layer residual networks with squeeze-and-excitation of voxceleb_trainer."""

import types

from torch import Tensor, nn

from speakernet.models.layers import SqueezeExcitation, initialize_convolutions, mask_frames, relu
from speakernet.models.options.trunks import ResNetSE34LOptions, ResNetSE34V2Options
from speakernet.models.residual import ResidualBlock, ResidualStage, Stride
from speakernet.models.trunk import Trunk

BLOCKS = (3, 4, 6, 3)


class ResNetSE34L(Trunk):
    """Light ResNet-34 with squeeze-and-excitation, 16 to 128 channels; 1,437,078 parameters with SAP at 512 dimensions.

    Source: Chung et al. 2020, "In defence of metric learning for speaker recognition"; voxceleb_trainer f51bab8.
    """

    norm_behind = types.MappingProxyType({"conv1": "norm1"})

    def __init__(self, options: ResNetSE34LOptions, num_features: int) -> None:
        super().__init__()
        channels = (16, 32, 64, 128)
        self.out_channels = channels[-1]
        self.conv1 = nn.Conv2d(1, channels[0], 7, stride=(2, 1), padding=3, bias=False)
        self.norm1 = nn.BatchNorm2d(channels[0])
        self.stages = _stages(channels, strides=(1, 2, 2, 1))
        initialize_convolutions(self)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, mels, frames) to (batch, 128, frames / 4), mean over mels; and the valid frames of each."""
        hidden = mask_frames(relu(self.norm1(self.conv1(features.unsqueeze(1)))), lengths)
        for stage in self.stages:
            hidden, lengths = stage(hidden, lengths)
        return hidden.mean(dim=2), lengths


class ResNetSE34V2(Trunk):
    """ResNet-34 with squeeze-and-excitation, 32 to 256 channels.

    8,028,492 parameters with ASP, 64 mels and 512 dimensions.

    Source: Heo et al. 2020, "Clova baseline system for the VoxCeleb Speaker Recognition Challenge 2020";
    voxceleb_trainer f51bab8.
    """

    def __init__(self, options: ResNetSE34V2Options, num_features: int) -> None:
        super().__init__()
        channels = (32, 64, 128, 256)
        # Three strides of 2, each rounding up.
        self.out_channels = channels[-1] * -(-num_features // 8)
        self.conv1 = nn.Conv2d(1, channels[0], 3, padding=1)
        self.norm1 = nn.BatchNorm2d(channels[0])
        self.stages = _stages(channels, strides=(1, 2, 2, 2))
        initialize_convolutions(self)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, mels, frames) to (batch, 256 mels / 8, frames / 8), and the valid frames of each."""
        # ReLU before the norm, as in the original; ResNetSE34L has them the other way round.
        hidden = mask_frames(self.norm1(relu(self.conv1(features.unsqueeze(1)))), lengths)
        for stage in self.stages:
            hidden, lengths = stage(hidden, lengths)
        return hidden.flatten(1, 2), lengths


def _block(channels_in: int, channels: int, stride: Stride) -> ResidualBlock:
    return ResidualBlock(channels_in, channels, stride, SqueezeExcitation(channels), relu_first=True)


def _stages(channels: tuple[int, ...], strides: tuple[int, ...]) -> nn.ModuleList:
    widths = zip((channels[0], *channels), channels, BLOCKS, strides, strict=False)
    return nn.ModuleList(
        ResidualStage(_block, channels_in, width, blocks, (stride, stride))
        for channels_in, width, blocks, stride in widths
    )
