"""The mel energies of wespeaker's ReDimNet2 (`tfmel`), and of the authors' files with `feat_type:
tf`.

Unlike in the other log-mel features, frames have 400 samples, the first frame starts 80 samples
before the utterance, the window is symmetric, and filters are triangles over mels. As published,
the bin at half the sample rate is left out, but the filters take the bin below it to be there.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from speakernet.frontend.features import (
    Lengths,
    MelFrontEnd,
    band_edges,
    hz_to_mel,
    normalize_waveforms,
    preemphasize,
    valid_frames,
)
from speakernet.frontend.options import TfMelOptions
from speakernet.options import SAMPLE_RATE

EPSILON = 1e-8
"""Energies stay between this and its inverse. It is also added to an energy before the logarithm,
and to the deviation of the waveform."""


class TfMel(MelFrontEnd):
    """Log mel energies as in wespeaker's `TFMelFrontend`.

    Source: wespeaker dfa7419, `frontend/tfmel.py`; ReDimNet2 ffe8f27, `layers/features_tf.py`.
    """

    options: TfMelOptions

    def __init__(self, options: TfMelOptions, sample_rate: int = SAMPLE_RATE) -> None:
        super().__init__(options, sample_rate)
        self.pad_samples = self.hop_samples // 2
        """Zeros before an utterance, and after it."""
        self.min_samples = self.window_samples - 2 * self.pad_samples
        self.register_buffer(
            "window", torch.hamming_window(self.window_samples, periodic=False), persistent=False
        )

    def make_bank(self) -> Tensor:
        """Triangles over mels, without the constant component of a frame."""
        low_hz, high_hz = band_edges(self.options, self.sample_rate)
        num_bins = self.fft_samples // 2
        return triangles_over_mels(
            self.options.num_mels, num_bins, low_hz, high_hz, self.sample_rate
        )

    def num_frames(self, num_samples: Tensor) -> Tensor:
        """Whole windows of the padded utterance."""
        padded = num_samples + 2 * self.pad_samples
        return (padded - self.window_samples) // self.hop_samples + 1

    def energies(self, waveforms: Tensor, lengths: Lengths) -> Tensor:
        """Normalised waveform, pre-emphasis, zeros at the ends, power spectrum, mel bands,
        logarithm.
        """
        options = self.options
        if options.normalize_waveform:
            waveforms = normalize_waveforms(waveforms, lengths, EPSILON)
        if options.preemphasis:
            waveforms = preemphasize(waveforms, float(options.preemphasis))
        if lengths is not None:
            # After the pre-emphasis, which carries the last sample one step past the end.
            waveforms = waveforms * valid_frames(lengths, waveforms.shape[1])
        power = self.power(functional.pad(waveforms, (self.pad_samples, self.pad_samples)))
        power = power.clamp(EPSILON, 1 / EPSILON).transpose(1, 2)  # (batch, frames, bins)
        # (batch, frames, mels)
        energies = torch.matmul(power, self.mel_bank).clamp(EPSILON, 1 / EPSILON)
        # Equals log(energies + EPSILON), in which the ONNX exporter would drop the 1e-8.
        logarithms = torch.log1p(energies / EPSILON) + math.log(EPSILON)
        return logarithms.transpose(1, 2)  # (batch, mels, frames)

    def spectrum(self, waveforms: Tensor) -> Tensor:
        """Spectra of windowed frames, without the bin at half the sample rate."""
        # (batch, frames, samples)
        frames = waveforms.unfold(1, self.window_samples, self.hop_samples)
        frames = frames * self.window
        return torch.fft.rfft(frames, n=self.fft_samples)[..., :-1].transpose(1, 2)


def triangles_over_mels(
    num_mels: int, num_bins: int, low_hz: float, high_hz: float, sample_rate: int
) -> Tensor:
    """Triangular filters over mels, (bins, mels); the last bin is taken to be at half the sample
    rate.

    >>> triangles_over_mels(1, 3, 0.0, 1000.0, 2000).round(decimals=2)
    tensor([[0.0000],
            [0.7900],
            [0.0000]])
    """
    edges = torch.linspace(hz_to_mel(low_hz), hz_to_mel(high_hz), num_mels + 2, dtype=torch.float64)
    hertz = torch.linspace(0, sample_rate // 2, num_bins, dtype=torch.float64).unsqueeze(1)
    # In mels, as by `hz_to_mel`, which takes a single number.
    bins = 2595.0 * torch.log10(1.0 + hertz / 700.0)
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])  # (bins, mels)
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    bank = torch.minimum(rising, falling).clamp(min=0.0)
    # The constant component of a frame is not speech.
    bank[0] = 0.0
    return bank.float()
