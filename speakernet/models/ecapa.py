"""ECAPA-TDNN: time-delay blocks with Res2Net's split and squeeze-and-excitation, all of them aggregated."""

import torch
from torch import Tensor, nn

from speakernet.models.layers import (
    FrameConvolution,
    FrameExcitation,
    Passed,
    Trunk,
    check_frames,
    mask_frames,
    multi_scale,
    relu_then_norm,
)
from speakernet.models.options.trunks import ECAPA_GROUPS, ECAPAOptions

DILATIONS = (2, 3, 4)
GATE_CHANNELS = 128
# Reflection needs more frames than it mirrors, four for the widest convolution.
MIN_FRAMES_REFLECTED = 5


class ECAPA(Trunk):
    """ECAPA-TDNN in the forms of wespeaker (the default) and of SpeechBrain, whose models 3D-Speaker trains too.

    Source: Desplanques et al. 2020, "ECAPA-TDNN: emphasized channel attention, propagation and aggregation in TDNN
    based speaker verification".
    """

    def __init__(self, options: ECAPAOptions, num_features: int) -> None:
        super().__init__()
        channels, aggregate_channels, speechbrain = options.channels, options.aggregate_channels, options.speechbrain
        self.out_channels = aggregate_channels
        self.min_frames = MIN_FRAMES_REFLECTED if speechbrain else 1
        self.conv = FrameConvolution(num_features, channels, 5, reflects=speechbrain)
        self.norm = nn.BatchNorm1d(channels)
        self.blocks = nn.ModuleList(ECAPABlock(channels, dilation, speechbrain) for dilation in DILATIONS)
        self.aggregate = nn.Conv1d(len(DILATIONS) * channels, aggregate_channels, 1)
        # SpeechBrain's `mfa` is a block with a norm of its own, wespeaker's `conv` is followed by a ReLU alone.
        self.aggregate_norm = nn.BatchNorm1d(aggregate_channels) if speechbrain else nn.Identity()

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, mels, frames) to (batch, aggregate channels, frames), and the valid frames of each."""
        if self.min_frames > 1:
            check_frames(features, lengths, self.min_frames, "ECAPA-TDNN with mirrored edges")
        hidden = relu_then_norm(self.conv(features, lengths), self.norm)
        outputs: list[Tensor] = []
        for block in self.blocks:
            hidden = block(hidden, lengths)
            outputs.append(hidden)
        frames = relu_then_norm(self.aggregate(torch.cat(outputs, dim=1)), self.aggregate_norm)
        return mask_frames(frames, lengths), lengths


class ECAPABlock(nn.Module):
    """SE-Res2Block: 1 x 1 convolution, split, 1 x 1 convolution, gate, shortcut."""

    def __init__(self, channels: int, dilation: int, speechbrain: bool) -> None:
        super().__init__()
        self.passed: Passed = "first" if speechbrain else "last"
        width = channels // ECAPA_GROUPS
        self.conv_in = nn.Conv1d(channels, channels, 1)
        self.norm_in = nn.BatchNorm1d(channels)
        self.convs = nn.ModuleList(
            FrameConvolution(width, width, 3, dilation=dilation, reflects=speechbrain) for _ in range(ECAPA_GROUPS - 1)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(ECAPA_GROUPS - 1))
        self.conv_out = nn.Conv1d(channels, channels, 1)
        self.norm_out = nn.BatchNorm1d(channels)
        self.gate = FrameExcitation(channels, GATE_CHANNELS)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:
        """(batch, channels, frames) in and out."""
        hidden = relu_then_norm(self.conv_in(features), self.norm_in)
        hidden = multi_scale(hidden, lengths, self.convs, self.norms, relu_then_norm, self.passed)
        hidden = relu_then_norm(self.conv_out(hidden), self.norm_out)
        return features + self.gate(hidden, lengths)
