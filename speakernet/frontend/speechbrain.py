"""The filterbank that SpeechBrain's published models, and models trained with it, expect.

The transform has as many points as the window (400, not 512), the ends are padded with zeros,
filters are triangles over hertz, and energies are in decibels with a floor 80 dB below the
utterance's largest.
"""

import torch
from torch import Tensor
from torch.nn import functional

from speakernet.frontend.features import Lengths, MelFrontEnd, valid_frames
from speakernet.frontend.options import SpeechBrainFbankOptions
from speakernet.options import SAMPLE_RATE

MIN_ENERGY = 1e-10


class SpeechBrainFbank(MelFrontEnd):
    """Log mel energies as in SpeechBrain's `Fbank`, with the utterance mean removed.

    Source: speechbrain, `lobes/features.py` and `processing/features.py` at their defaults.
    """

    options: SpeechBrainFbankOptions

    def __init__(self, options: SpeechBrainFbankOptions, sample_rate: int = SAMPLE_RATE) -> None:
        super().__init__(options, sample_rate)
        self.min_samples = 1
        # Periodic (torch's default), as in SpeechBrain; Kaldi's windows are symmetric.
        self.register_buffer("window", torch.hamming_window(self.window_samples), persistent=False)

    def make_bank(self) -> Tensor:
        """SpeechBrain's triangles."""
        return triangles(self.options.num_mels, self.window_samples // 2 + 1, self.sample_rate)

    def energies(self, waveforms: Tensor, lengths: Lengths) -> Tensor:
        """Zeros at the ends, power spectrum, mel bands, decibels with a floor."""
        if lengths is not None:
            # The ends are padded with zeros, so zeros after a shorter utterance are its padding.
            waveforms = waveforms * valid_frames(lengths, waveforms.shape[1])
        half = self.window_samples // 2
        power = self.power(functional.pad(waveforms, (half, half)))  # (batch, bins, frames)
        energies = torch.matmul(self.mel_bank.mT, power)  # (batch, mels, frames)
        decibels = 10.0 * energies.clamp(min=MIN_ENERGY).log10()
        if lengths is not None:
            # A frame past the last one may still overlap the utterance; its energy must not raise
            # the floor.
            inside = valid_frames(self.num_frames(lengths), decibels.shape[2])
            silence = 10.0 * torch.tensor(MIN_ENERGY).log10().item()
            decibels = decibels.masked_fill(~inside.unsqueeze(1), silence)
        loudest = decibels.amax(dim=(1, 2), keepdim=True)  # (batch, 1, 1)
        return torch.maximum(decibels, loudest - self.options.top_db)

    def spectrum(self, waveforms: Tensor) -> Tensor:
        """Spectra of windows as long as the transform."""
        return torch.stft(
            waveforms,
            self.window_samples,
            hop_length=self.hop_samples,
            window=self.window,
            center=False,
            return_complex=True,
        )


def triangles(num_mels: int, num_bins: int, sample_rate: int) -> Tensor:
    """Triangular filters over hertz, (bins, mels): evenly spaced on the mel scale, both sides as
    wide as the lower.

    >>> triangles(2, 3, 2000).round(decimals=2)  # bins at 0, 500 and 1000 Hz
    tensor([[0.0000, 0.0000],
            [0.0000, 0.8000],
            [0.0000, 0.0000]])
    """
    # On the CPU even if a network is built on the meta device: the value is needed immediately.
    top = 2595.0 * torch.log10(torch.tensor(1.0 + (sample_rate // 2) / 700.0, device="cpu"))
    hertz = 700.0 * (10.0 ** (torch.linspace(0.0, float(top), num_mels + 2) / 2595.0) - 1.0)
    widths = (hertz[1:] - hertz[:-1])[:-1]
    bins = torch.linspace(0, sample_rate // 2, num_bins).unsqueeze(1)
    slope = (bins - hertz[1:-1]) / widths  # (bins, mels)
    return torch.minimum(slope + 1.0, 1.0 - slope).clamp(min=0.0)
