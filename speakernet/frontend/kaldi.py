"""Kaldi's filterbank and cepstra for whole batches, on any device, with gradients."""

import torch
from torch import Tensor
from torch.nn import functional
from torchaudio.compliance.kaldi import get_mel_banks

from speakernet.frontend.features import Lengths, MelFrontEnd, valid_frames
from speakernet.frontend.options import KaldiFbankOptions, KaldiMfccOptions
from speakernet.frontend.perturbation import KeyedDraws
from speakernet.options import SAMPLE_RATE

# lhotse's highest band ends this far below half the sample rate.
LHOTSE_MARGIN_HZ = 400.0
# Kaldi's cepstral lifter.
LIFTER = 22.0


class KaldiFbank(MelFrontEnd):
    """Kaldi's log filterbank energies for a whole batch at once, with the differences between
    toolkits as options.

    Source: Kaldi's `compute-fbank-feats`, other options at their defaults, snip-edges true. In the
    style of lhotse (its `Fbank`, also computed by sherpa-onnx) snip-edges is false and high-freq
    -400.
    """

    options: KaldiFbankOptions

    def __init__(
        self, options: KaldiFbankOptions, sample_rate: int = SAMPLE_RATE, seed: int = 0
    ) -> None:
        super().__init__(options, sample_rate)
        self.noise = KeyedDraws(seed, int(options.dither > 0))
        self.is_centred = options.style == "lhotse"
        # A Hann window to the power of 0.85 is Kaldi's `povey` window.
        if self.options.window == "povey":
            window = torch.hann_window(self.window_samples, periodic=False) ** 0.85
        else:
            window = torch.hamming_window(self.window_samples, periodic=False)
        self.register_buffer("window", window, persistent=False)

    def make_bank(self) -> Tensor:
        """Kaldi's triangles, from 20 Hz to half the sample rate or slightly below."""
        # high_hz <= 0 counts from the Nyquist frequency; with a warp of 1, VTLN's bounds (100 and
        # -500) have no effect.
        points = self.fft_samples
        rate = float(self.sample_rate)
        high_hz = -LHOTSE_MARGIN_HZ if self.options.style == "lhotse" else 0.0
        bank, _ = get_mel_banks(
            self.options.num_mels, points, rate, 20.0, high_hz, 100.0, -500.0, 1.0
        )
        # Kaldi leaves out the Nyquist bin; a zero column makes the bank fit the FFT.
        return functional.pad(bank, (0, 1)).T.contiguous()

    def num_frames(self, num_samples: Tensor) -> Tensor:
        """Only whole windows (Kaldi's snip-edges), or every hop of which at least half is in the
        utterance.
        """
        if self.is_centred:
            return (num_samples + self.hop_samples // 2) // self.hop_samples
        return (num_samples - self.window_samples) // self.hop_samples + 1

    def energies(self, waveforms: Tensor, lengths: Lengths) -> Tensor:
        """Scale and dither; per frame: mean removed, pre-emphasis 0.97, window, power spectrum,
        mel, logarithm.
        """
        waveforms = waveforms * self.options.scale
        if self.is_centred:
            # Half a window before the first centre, which is half a hop after the start.
            half = self.window_samples // 2
            left = half - self.hop_samples // 2
            right = self.window_samples - half - self.hop_samples % 2
            waveforms = mirror_ends(waveforms, left, right, lengths)
        if self.training and self.options.dither:
            waveforms = waveforms + self.options.dither * self.noise.normal_like(waveforms)
        power = self.power(waveforms).transpose(1, 2)  # (batch, frames, bins)
        # (batch, frames, mels)
        energies = torch.matmul(power, self.mel_bank)
        if self.options.energy_floor_db:
            energies = energies + self.floor(energies, lengths)
        # Kaldi's floor, which keeps digital silence finite.
        logarithms = energies.clamp(min=torch.finfo(torch.float32).eps).log()
        return self.from_log_energies(logarithms).transpose(1, 2)  # (batch, features, frames)

    def spectrum(self, waveforms: Tensor) -> Tensor:
        """Per window: mean removed, pre-emphasis 0.97, window function, transform."""
        # (batch, frames, samples)
        frames = waveforms.unfold(1, self.window_samples, self.hop_samples)
        frames = frames - frames.mean(dim=2, keepdim=True)
        # In Kaldi, the sample before the first of a frame equals the first.
        previous = torch.cat((frames[..., :1], frames[..., :-1]), dim=2)
        frames = (frames - 0.97 * previous) * self.window
        return torch.fft.rfft(frames, n=self.fft_samples).transpose(1, 2)  # (batch, bins, frames)

    def floor(self, energies: Tensor, lengths: Lengths) -> Tensor:
        """Each utterance's mean energy, reduced by `energy_floor_db`: (batch, frames, mels) to
        (batch, 1, 1).
        """
        count: int | Tensor = energies.shape[1]
        if lengths is not None:
            count = frames = self.num_frames(lengths)
            energies = energies * valid_frames(frames, energies.shape[1]).unsqueeze(2)
        # In float64, so that an utterance in a longer batch has the same sum.
        mean = energies.sum(dim=(1, 2), dtype=torch.float64) / (count * energies.shape[2])
        floor = 10 ** (-self.options.energy_floor_db / 10) * mean
        return floor.float().reshape(-1, 1, 1)  # (batch, 1, 1)

    def from_log_energies(self, energies: Tensor) -> Tensor:
        """(batch, frames, mels) to (batch, frames, features); here unchanged."""
        return energies


class KaldiMfcc(KaldiFbank):
    """Kaldi's mel-frequency cepstra: a cosine transform of the log energies, with liftered
    coefficients.

    Source: Kaldi's `compute-mfcc-feats`, `--use-energy=false`, other options as for the filterbank.
    """

    transform: Tensor

    def __init__(
        self, options: KaldiMfccOptions, sample_rate: int = SAMPLE_RATE, seed: int = 0
    ) -> None:
        super().__init__(options, sample_rate, seed)
        self.num_features = options.num_cepstra
        bands = torch.arange(options.num_mels)
        order = torch.arange(options.num_cepstra)
        # In float64: the argument of the cosine reaches hundreds.
        angle = torch.pi / options.num_mels * (bands.double().unsqueeze(1) + 0.5) * order.double()
        transform = torch.cos(angle) * (2.0 / options.num_mels) ** 0.5  # (mels, cepstra)
        transform[:, 0] = (1.0 / options.num_mels) ** 0.5
        lifter = 1.0 + 0.5 * LIFTER * torch.sin(torch.pi * order.double() / LIFTER)
        self.register_buffer("transform", (transform * lifter).float(), persistent=False)

    def from_log_energies(self, energies: Tensor) -> Tensor:
        """(batch, frames, mels) to (batch, frames, cepstra)."""
        return torch.matmul(energies, self.transform)


def mirror_ends(waveforms: Tensor, left: int, right: int, lengths: Lengths) -> Tensor:
    """Mirror both ends of every utterance at its own length, including the last sample, as in
    Kaldi.

    >>> mirror_ends(torch.tensor([[1, 2, 3, 0]]), 1, 2, torch.tensor([3]))[:, :6]
    tensor([[1, 1, 2, 3, 3, 2]])
    """
    if lengths is None:
        start = waveforms[:, :left].flip(1)
        return torch.cat((start, waveforms, waveforms[:, -right:].flip(1)), dim=1)
    end = lengths.unsqueeze(1)  # (batch, 1)
    position = torch.arange(-left, waveforms.shape[1] + right, device=waveforms.device)
    source = torch.where(position < 0, -1 - position, position)
    source = torch.where(source < end, source, 2 * end - 1 - source)  # (batch, left + samples + …)
    return waveforms.gather(1, source.clamp(min=0))
