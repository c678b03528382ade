"""Front ends: waveform in, `(batch, mels, frames)` out, always in float32 regardless of autocast.

They sit between the loader's batch and the model's trunk, are saved with the model, and have no
learnt parameters. Utterances of different lengths may share a batch: with `lengths`, the valid
frames of each are the same as for the utterance alone, and frames past its end are zero. torchaudio
is imported only here and in `kaldi.py`.
"""

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from speakernet.frontend.options import FrontendOptions, LogMelOptions, MelOptions, TfMelOptions
from speakernet.machine.facts import TORCH_PAIR
from speakernet.options import SAMPLE_RATE

try:
    from torchaudio.functional import melscale_fbanks
except (ImportError, OSError, RuntimeError) as error:
    raise ImportError(
        "torchaudio cannot be loaded with the installed torch; it needs a release built for it. "
        "Install both again:\n  pip uninstall -y torch torchaudio\n"
        f"  {TORCH_PAIR}\n"
        f"(the loader's error: {error})"
    ) from error

Lengths = Tensor | None
"""Valid samples or frames of each utterance in a batch, (batch,); None if all rows are full."""

WINDOW_SECONDS = 0.025
HOP_SECONDS = 0.010
# Added before the logarithm (as in voxceleb_trainer), so that digital silence stays finite.
LOG_OFFSET = 1e-6
# Variance floor of the instance normalisation, torch's default.
NORM_EPSILON = 1e-5
# Added to the deviation when normalising a waveform, as in ReDimNet.
WAVEFORM_EPSILON = 1e-6


class FrontEnd(nn.Module):
    """The abstract front end: its number of features, its frame grid, and float32 regardless of
    autocast.
    """

    num_features: int
    window_samples: int
    hop_samples: int
    min_samples: int
    """Length of the shortest utterance that has a frame."""

    span_samples: int
    """Samples that a window of `spectrum` covers."""

    kernels: Tensor | None
    """Convolution kernels of `spectrum`, set by `use_convolution`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kernels", None, persistent=False)

    def num_frames(self, num_samples: Tensor) -> Tensor:
        """Number of frames of `num_samples` samples; accepts integers too."""
        raise NotImplementedError

    def extract(self, waveforms: Tensor, lengths: Lengths) -> Tensor:
        """The features of float32 `waveforms`."""
        raise NotImplementedError

    def spectrum(self, waveforms: Tensor) -> Tensor:
        """Complex spectra of all windows, (batch, bins, frames); linear in the samples, and the
        same at every hop.
        """
        raise NotImplementedError

    def power(self, waveforms: Tensor) -> Tensor:
        """Squared magnitudes of `spectrum`, (batch, bins, frames)."""
        if self.kernels is not None:
            parts = functional.conv1d(waveforms.unsqueeze(1), self.kernels, stride=self.hop_samples)
            real, imaginary = parts.chunk(2, dim=1)  # (batch, bins, frames) each
            return real.square() + imaginary.square()
        spectrum = self.spectrum(waveforms)
        # re² + im² instead of abs()² avoids a square root, which costs as much as the FFT.
        return spectrum.real.square() + spectrum.imag.square()

    def forward(self, waveforms: Tensor, lengths: Lengths = None) -> Tensor:
        """Features of a batch.

        Returns:
            (batch, mels, frames), zero past an utterance's last frame.
        """
        if waveforms.ndim != 2:
            raise ValueError(
                f"the waveforms have shape {tuple(waveforms.shape)}; expected (batch, samples)"
            )
        shortest = waveforms.shape[1] if lengths is None else int(lengths.min())
        if shortest < self.min_samples:
            raise ValueError(
                f"an utterance of {shortest} samples is too short for the front end, which needs "
                f"{self.min_samples}"
            )
        if lengths is not None:
            lengths = lengths.to(waveforms.device, non_blocking=True)
        # From here on lengths are on the device of the waveforms.
        with torch.autocast(waveforms.device.type, enabled=False):
            return self.extract(waveforms.float(), lengths)


class RawWaveform(FrontEnd):
    """The samples themselves as one feature, for models that learn their own filterbank
    (RawNet3).
    """

    num_features = 1
    window_samples = hop_samples = min_samples = span_samples = 1

    def __init__(self, options: FrontendOptions) -> None:
        super().__init__()
        self.options = options

    def num_frames(self, num_samples: Tensor) -> Tensor:
        """Every sample is a frame."""
        return num_samples

    def extract(self, waveforms: Tensor, lengths: Lengths) -> Tensor:
        """(batch, 1, samples)."""
        if lengths is not None:
            waveforms = waveforms * valid_frames(lengths, waveforms.shape[1])
        return waveforms.unsqueeze(1)


class MelFrontEnd(FrontEnd):
    """The base of front ends with mel bands: a window of 25 ms every 10 ms."""

    mel_bank: Tensor
    window: Tensor

    def __init__(self, options: MelOptions, sample_rate: int) -> None:
        super().__init__()
        self.options = options.resolve({})
        self.sample_rate = sample_rate
        self.num_features = options.num_mels
        self.window_samples = round(WINDOW_SECONDS * sample_rate)
        self.span_samples = self.window_samples
        self.min_samples = self.window_samples
        self.hop_samples = round(HOP_SECONDS * sample_rate)
        # The smallest power of two that fits a window.
        self.fft_samples = 1 << (self.window_samples - 1).bit_length()
        # Not in state_dict: it follows from the options.
        self.register_buffer("mel_bank", self.make_bank(), persistent=False)

    def num_frames(self, num_samples: Tensor) -> Tensor:
        """One frame every hop, the first and last centred on the ends of the utterance."""
        return num_samples // self.hop_samples + 1

    def make_bank(self) -> Tensor:
        """The mel matrix, (bins, mels). Abstract, since every family of filters has its own."""
        raise NotImplementedError

    def energies(self, waveforms: Tensor, lengths: Lengths) -> Tensor:
        """Features before normalisation, (batch, mels, frames). Abstract."""
        raise NotImplementedError

    def extract(self, waveforms: Tensor, lengths: Lengths) -> Tensor:
        """`energies`, normalised over each utterance."""
        features = self.energies(waveforms, lengths)
        if lengths is not None:
            lengths = self.num_frames(lengths)
        return normalize_features(features, self.options.normalize, lengths)


class LogMel(MelFrontEnd):
    """Mel spectrogram as in voxceleb_trainer: centred frames, HTK mel scale, optional log, instance
    norm.

    Source: voxceleb_trainer f51bab8, `models/ResNetSE34L.py` (the definition that checkpoints were
    trained with).
    """

    options: LogMelOptions

    def __init__(self, options: LogMelOptions, sample_rate: int = SAMPLE_RATE) -> None:
        super().__init__(options, sample_rate)
        self.span_samples = self.fft_samples
        # Mirroring n samples needs n + 1.
        self.min_samples = self.fft_samples // 2 + 1
        is_hann = self.options.window == "hann"
        make_window = torch.hann_window if is_hann else torch.hamming_window
        self.register_buffer("window", make_window(self.window_samples), persistent=False)

    def make_bank(self) -> Tensor:
        """HTK's triangles."""
        low_hz, high_hz = band_edges(self.options, self.sample_rate)
        num_bins = self.fft_samples // 2 + 1
        # On the CPU even if a network is built on the meta device: torchaudio reads the values.
        with torch.device("cpu"):
            bank = melscale_fbanks(
                num_bins, low_hz, high_hz, self.options.num_mels, self.sample_rate
            )
        return bank.to(torch.get_default_device())

    def energies(self, waveforms: Tensor, lengths: Lengths) -> Tensor:
        """Pre-emphasis, reflected ends, power spectrum, mel bands, logarithm."""
        # What the ear does, roughly: bands that widen towards high frequencies, and loudness on a
        # logarithmic scale. Removing the mean of each band over the utterance removes what the
        # microphone and the line add to all frames alike.
        options = self.options
        if options.normalize_waveform:
            waveforms = normalize_waveforms(waveforms, lengths)
        if options.preemphasis:
            waveforms = preemphasize(waveforms, float(options.preemphasis))
        waveforms = reflect_ends(waveforms, self.fft_samples // 2, lengths)
        power = self.power(waveforms)  # (batch, bins, frames)
        features = torch.matmul(self.mel_bank.mT, power) + LOG_OFFSET  # (batch, mels, frames)
        return features.log() if options.log_input else features

    def spectrum(self, waveforms: Tensor) -> Tensor:
        """Spectra of windows as long as the FFT."""
        # The FFT takes 2.4 ms; a matrix product took 24.
        return torch.stft(
            waveforms,
            self.fft_samples,
            hop_length=self.hop_samples,
            win_length=self.window_samples,
            window=self.window,
            center=False,
            return_complex=True,
        )


def use_convolution(front_end: FrontEnd) -> None:
    """Compute a front end's power spectra by convolution instead of FFT, for export; raw samples
    are unaffected.
    """
    if isinstance(front_end, RawWaveform):
        return
    # A spectrum is linear, so the kernels are the spectra of unit impulses at each sample of a
    # window. In float64: the rounding errors of 512 sines would add up to as much as the quietest
    # bands.
    precise = copy.deepcopy(front_end).double()
    impulses = torch.eye(front_end.span_samples, dtype=torch.float64)
    spectra = precise.spectrum(impulses)[:, :, 0]  # (samples, bins)
    kernels = torch.cat((spectra.real, spectra.imag), dim=1).T  # (2 bins, samples)
    front_end.kernels = kernels.unsqueeze(1).float().contiguous()  # (2 bins, 1, samples)


def band_edges(options: TfMelOptions, sample_rate: int) -> tuple[float, float]:
    """The lower edge of the lowest band and the upper edge of the highest, in Hz."""
    low_hz = float(options.low_hz)
    high_hz = float(options.high_hz) or sample_rate / 2
    if not low_hz < high_hz <= sample_rate / 2:
        raise ValueError(
            f"{options.name}: bands from {low_hz} to {high_hz} Hz; expected low_hz below high_hz, "
            f"and high_hz at most half the sample rate ({sample_rate})"
        )
    return low_hz, high_hz


def preemphasize(waveforms: Tensor, coefficient: float) -> Tensor:
    """First-order high-pass y[t] = x[t] - coefficient x[t-1] over (batch, samples); x[-1] is x[1].

    >>> preemphasize(torch.tensor([[1.0, 2.0, 4.0]]), 0.5)
    tensor([[0.0000, 1.5000, 3.0000]])
    """
    # Reflected, as in voxceleb_trainer's `PreEmphasis`.
    previous = torch.cat((waveforms[:, 1:2], waveforms[:, :-1]), dim=1)
    return waveforms - coefficient * previous


def normalize_waveforms(
    waveforms: Tensor, lengths: Lengths = None, epsilon: float = WAVEFORM_EPSILON
) -> Tensor:
    """Normalise (batch, samples) to mean 0 and deviation 1 over each utterance's own samples; zero
    past its end.

    >>> normalize_waveforms(torch.tensor([[1.0, 3.0]])).round(decimals=3)
    tensor([[-1.,  1.]])
    """
    count: int | Tensor = waveforms.shape[1]
    inside = None
    if lengths is not None:
        count = lengths.unsqueeze(1)  # (batch, 1)
        inside = valid_frames(lengths, waveforms.shape[1])  # (batch, samples)

    # Sums in float64, so that an utterance in a longer batch has the same mean to the last bit.
    def mean(values: Tensor) -> Tensor:
        if inside is not None:
            values = values * inside
        total = values.sum(dim=1, keepdim=True, dtype=torch.float64)
        return (total / count).float()  # (batch, 1)

    centred = waveforms - mean(waveforms)
    # The clamp changes no value, but the ONNX exporter drops an added 1e-8, and silence would
    # become NaN.
    deviation = (mean(centred.square()).sqrt() + epsilon).clamp(min=epsilon)
    normalized = centred / deviation
    return normalized if inside is None else normalized * inside


def reflect_ends(waveforms: Tensor, pad: int, lengths: Lengths) -> Tensor:
    """Mirror both ends of every utterance by `pad` samples, at its own length.

    Returns:
        (batch, samples + 2 pad); zero past an utterance's mirrored end.
    """
    if lengths is None:
        return functional.pad(waveforms, (pad, pad), "reflect")
    places = mirrored_places(lengths, waveforms.shape[1], pad)
    return waveforms.gather(1, places.clamp(min=0)) * (places >= 0)


def mirrored_places(lengths: Tensor, size: int, pad: int) -> Tensor:
    """The place in its utterance of each sample or frame after both ends were mirrored by `pad`.

    Returns:
        (batch, size + 2 pad); negative past an utterance's mirrored end.
    """
    # `abs` mirrors the start, the difference from the last place each utterance's end.
    places = torch.arange(-pad, size + pad, device=lengths.device).abs()
    last = (lengths - 1).unsqueeze(1)  # (batch, 1)
    return last - (last - places).abs()


def normalize_features(features: Tensor, kind: str, lengths: Lengths = None) -> Tensor:
    """Remove each band's mean over the utterance; with "instance", also divide by its standard
    deviation.
    """
    if lengths is None:
        if kind == "instance":
            return functional.instance_norm(features, eps=NORM_EPSILON)
        return features - features.mean(dim=2, keepdim=True) if kind == "mean" else features
    # (batch, 1, frames)
    valid = valid_frames(lengths, features.shape[2]).unsqueeze(1)
    if kind == "none":
        return features.masked_fill(~valid, 0.0)
    count = valid.sum(dim=2, keepdim=True)  # (batch, 1, 1)
    mean = features.masked_fill(~valid, 0.0).sum(dim=2, keepdim=True) / count
    centred = (features - mean).masked_fill(~valid, 0.0)
    if kind == "mean":
        return centred
    variance = centred.square().sum(dim=2, keepdim=True) / count
    return centred * torch.rsqrt(variance + NORM_EPSILON)


def hz_to_mel(hz: float) -> float:
    """A frequency on HTK's mel scale."""
    return 2595.0 * math.log10(1.0 + hz / 700.0)


def valid_frames(lengths: Tensor, num_frames: int) -> Tensor:
    """Which frames are inside each utterance, bool (batch, frames).

    >>> valid_frames(torch.tensor([1, 3]), 3)
    tensor([[ True, False, False],
            [ True,  True,  True]])
    """
    return torch.arange(num_frames, device=lengths.device).unsqueeze(0) < lengths.unsqueeze(1)
