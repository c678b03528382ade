"""Time-delay networks: ECAPA-TDNN and the x-vector network, and the frame convolution that other
trunks use too.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from speakernet.models.layers import (
    Passed,
    SqueezeExcitation,
    Trunk,
    check_frames,
    mask_frames,
    mean_over_frames,
    multi_scale,
    relu_then_norm,
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

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:  # type: ignore[override]
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
    places = torch.arange(-count, features.shape[-1] + count, device=features.device).abs()
    last = (lengths - 1).unsqueeze(1)
    # `abs` above mirrors the start, this each utterance's end; beyond the mirrored end, places are
    # negative.
    places = (last - (last - places).abs()).clamp(min=0)  # (batch, frames)
    return features.gather(2, places.unsqueeze(1).expand(-1, features.shape[1], -1))


class FrameExcitation(SqueezeExcitation):
    """Squeeze-and-excitation over a sequence of frames."""

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:
        """(batch, channels, frames) in and out."""
        means = mean_over_frames(mask_frames(features, lengths), lengths)
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

    def forward(
        self, features: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(batch, mels, frames) to (batch, aggregate channels, frames), and the valid frames of
        each.
        """
        if self.min_frames > 1:
            check_frames(features, lengths, self.min_frames, "ECAPA-TDNN with mirrored edges")
        outputs = [relu_then_norm(self.conv(features, lengths), self.norm)]
        for block in self.blocks:
            outputs.append(block(outputs[-1], lengths))
        frames = relu_then_norm(self.aggregate(torch.cat(outputs[1:], dim=1)), self.aggregate_norm)
        return mask_frames(frames, lengths), lengths


class ECAPABlock(nn.Module):
    """SE-Res2Block: 1 x 1 convolution, split, 1 x 1 convolution, gate, shortcut."""

    def __init__(self, channels: int, dilation: int, speechbrain: bool) -> None:
        super().__init__()
        self.passed: Passed = "first" if speechbrain else "last"
        width = channels // ECAPA_GROUPS
        places = range(ECAPA_GROUPS - 1)
        self.conv_in = nn.Conv1d(channels, channels, 1)
        self.norm_in = nn.BatchNorm1d(channels)
        self.convs = nn.ModuleList(
            FrameConvolution(width, width, 3, dilation=dilation, reflects=speechbrain)
            for _ in places
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in places)
        self.conv_out = nn.Conv1d(channels, channels, 1)
        self.norm_out = nn.BatchNorm1d(channels)
        self.gate = FrameExcitation(channels, GATE_CHANNELS)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:
        """(batch, channels, frames) in and out."""
        hidden = relu_then_norm(self.conv_in(features), self.norm_in)
        hidden = multi_scale(hidden, lengths, self.convs, self.norms, relu_then_norm, self.passed)
        hidden = relu_then_norm(self.conv_out(hidden), self.norm_out)
        return features + self.gate(hidden, lengths)


# (kernel, dilation) of each layer; nothing is padded.
LAYERS = ((5, 1), (3, 2), (3, 3), (1, 1), (1, 1))


class XVector(Trunk):
    """Time-delay network of the x-vector; 4.61 million parameters with TSTP, 80 mels and 512
    dimensions.

    Source: Snyder et al. 2018, "X-vectors: robust DNN embeddings for speaker recognition", table 1;
    norms and the second embedding layer as in wespeaker.
    """

    # 1 + 4 + 4 + 6: the span of the kernels of the first three layers.
    min_frames = 15

    def __init__(self, options: XVectorOptions, num_features: int) -> None:
        super().__init__()
        widths = (num_features, *(options.channels,) * 4, options.statistics_channels)
        self.out_channels = widths[-1]
        self.convs = nn.ModuleList(
            nn.Conv1d(widths[index], widths[index + 1], kernel, dilation=dilation)
            for index, (kernel, dilation) in enumerate(LAYERS)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(width, affine=False) for width in widths[1:])

    def forward(
        self, features: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(batch, mels, frames) to (batch, 1500, frames - 14), and the valid frames of each."""
        check_frames(features, lengths, self.min_frames, "XVector")
        for conv, norm in zip(self.convs, self.norms, strict=True):
            features = relu_then_norm(conv(features), norm)
        lengths = None if lengths is None else lengths - (self.min_frames - 1)
        return mask_frames(features, lengths), lengths
