"""ECAPA-TDNN: time-delay blocks with Res2Net's split and squeeze-and-excitation, all of them aggregated."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from speakernet.models.layers import FrameConvolution, FrameExcitation, check_frames, mask_frames
from speakernet.models.multi_scale import Passed, multi_scale, relu_then_norm
from speakernet.models.trunk import Trunk, sized

DILATIONS = (2, 3, 4)
SCALE = 8
GATE_CHANNELS = 128
# A mirrored edge needs more frames than it mirrors, four for the widest convolution.
MIN_FRAMES_REFLECTED = 5


class ECAPA(Trunk):
    """ECAPA-TDNN in the forms of wespeaker (the default) and of SpeechBrain, whose models 3D-Speaker trains too.

    Args:
        num_features: mel bands of the front end.
        channels: of the blocks.
        aggregate_channels: of the layer that sees all blocks.
        speechbrain: edges mirrored instead of padded with zeros, the first group of each split passed on instead of the
            last, batch norm behind the aggregation.
        embedding_norm: batch norm behind the embedding layer (`emb_bn` in wespeaker).

    Source: Desplanques et al. 2020, "ECAPA-TDNN: emphasized channel attention, propagation and aggregation in TDNN
    based speaker verification".
    """

    default_pooling = "GlobalASTP"
    pooling_names: ClassVar[Mapping[str, str]] = {"ASP": "GlobalASTP"}
    tested_poolings: ClassVar[Sequence[str]] = ("GlobalASTP", "ASTP", "NormASTP")
    paper = "Desplanques et al. 2020"
    published_dim = 192
    has_norm_after_pooling = True
    default_channels: ClassVar[int] = 512

    def __init__(
        self,
        num_features: int,
        channels: int = 0,
        aggregate_channels: int = 1536,
        speechbrain: bool = False,
        embedding_norm: bool = False,
    ) -> None:
        super().__init__()
        channels = channels or self.default_channels
        self.out_channels = aggregate_channels
        self.min_frames = MIN_FRAMES_REFLECTED if speechbrain else 1
        if embedding_norm:
            self.embedding_layer = "normed_linear"
        self.conv = FrameConvolution(num_features, channels, 5, reflects=speechbrain)
        self.norm = nn.BatchNorm1d(channels)
        self.blocks = nn.ModuleList(ECAPABlock(channels, dilation, speechbrain) for dilation in DILATIONS)
        self.aggregate = nn.Conv1d(len(DILATIONS) * channels, aggregate_channels, 1)
        self.aggregate_norm = nn.BatchNorm1d(aggregate_channels) if speechbrain else nn.Identity()

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, mels, frames) to (batch, aggregate channels, frames), and the valid frames of each.

        Raises:
            ValueError: an utterance shorter than what is mirrored at its edges.
        """
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
    """SE-Res2Block: 1 x 1 convolution, split, 1 x 1 convolution, gate, and the input added."""

    def __init__(self, channels: int, dilation: int, speechbrain: bool) -> None:
        super().__init__()
        self.passed: Passed = "first" if speechbrain else "last"
        width = channels // SCALE
        self.conv_in = nn.Conv1d(channels, channels, 1)
        self.norm_in = nn.BatchNorm1d(channels)
        self.convs = nn.ModuleList(
            FrameConvolution(width, width, 3, dilation=dilation, reflects=speechbrain) for _ in range(SCALE - 1)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(SCALE - 1))
        self.conv_out = nn.Conv1d(channels, channels, 1)
        self.norm_out = nn.BatchNorm1d(channels)
        self.gate = FrameExcitation(channels, GATE_CHANNELS)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:
        """(batch, channels, frames) in and out."""
        hidden = relu_then_norm(self.conv_in(features), self.norm_in)
        hidden = multi_scale(hidden, lengths, self.convs, self.norms, relu_then_norm, self.passed)
        hidden = relu_then_norm(self.conv_out(hidden), self.norm_out)
        return features + self.gate(hidden, lengths)


ECAPAS = sized(ECAPA, {"ECAPA_TDNN": {"default_channels": 512}, "ECAPA_TDNN_1024": {"default_channels": 1024}})
