"""Deeper residual networks: published depths, SimAM attention, and the deep and narrow Gemini
DF-ResNet.
"""

import types
from functools import partial

import torch
from torch import Tensor, nn

from speakernet.frontend.features import Lengths
from speakernet.models.layers import (
    Foldable,
    Trunk,
    mask_frames,
    mean_over_frames,
    relu,
    valid_length,
)
from speakernet.models.options.trunks import DeepResNetOptions, GeminiOptions, SimAMResNetOptions
from speakernet.models.resnet import (
    ResidualBlock,
    ResidualStage,
    ResidualTrunk,
    Stride,
    make_shortcut,
)

EXPANSION = 4
"""Ratio of the wide to the narrow side of a bottleneck."""
# Channels of Gemini's first convolution, then of its four stages, which halve mels more often than
# frames.
CHANNELS = (32, 32, 64, 128, 256)
MEL_STRIDE = 2
FRAME_STRIDES = (1, 2, 1, 1)


class Bottleneck(Foldable):
    """A 1 x 1, a 3 x 3 and a 1 x 1 convolution with batch norms, and a shortcut.

    Its output is four times as wide as its inside. If inverted, its inside is four times as wide as
    its output, and the 3 x 3 convolution is depthwise.
    """

    norm_behind = types.MappingProxyType({"conv1": "norm1", "conv2": "norm2", "conv3": "norm3"})

    def __init__(
        self, channels_in: int, channels: int, stride: Stride = (1, 1), inverted: bool = False
    ) -> None:
        super().__init__()
        if inverted:
            inner = groups = EXPANSION * channels
            out = channels
        else:
            inner = channels
            groups = 1
            out = EXPANSION * channels
        self.out_channels = out
        self.frame_stride = stride[1]
        self.conv1 = nn.Conv2d(channels_in, inner, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(inner)
        # The stride is on the 3 x 3 convolution, as in wespeaker; He et al. have it on the first 1
        # x 1.
        self.conv2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, groups=groups, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, out, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(out)
        self.shortcut = make_shortcut(channels_in, out, stride)

    def forward(self, features: Tensor, lengths: Lengths = None) -> tuple[Tensor, Lengths]:
        """(batch, channels, mels, frames) and valid frames, in and out."""
        # The expensive 3 x 3 convolution runs on few channels (or, inverted, on each channel
        # alone); the 1 x 1 convolutions change the width before and after it.
        hidden = mask_frames(relu(self.norm1(self.conv1(features))), lengths)
        lengths = valid_length(lengths, 1, self.frame_stride)
        hidden = relu(self.norm2(self.conv2(hidden)))  # (batch, inner channels, ...)
        hidden = self.norm3(self.conv3(hidden))  # (batch, out channels, ...)
        return mask_frames(relu(hidden + self.shortcut(features)), lengths), lengths


class DeepResNet(ResidualTrunk):
    """Residual network of a published depth, as wespeaker trains it on VoxCeleb, with torch's
    default initial weights.

    Source: He et al. 2016; depths of 152 and more: wespeaker (Wang et al. 2023) and its entries to
    VoxSRC.
    """

    def __init__(self, options: DeepResNetOptions, num_features: int) -> None:
        make_block = Bottleneck if options.has_bottlenecks else ResidualBlock
        super().__init__(num_features, options.channels, options.blocks, make_block)


class SimAMResNet(ResidualTrunk):
    """Residual network with SimAM attention, 64 to 512 channels.

    Source: Qin et al. 2022, "Simple attention module based speaker verification with iterative
    noisy label detection"; published weights from VoxBlink2 (Lin et al. 2024).
    """

    def __init__(self, options: SimAMResNetOptions, num_features: int) -> None:
        # SimAM replaces the gate of SE-ResNets: after the second norm, before the shortcut is
        # added.
        make_block = partial(ResidualBlock, gate=SimilarityAttention)
        super().__init__(num_features, options.channels, options.blocks, make_block)


class SimilarityAttention(nn.Module):
    """SimAM: scales every value by its distance from its channel's mean, without weights.

    Source: Yang et al. 2021, "SimAM: a simple, parameter-free attention module", equation 5; used
    for speakers by Qin et al. 2022, "Simple attention module based speaker verification with
    iterative noisy label detection".
    """

    # `lambda_p` of wespeaker's samresnet.py.
    REGULARIZER = 1e-4

    def __init__(self, channels: int = 0) -> None:
        super().__init__()

    def forward(self, features: Tensor, lengths: Lengths = None) -> Tensor:
        """(batch, channels, mels, frames) in and out; frames past an utterance's end must be
        zero.
        """
        # A value far from its channel's mean stands out from its neighbours, so it is taken to be
        # informative: the gate is 0.62 at the mean and rises to 1 with the squared distance in
        # units of the variance.
        mean = mean_over_frames(features.mean(dim=2), lengths)[:, :, None, None]
        # In float16 squares overflow above 255.
        wide = torch.promote_types(features.dtype, torch.float32)
        distance = mask_frames((features - mean).to(wide).square(), lengths)
        num_frames = features.shape[3] if lengths is None else lengths.view(-1, 1, 1, 1)
        count = features.shape[2] * num_frames
        # Divided by n - 1, as in the original code.
        variance = distance.sum(dim=(2, 3), keepdim=True) / (count - 1)  # (batch, channels, 1, 1)
        gate = (distance / (4 * (variance + self.REGULARIZER)) + 0.5).sigmoid()
        return features * gate.to(features.dtype)


class GeminiDFResNet(Trunk):
    """Depth-first residual network with the strides of Golden Gemini (T14c).

    Source: Liu et al. 2023, "Golden Gemini is all you need"; Liu et al. 2022, "DF-ResNet".
    """

    norm_behind = types.MappingProxyType({"conv1": "norm1"})

    def __init__(self, options: GeminiOptions, num_features: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, CHANNELS[0], 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(CHANNELS[0])
        self.downsamples = nn.ModuleList()
        self.stages = nn.ModuleList()
        make_block = partial(Bottleneck, inverted=True)
        for index, num_blocks in enumerate(options.blocks):
            width = CHANNELS[index + 1]
            stride = (MEL_STRIDE, FRAME_STRIDES[index])
            conv = nn.Conv2d(CHANNELS[index], width, 3, stride=stride, padding=1, bias=False)
            self.downsamples.append(nn.Sequential(conv, nn.BatchNorm2d(width)))
            self.stages.append(ResidualStage(make_block, width, width, num_blocks))
        # Four strides of 2, each rounding up.
        self.out_channels = CHANNELS[-1] * -(-num_features // MEL_STRIDE ** len(self.stages))

    def forward(self, features: Tensor, lengths: Lengths = None) -> tuple[Tensor, Lengths]:
        """(batch, mels, frames) to (batch, 256 mels / 16, frames / 2), and the valid frames of
        each.
        """
        # Mels are halved before every stage, frames only once: the paper's search found that detail
        # in time is worth more than detail in frequency.
        hidden = self.conv1(features.unsqueeze(1))  # (batch, 32, mels, frames)
        hidden = mask_frames(relu(self.norm1(hidden)), lengths)
        parts = zip(self.downsamples, self.stages, FRAME_STRIDES, strict=True)
        for downsample, stage, frame_stride in parts:
            lengths = valid_length(lengths, 1, frame_stride)
            hidden = mask_frames(downsample(hidden), lengths)
            hidden, lengths = stage(hidden, lengths)
        return hidden.flatten(1, 2), lengths  # (batch, 256 x mels / 16, frames / 2)
