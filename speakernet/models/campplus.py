"""CAM++: a small residual head over mels and frames, then densely connected time-delay layers with
context masks.
"""

import types

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
from speakernet.models.options.trunks import CAMPPlusOptions
from speakernet.models.resnet import ResidualBlock, ResidualStage
from speakernet.models.tdnn import FrameConvolution

HEAD_CHANNELS = 32
INITIAL_CHANNELS = 128
GROWTH = 32
BOTTLENECK = 4 * GROWTH
# (layers, dilation) of each dense block.
DENSE_BLOCKS = ((12, 1), (24, 2), (16, 2))
# One second at a hop of 10 ms: `seg_pooling` of 3D-Speaker's layers.py.
SEGMENT_FRAMES = 100


class CAMPPlus(Trunk):
    """CAM++; 7.18 million parameters (TSTP, 80 mels, 512-dimensional).

    Source: Wang et al. 2023, "CAM++: a fast and efficient network for speaker verification using
    context-aware masking".
    """

    norm_behind = types.MappingProxyType({"conv1": "norm1", "conv2": "norm2", "conv_in": "norm_in"})

    def __init__(self, options: CAMPPlusOptions, num_features: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, HEAD_CHANNELS, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(HEAD_CHANNELS)
        self.stages = nn.ModuleList(
            ResidualStage(ResidualBlock, HEAD_CHANNELS, HEAD_CHANNELS, 2, (2, 1)) for _ in range(2)
        )
        self.conv2 = nn.Conv2d(
            HEAD_CHANNELS, HEAD_CHANNELS, 3, stride=(2, 1), padding=1, bias=False
        )
        self.norm2 = nn.BatchNorm2d(HEAD_CHANNELS)
        # Three strides of 2 along mels, each rounding up.
        num_rows = -(-num_features // 8)
        self.conv_in = FrameConvolution(
            HEAD_CHANNELS * num_rows, INITIAL_CHANNELS, kernel=5, stride=2, bias=False
        )
        self.norm_in = nn.BatchNorm1d(INITIAL_CHANNELS)
        channels = INITIAL_CHANNELS
        self.dense = nn.ModuleList()
        self.transitions = nn.ModuleList()
        for num_layers, dilation in DENSE_BLOCKS:
            self.dense.append(DenseBlock(channels, num_layers, dilation))
            channels += num_layers * GROWTH
            self.transitions.append(NormedConvolution(channels, channels // 2))
            channels //= 2
        self.norm_out = nn.BatchNorm1d(channels)
        self.out_channels = channels
        # As in the original, the 2-D head keeps torch's default initial weights.
        for part in self.modules():
            if isinstance(part, nn.Conv1d):
                nn.init.kaiming_normal_(part.weight)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)

    def forward(self, features: Tensor, lengths: Lengths = None) -> tuple[Tensor, Lengths]:
        """(batch, mels, frames) to (batch, 512, frames / 2), and the valid frames of each."""
        # A small image network first, so that a voice a few mel bands higher or lower looks alike
        # to the time-delay layers, which do most of the work on half the frames. Within a block
        # the channels only grow; each transition halves them.
        hidden = self.conv1(features.unsqueeze(1))  # (batch, 32, mels, frames)
        hidden = mask_frames(relu(self.norm1(hidden)), lengths)
        for stage in self.stages:
            hidden, lengths = stage(hidden, lengths)
        hidden = relu(self.norm2(self.conv2(hidden)))  # (batch, 32, mels / 8, frames)
        hidden = hidden.flatten(1, 2)  # (batch, 32 x mels / 8, frames)
        hidden = relu(self.norm_in(self.conv_in(hidden, lengths)))  # (batch, 128, frames / 2)
        lengths = valid_length(lengths, 1, 2)
        # The same in all 52 layers, so computed once: every operation on a GPU costs a launch.
        counts = frames_of_segments(hidden, lengths)
        for block, transition in zip(self.dense, self.transitions, strict=True):
            hidden = transition(block(hidden, counts, lengths))
        return mask_frames(relu(self.norm_out(hidden)), lengths), lengths


class NormedConvolution(nn.Module):
    """Batch norm, ReLU and a 1 x 1 convolution."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(channels_in)
        self.conv = nn.Conv1d(channels_in, channels, 1, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """(batch, channels, frames) in and out."""
        return self.conv(relu(self.norm(features)))  # type: ignore[no-any-return]


class DenseBlock(nn.Module):
    """Layers that each see the block's input and the outputs of all previous layers."""

    def __init__(self, channels_in: int, num_layers: int, dilation: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            DenseLayer(channels_in + index * GROWTH, dilation) for index in range(num_layers)
        )

    def forward(self, features: Tensor, counts: Tensor, lengths: Lengths = None) -> Tensor:
        """(batch, channels, frames) in and out; each layer adds 32 channels."""
        for layer in self.layers:
            features = torch.cat((features, layer(features, counts, lengths)), dim=1)
        return features


class DenseLayer(Foldable):
    """A bottleneck, then a convolution whose output is gated by the context of utterance and
    segment.
    """

    norm_behind = types.MappingProxyType({"bottleneck.conv": "norm"})

    def __init__(self, channels_in: int, dilation: int) -> None:
        super().__init__()
        self.bottleneck = NormedConvolution(channels_in, BOTTLENECK)
        self.norm = nn.BatchNorm1d(BOTTLENECK)
        self.local = FrameConvolution(BOTTLENECK, GROWTH, 3, dilation=dilation, bias=False)
        self.squeeze = nn.Conv1d(BOTTLENECK, BOTTLENECK // 2, 1)
        self.excite = nn.Conv1d(BOTTLENECK // 2, GROWTH, 1)

    def forward(self, features: Tensor, counts: Tensor, lengths: Lengths = None) -> Tensor:
        """(batch, channels, frames) to (batch, 32, frames); `counts` is from
        `frames_of_segments`.
        """
        # Context-aware masking: what was said around a frame, and in the whole utterance, decides
        # which channels of the local convolution count.
        hidden = mask_frames(relu(self.norm(self.bottleneck(features))), lengths)
        means = mean_contexts(hidden, counts, lengths)  # (batch, 128, segments)
        gate = self.excite(self.squeeze(means).relu()).sigmoid()  # (batch, 32, segments)
        # Constant over each segment, as in the original; the last segment is cut to the available
        # frames.
        if torch.compiler.is_exporting():
            # Works for any length; in training, indexing would be slow.
            gate = gate[:, :, torch.arange(hidden.shape[2], device=hidden.device) // SEGMENT_FRAMES]
        else:
            gate = gate.repeat_interleave(SEGMENT_FRAMES, dim=2)[:, :, : hidden.shape[2]]
        return self.local(hidden, lengths) * gate


def frames_of_segments(features: Tensor, lengths: Lengths) -> Tensor:
    """The number of frames in each segment of 100, at least 1.

    Returns:
        (1, segments), or (batch, 1, segments) with `lengths`.
    """
    num_frames = features.shape[2]
    # Not a negated floor division: exported graphs divide towards zero.
    num_segments = (num_frames + SEGMENT_FRAMES - 1) // SEGMENT_FRAMES
    # torch's exporter would fix the number of segments to that of its example. With one more, and
    # pooling instead of reshaping in `mean_contexts`, it does not.
    num_segments += torch.compiler.is_exporting()
    starts = SEGMENT_FRAMES * torch.arange(num_segments, device=features.device)
    # The last segment ends with the utterance.
    ends = num_frames if lengths is None else lengths.unsqueeze(1)
    left = ends - starts  # (segments,) or (batch, segments)
    return left.clamp(1, SEGMENT_FRAMES).unsqueeze(-2)


def mean_contexts(features: Tensor, counts: Tensor, lengths: Lengths) -> Tensor:
    """Mean over the utterance plus mean over each segment; `counts` is from `frames_of_segments`.

    Returns:
        (batch, channels, segments).
    """
    num_segments = counts.shape[-1]
    missing = num_segments * SEGMENT_FRAMES - features.shape[2]
    padded = nn.functional.pad(features, (0, missing))
    if torch.compiler.is_exporting():
        sums = SEGMENT_FRAMES * nn.functional.avg_pool1d(padded, SEGMENT_FRAMES)
    else:
        # (batch, channels, segments, 100)
        segments = padded.unflatten(2, (num_segments, SEGMENT_FRAMES))
        sums = segments.sum(dim=3, dtype=torch.promote_types(features.dtype, torch.float32))
    means = (sums / counts).to(features.dtype)
    return means + mean_over_frames(features, lengths).unsqueeze(2)
