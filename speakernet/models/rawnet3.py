"""RawNet3: raw samples, a learned analytic sinc filterbank and Res2Net-style blocks.

Everything before the first block runs in float32, regardless of autocast.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from speakernet.frontend.features import Lengths, hz_to_mel, preemphasize
from speakernet.models.layers import (
    Trunk,
    check_frames,
    mask_frames,
    mean_over_frames,
    multi_scale,
    relu_then_norm,
    valid_length,
)
from speakernet.models.options.trunks import RawNet3Options
from speakernet.models.tdnn import FrameConvolution

PREEMPHASIS = 0.97
# Both from voxceleb_trainer's RawNet3.py; torch's default for instance norm is 1e-5.
INPUT_NORM_EPSILON = 1e-4
LOG_OFFSET = 1e-6
KERNEL_SAMPLES = 251
LOWEST_EDGE_HZ = 30.0
MIN_HZ = 50.0
"""Minimum of a filter's lower edge and of its width."""


class RawNet3(Trunk):
    """Raw-waveform network with analytic sinc filters; 16,280,322 parameters (ECA,
    256-dimensional).

    Source: Jung et al. 2022, "Pushing the limits of raw waveform speaker recognition", in
    voxceleb_trainer's form.
    """

    def __init__(self, options: RawNet3Options, embedding_dim: int, sample_rate: int) -> None:
        super().__init__()
        channels = options.channels
        scale = options.scale
        self.out_channels = 1536
        self.input_weight = nn.Parameter(torch.ones(1))
        self.input_bias = nn.Parameter(torch.zeros(1))
        self.filterbank = SincFilterbank(channels // 4, options.sinc_stride, sample_rate)
        self.block1 = MultiScaleBlock(channels // 4, channels, dilation=2, scale=scale, pool=5)
        self.block2 = MultiScaleBlock(channels, channels, dilation=3, scale=scale, pool=3)
        self.block3 = MultiScaleBlock(channels, channels, dilation=4, scale=scale)
        # A frame after both poolings covers 5 x 3 frames of the filterbank.
        self.min_frames = KERNEL_SAMPLES + 14 * options.sinc_stride
        self.aggregate = nn.Conv1d(3 * channels, self.out_channels, 1)
        # The published definition has two batch norms that its forward pass never calls. They are
        # kept, frozen, so that its checkpoints load completely and the number of parameters
        # matches.
        self.idle_norms = nn.ModuleList(
            [nn.BatchNorm1d(channels // 4), nn.BatchNorm1d(embedding_dim)]
        )
        self.idle_norms.requires_grad_(False)

    def forward(self, features: Tensor, lengths: Lengths = None) -> tuple[Tensor, Lengths]:
        """(batch, 1, samples) to (batch, 1536, samples / stride / 15), and the valid frames of
        each.
        """
        # The filterbank takes the place of a spectrogram, at a hop of 10 samples instead of 160;
        # two poolings then leave one frame in 150 samples. As in ECAPA-TDNN, the outputs of all
        # blocks are aggregated.
        check_frames(features, lengths, self.min_frames, "RawNet3", "samples")
        with torch.autocast(features.device.type, enabled=False):
            hidden, lengths = self._filter(features.float().squeeze(1), lengths)
        first, lengths = self.block1(hidden, lengths)  # (batch, channels, frames / 5)
        second, pooled_lengths = self.block2(first, lengths)  # (batch, channels, frames / 15)
        # Pooled three to one like the second block's output, so that the two can be added.
        pooled = pool_max(first, 3)
        third, _ = self.block3(pooled + second, pooled_lengths)
        hidden = torch.cat((pooled, second, third), dim=1)  # (batch, 3 x channels, frames / 15)
        frames = self.aggregate(hidden).relu_()
        return mask_frames(frames, pooled_lengths), pooled_lengths

    def _filter(self, waveforms: Tensor, lengths: Lengths) -> tuple[Tensor, Lengths]:
        """Pre-emphasis, normalisation of the utterance, then log filter magnitudes with their mean
        removed.
        """
        waveforms = self._normalize(preemphasize(waveforms, PREEMPHASIS), lengths)
        magnitudes = self.filterbank(waveforms.unsqueeze(1)).abs()  # (batch, filters, frames)
        frame_lengths = valid_length(lengths, KERNEL_SAMPLES, self.filterbank.stride)
        bands = mask_frames((magnitudes + LOG_OFFSET).log(), frame_lengths)
        bands = bands - mean_over_frames(bands, frame_lengths).unsqueeze(2)
        return mask_frames(bands, frame_lengths), frame_lengths

    def _normalize(self, waveforms: Tensor, lengths: Lengths) -> Tensor:
        """Instance norm of (batch, samples) over the valid samples, with a learned weight and
        bias.
        """
        if lengths is None:
            variance, mean = torch.var_mean(waveforms, dim=1, keepdim=True, correction=0)
        else:
            count = lengths.unsqueeze(1)  # (batch, 1)
            mean = mask_frames(waveforms, lengths).sum(dim=1, keepdim=True) / count
            centred = mask_frames(waveforms - mean, lengths)
            variance = centred.square().sum(dim=1, keepdim=True) / count
        scale = torch.rsqrt(variance + INPUT_NORM_EPSILON) * self.input_weight
        return mask_frames((waveforms - mean) * scale + self.input_bias, lengths)


class SincFilterbank(nn.Module):
    """Band-pass filters with two learned frequencies each, as cosine and sine halves (an analytic
    filterbank).

    Source: Ravanelli and Bengio 2018, "Speaker recognition from raw waveform with SincNet",
    equations 4 to 7; analytic form by Pariente et al. 2020, "Filterbank design for end-to-end
    speech separation", section 2.
    """

    window: Tensor
    axis: Tensor

    def __init__(self, num_filters: int, stride: int, sample_rate: int) -> None:
        super().__init__()
        self.stride = stride
        self.sample_rate = sample_rate
        # On the meta device this arithmetic would load torch's compiler.
        with torch.device("cpu"):
            # Initial edges as in asteroid's ParamSincFB, which the original uses.
            low = hz_to_mel(LOWEST_EDGE_HZ)
            high = hz_to_mel(sample_rate / 2 - 2 * MIN_HZ)
            mels = torch.linspace(low, high, num_filters // 2 + 1, dtype=torch.float64)
            edges = 700 * (10 ** (mels / 2595) - 1)
            half = KERNEL_SAMPLES // 2
            # The left half of a symmetric Hamming window, and the times left of the centre in
            # radians per hertz.
            window = torch.hamming_window(KERNEL_SAMPLES, periodic=False, dtype=torch.float64)
            window = window[:half]
            # Divide before multiplying: at phases of 400 radians the last bit of the axis matters.
            seconds = torch.arange(-half, 0, dtype=torch.float32).unsqueeze(0) / sample_rate
            axis = 2 * math.pi * seconds  # (1, half kernel)
        device = torch.get_default_device()
        self.low_hz = nn.Parameter(edges[:-1].unsqueeze(1).float().to(device))
        self.band_hz = nn.Parameter(edges.diff().unsqueeze(1).float().to(device))
        self.register_buffer("window", window.float().to(device), persistent=False)
        self.register_buffer("axis", axis.to(device), persistent=False)

    def forward(self, waveforms: Tensor) -> Tensor:
        """(batch, 1, samples) to (batch, filters, frames), without padding."""
        return functional.conv1d(waveforms, self.filters(), stride=self.stride)

    def filters(self) -> Tensor:
        """The impulse responses, (filters, 1, kernel samples)."""
        low = MIN_HZ + self.low_hz.abs()
        high = (low + MIN_HZ + self.band_hz.abs()).clamp(MIN_HZ, self.sample_rate / 2)
        band = high - low  # (filters / 2, 1)
        low_phase = low @ self.axis  # (filters / 2, half kernel)
        high_phase = high @ self.axis
        cosine = (high_phase.sin() - low_phase.sin()) / (self.axis / 2) * self.window
        sine = (low_phase.cos() - high_phase.cos()) / (self.axis / 2) * self.window
        # At time zero the limit of the quotient is twice the band for the cosine and zero for the
        # sine.
        even = torch.cat((cosine, 2 * band, cosine.flip(1)), dim=1)  # (filters / 2, kernel)
        odd = torch.cat((sine, torch.zeros_like(band), -sine.flip(1)), dim=1)
        return torch.cat((even / (2 * band), odd / (2 * band))).unsqueeze(1)


class MultiScaleBlock(nn.Module):
    """Res2Net block followed by AFMS.

    Source: Gao et al. 2019, "Res2Net"; Jung et al. 2020, "Improved RawNet with feature map scaling"
    (AFMS).
    """

    def __init__(
        self, channels_in: int, channels: int, dilation: int, scale: int, pool: int = 1
    ) -> None:
        super().__init__()
        width = channels // scale
        widened = width * scale
        self.conv_in = nn.Conv1d(channels_in, widened, 1)
        self.norm_in = nn.BatchNorm1d(widened)
        self.convs = nn.ModuleList(
            FrameConvolution(width, width, 3, dilation=dilation) for _ in range(scale - 1)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(scale - 1))
        self.conv_out = nn.Conv1d(widened, channels, 1)
        self.norm_out = nn.BatchNorm1d(channels)
        same = channels_in == channels
        self.shortcut = nn.Identity() if same else nn.Conv1d(channels_in, channels, 1, bias=False)
        self.pool = pool
        self.scaling = FeatureMapScaling(channels)

    def forward(self, features: Tensor, lengths: Lengths = None) -> tuple[Tensor, Lengths]:
        """(batch, channels, frames) and valid frames, in and out; `pool` times fewer frames."""
        # ReLU before the norm throughout, as in the original.
        hidden = self.norm_in(self.conv_in(features).relu_())
        hidden = multi_scale(hidden, lengths, self.convs, self.norms, relu_then_norm, passed="last")
        hidden = self.norm_out(self.conv_out(hidden).relu_())
        hidden = pool_max(hidden + self.shortcut(features), self.pool)
        lengths = valid_length(lengths, self.pool, self.pool)
        return self.scaling(mask_frames(hidden, lengths), lengths), lengths


def pool_max(features: Tensor, num_frames: int) -> Tensor:
    """Max pooling over groups of `num_frames` of (batch, channels, frames); an incomplete last
    group is dropped.
    """
    if num_frames == 1:
        return features
    # In two dimensions, because torch exports one-dimensional pooling with the traced length.
    rows = features.unsqueeze(2)  # (batch, channels, 1, frames)
    return functional.max_pool2d(rows, (1, num_frames)).squeeze(2)


class FeatureMapScaling(nn.Module):
    """AFMS: shifts every channel by a learned amount, then scales it by a gate computed from the
    channels' means.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(channels, 1))
        self.gate = nn.Linear(channels, channels)

    def forward(self, features: Tensor, lengths: Lengths = None) -> Tensor:
        """(batch, channels, frames) in and out."""
        means = mean_over_frames(features, lengths)  # (batch, channels)
        gate = self.gate(means).sigmoid().unsqueeze(2)  # (batch, channels, 1)
        return mask_frames((features + self.shift) * gate, lengths)
