"""Time-delay networks: ECAPA-TDNN and the x-vector network, and the frame convolution that other
trunks use too.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from speakernet.frontend.features import Lengths, mirrored_places
from speakernet.models.layers import (
    Passed,
    SqueezeExcitation,
    Trunk,
    check_frames,
    mask_frames,
    mean_over_frames,
    multi_scale,
    relu_then_norm,
    valid_length,
)
from speakernet.models.options.trunks import ECAPA_GROUPS, ECAPAOptions, XVectorOptions

DILATIONS = (2, 3, 4)
GATE_CHANNELS = 128
# Reflection needs more frames than it mirrors, which is four for the widest convolution.
MIN_FRAMES_REFLECTED = 5


class FrameConvolution(nn.Conv1d):
    """A padded 1-D convolution that gives each utterance in a batch the same result as alone."""

    def __init__(
        self,
        channels_in: int,
        channels: int,
        kernel: int = 1,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
        reflects: bool = False,
    ) -> None:
        padding = dilation * (kernel - 1) // 2
        super().__init__(
            channels_in,
            channels,
            kernel,
            stride,
            padding,
            dilation,
            groups,
            bias,
            "reflect" if reflects else "zeros",
        )

    def forward(self, features: Tensor, lengths: Lengths = None) -> Tensor:  # type: ignore[override]
        """(batch, channels, frames) in and out; `lengths` is (batch,) valid frames of the input."""
        padding = int(self.padding[0])
        if lengths is None or padding == 0:
            return super().forward(features)
        if self.padding_mode == "zeros":
            return super().forward(mask_frames(features, lengths))
        features = reflect_frames(features, lengths, padding)
        return functional.conv1d(
            features, self.weight, self.bias, self.stride, 0, self.dilation, self.groups
        )


def reflect_frames(features: Tensor, lengths: Tensor, count: int) -> Tensor:
    """Mirror `count` frames at both ends of each utterance, as torch's reflect padding does for a
    single one.

    Returns:
        (batch, channels, frames + 2 count), undefined past an utterance's mirrored end.
    """
    places = mirrored_places(lengths, features.shape[-1], count).clamp(min=0)  # (batch, frames)
    return features.gather(2, places.unsqueeze(1).expand(-1, features.shape[1], -1))


class FrameExcitation(SqueezeExcitation):
    """Squeeze-and-excitation over a sequence of frames."""

    def forward(self, features: Tensor, lengths: Lengths = None) -> Tensor:
        """(batch, channels, frames) in and out."""
        means = mean_over_frames(mask_frames(features, lengths), lengths)  # (batch, channels)
        return features * self.gate(means).unsqueeze(2)


class ECAPA(Trunk):
    """ECAPA-TDNN in the variants of wespeaker (the default) and of SpeechBrain, which 3D-Speaker
    also uses.

    Source: Desplanques et al. 2020, "ECAPA-TDNN: emphasized channel attention, propagation and
    aggregation in TDNN based speaker verification".
    """

    def __init__(self, options: ECAPAOptions, num_features: int) -> None:
        super().__init__()
        channels = options.channels
        speechbrain = options.speechbrain
        self.out_channels = options.aggregate_channels
        self.min_frames = MIN_FRAMES_REFLECTED if speechbrain else 1
        self.conv = FrameConvolution(num_features, channels, 5, reflects=speechbrain)
        self.norm = nn.BatchNorm1d(channels)
        self.blocks = nn.ModuleList(
            ECAPABlock(channels, dilation, speechbrain) for dilation in DILATIONS
        )
        self.aggregate = nn.Conv1d(len(DILATIONS) * channels, self.out_channels, 1)
        # SpeechBrain's `mfa` includes a norm; wespeaker's `conv` is followed only by a ReLU.
        self.aggregate_norm = nn.BatchNorm1d(self.out_channels) if speechbrain else nn.Identity()

    def forward(self, features: Tensor, lengths: Lengths = None) -> tuple[Tensor, Lengths]:
        """(batch, mels, frames) to (batch, aggregate channels, frames), and the valid frames of
        each.
        """
        if self.min_frames > 1:
            check_frames(features, lengths, self.min_frames, "ECAPA-TDNN with mirrored edges")
        # Every frame keeps its place: no strides, only wider dilations from block to block. All
        # blocks are aggregated, because shallow ones also know about the speaker.
        hidden = relu_then_norm(
            self.conv(features, lengths), self.norm
        )  # (batch, channels, frames)
        outputs = []
        for block in self.blocks:
            hidden = block(hidden, lengths)
            outputs.append(hidden)
        hidden = self.aggregate(torch.cat(outputs, dim=1))  # (batch, aggregate channels, frames)
        frames = relu_then_norm(hidden, self.aggregate_norm)
        return mask_frames(frames, lengths), lengths


class ECAPABlock(nn.Module):
    """SE-Res2Block: 1 x 1 convolution, split, 1 x 1 convolution, gate, shortcut."""

    def __init__(self, channels: int, dilation: int, speechbrain: bool) -> None:
        super().__init__()
        self.passed: Passed = "first" if speechbrain else "last"
        width = channels // ECAPA_GROUPS
        self.conv_in = nn.Conv1d(channels, channels, 1)
        self.norm_in = nn.BatchNorm1d(channels)
        self.convs = nn.ModuleList()
        for _ in range(ECAPA_GROUPS - 1):
            conv = FrameConvolution(width, width, 3, dilation=dilation, reflects=speechbrain)
            self.convs.append(conv)
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in self.convs)
        self.conv_out = nn.Conv1d(channels, channels, 1)
        self.norm_out = nn.BatchNorm1d(channels)
        self.gate = FrameExcitation(channels, GATE_CHANNELS)

    def forward(self, features: Tensor, lengths: Lengths = None) -> Tensor:
        """(batch, channels, frames) in and out."""
        # 1 x 1 convolutions mix channels, the split between them looks left and right.
        hidden = relu_then_norm(self.conv_in(features), self.norm_in)
        hidden = multi_scale(hidden, lengths, self.convs, self.norms, relu_then_norm, self.passed)
        hidden = relu_then_norm(self.conv_out(hidden), self.norm_out)
        return features + self.gate(hidden, lengths)


# (kernel, dilation) of each layer; nothing is padded.
LAYERS = ((5, 1), (3, 2), (3, 3), (1, 1), (1, 1))


class XVector(Trunk):
    """Time-delay network of the x-vector; 4.61 million parameters (TSTP, 80 mels,
    512-dimensional).

    Source: Snyder et al. 2018, "X-vectors: robust DNN embeddings for speaker recognition", table 1;
    norms and the second embedding layer as in wespeaker.
    """

    # 1 + 4 + 4 + 6: the span of the kernels of the first three layers.
    min_frames = 15

    def __init__(self, options: XVectorOptions, num_features: int) -> None:
        super().__init__()
        self.out_channels = options.statistics_channels
        widths = [options.channels] * 4 + [options.statistics_channels]
        self.convs = nn.ModuleList()
        self.norms = nn.ModuleList()
        channels_in = num_features
        for width, (kernel, dilation) in zip(widths, LAYERS, strict=True):
            self.convs.append(nn.Conv1d(channels_in, width, kernel, dilation=dilation))
            self.norms.append(nn.BatchNorm1d(width, affine=False))
            channels_in = width

    def forward(self, features: Tensor, lengths: Lengths = None) -> tuple[Tensor, Lengths]:
        """(batch, mels, frames) to (batch, 1500, frames - 14), and the valid frames of each."""
        # Three convolutions widen the context of a frame to 15, two more only mix channels. Nothing
        # is padded, so no frame at the edges sees anything but speech, and no mask is needed before
        # the end.
        check_frames(features, lengths, self.min_frames, "XVector")
        for conv, norm in zip(self.convs, self.norms, strict=True):
            features = relu_then_norm(conv(features), norm)
        lengths = valid_length(lengths, self.min_frames, 1)
        return mask_frames(features, lengths), lengths  # (batch, 1500, frames - 14)
