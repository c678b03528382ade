"""Gemini DF-ResNet: deep and narrow, inverted bottlenecks, and strides that halve mels more often than frames."""

import types

from torch import Tensor, nn

from speakernet.models.layers import Trunk, mask_frames, relu, strided_length
from speakernet.models.options.trunks import GeminiOptions
from speakernet.models.resnet import Block, ResidualStage, Stride, make_shortcut

# Of the first convolution, then of the four stages.
CHANNELS = (32, 32, 64, 128, 256)
MEL_STRIDES = (2, 2, 2, 2)
FRAME_STRIDES = (1, 2, 1, 1)


class InvertedBottleneck(Block):
    """Four times as wide inside, a depthwise 3 x 3 convolution there, and a shortcut."""

    EXPANSION = 4
    norm_behind = types.MappingProxyType({"conv1": "norm1", "conv2": "norm2", "conv3": "norm3"})

    def __init__(self, channels_in: int, channels: int, stride: Stride = (1, 1)) -> None:
        super().__init__(channels, stride)
        wide = self.EXPANSION * channels
        self.conv1 = nn.Conv2d(channels_in, wide, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(wide)
        self.conv2 = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False)
        self.norm2 = nn.BatchNorm2d(wide)
        self.conv3 = nn.Conv2d(wide, channels, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(channels)
        self.shortcut = make_shortcut(channels_in, channels, stride)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, channels, mels, frames) and valid frames, in and out."""
        hidden = mask_frames(relu(self.norm1(self.conv1(features))), lengths)
        hidden = self.norm3(self.conv3(relu(self.norm2(self.conv2(hidden)))))
        return mask_frames(relu(hidden + self.shortcut(features)), lengths), lengths


class GeminiDFResNet(Trunk):
    """Depth-first residual network with the strides of Golden Gemini (T14c).

    Source: Liu et al. 2023, "Golden Gemini is all you need"; Liu et al. 2022, "DF-ResNet".
    """

    norm_behind = types.MappingProxyType({"conv1": "norm1"})

    def __init__(self, options: GeminiOptions, num_features: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, CHANNELS[0], 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(CHANNELS[0])
        num_mels = num_features
        downsamples, stages = [], []
        for index, num_blocks in enumerate(options.blocks):
            width = CHANNELS[index + 1]
            stride = (MEL_STRIDES[index], FRAME_STRIDES[index])
            downsamples.append(
                nn.Sequential(
                    nn.Conv2d(CHANNELS[index], width, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(width)
                )
            )
            stages.append(ResidualStage(InvertedBottleneck, width, width, num_blocks))
            num_mels = -(-num_mels // stride[0])
        self.downsamples = nn.ModuleList(downsamples)
        self.stages = nn.ModuleList(stages)
        self.out_channels = CHANNELS[-1] * num_mels

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, mels, frames) to (batch, 256 mels / 16, frames / 2), and the valid frames of each."""
        hidden = mask_frames(relu(self.norm1(self.conv1(features.unsqueeze(1)))), lengths)
        for downsample, stage, stride in zip(self.downsamples, self.stages, FRAME_STRIDES, strict=True):
            lengths = strided_length(lengths, stride)
            hidden, lengths = stage(mask_frames(downsample(hidden), lengths), lengths)
        return hidden.flatten(1, 2), lengths
