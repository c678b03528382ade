"""Gemini DF-ResNet: deep and narrow, inverted bottlenecks, and strides that halve mels more often than frames."""

import types
from functools import partial

from torch import Tensor, nn

from speakernet.models.layers import Trunk, mask_frames, relu, strided_length
from speakernet.models.options.trunks import GeminiOptions
from speakernet.models.resnet import Bottleneck, ResidualStage

# Of the first convolution, then of the four stages.
CHANNELS = (32, 32, 64, 128, 256)
MEL_STRIDE = 2
FRAME_STRIDES = (1, 2, 1, 1)


class GeminiDFResNet(Trunk):
    """Depth-first residual network with the strides of Golden Gemini (T14c).

    Source: Liu et al. 2023, "Golden Gemini is all you need"; Liu et al. 2022, "DF-ResNet".
    """

    norm_behind = types.MappingProxyType({"conv1": "norm1"})

    def __init__(self, options: GeminiOptions, num_features: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, CHANNELS[0], 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(CHANNELS[0])
        self.downsamples, self.stages = nn.ModuleList(), nn.ModuleList()
        for index, num_blocks in enumerate(options.blocks):
            width, stride = CHANNELS[index + 1], (MEL_STRIDE, FRAME_STRIDES[index])
            conv = nn.Conv2d(CHANNELS[index], width, 3, stride=stride, padding=1, bias=False)
            self.downsamples.append(nn.Sequential(conv, nn.BatchNorm2d(width)))
            self.stages.append(ResidualStage(partial(Bottleneck, inverted=True), width, width, num_blocks))
        # Four strides of 2, each rounding up.
        self.out_channels = CHANNELS[-1] * -(-num_features // MEL_STRIDE ** len(self.stages))

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, mels, frames) to (batch, 256 mels / 16, frames / 2), and the valid frames of each."""
        hidden = mask_frames(relu(self.norm1(self.conv1(features.unsqueeze(1)))), lengths)
        for downsample, stage, stride in zip(self.downsamples, self.stages, FRAME_STRIDES, strict=True):
            lengths = strided_length(lengths, stride)
            hidden, lengths = stage(mask_frames(downsample(hidden), lengths), lengths)
        return hidden.flatten(1, 2), lengths
