"""Front ends against torchaudio's transforms, by hand, and for utterances of different lengths in
one batch.
"""

import copy

import pytest
import torch
import torchaudio
from torch import nn
from torch.testing import assert_close

from speakernet.frontend.features import LogMel, normalize_waveforms, use_convolution
from speakernet.frontend.kaldi import KaldiFbank, KaldiMfcc
from speakernet.frontend.options import (
    FEATURES,
    KaldiFbankOptions,
    KaldiMfccOptions,
    LogMelOptions,
)
from speakernet.options import create

LENGTHS = (16000, 9123, 4801)


def some_speech(lengths=LENGTHS):
    """Noise with a slow envelope, loud then soft, padded with large values that must have no
    effect.
    """
    generator = torch.Generator().manual_seed(3)
    longest = max(lengths)
    waves = 0.1 * torch.randn(len(lengths), longest, generator=generator)
    waves *= torch.linspace(1.0, 0.1, longest)
    for row, length in enumerate(lengths):
        waves[row, length:] = 9.0
    return waves, torch.tensor(lengths)


def test_log_mel():
    """Other windows, bands and normalisations: see the golden embeddings of `tests/models`."""
    waves, _ = some_speech((16000, 16000))
    reference = torchaudio.transforms.MelSpectrogram(
        16000,
        n_fft=512,
        win_length=400,
        hop_length=160,
        window_fn=torch.hamming_window,
        n_mels=40,
    )
    expected = nn.InstanceNorm1d(40)((reference(waves) + 1e-6).log())
    found = LogMel(LogMelOptions(num_mels=40))(waves)
    assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("num_mels", "num_cepstra"), [(80, 40), (23, 13)])
def test_mfcc(num_mels, num_cepstra):
    options = KaldiMfccOptions(num_mels=num_mels, num_cepstra=num_cepstra, normalize="none")
    wave, _ = some_speech((8000,))
    found = KaldiMfcc(options).eval()(wave)[0].T
    sizes = {"num_ceps": num_cepstra, "num_mel_bins": num_mels, "sample_frequency": 16000}
    expected = torchaudio.compliance.kaldi.mfcc(wave * 32768, window_type="hamming", **sizes)
    assert_close(found, expected, atol=2e-2, rtol=1e-4)


@pytest.mark.parametrize("window", ["hamming", "povey"])
@pytest.mark.parametrize("scale", [1.0, 32768.0])
@pytest.mark.parametrize(
    ("style", "rate", "kaldis"),
    [
        ("kaldi", 16000, {}),
        ("lhotse", 16000, {"snip_edges": False, "high_freq": -400.0}),
        # Windows and hops of odd length.
        ("lhotse", 22050, {"snip_edges": False, "high_freq": -400.0}),
        ("lhotse", 44100, {"snip_edges": False, "high_freq": -400.0}),
    ],
)
def test_fbank(window, scale, style, rate, kaldis):
    waves, _ = some_speech((16000, 16000))
    options = KaldiFbankOptions(
        num_mels=80, scale=scale, window=window, normalize="none", style=style
    )
    found = KaldiFbank(options, rate).eval()(waves)
    for row in range(2):
        sizes = {"num_mel_bins": 80, "sample_frequency": rate, **kaldis}
        expected = torchaudio.compliance.kaldi.fbank(
            waves[row][None] * scale, window_type=window, dither=0.0, **sizes
        )
        assert_close(found[row].T, expected, atol=2e-3, rtol=1e-4)


def test_dither():
    waves, _ = some_speech((4000,))
    front_end = KaldiFbank(KaldiFbankOptions(num_mels=80, dither=1.0), seed=5)
    plain = front_end.eval()(waves)
    assert torch.equal(front_end(waves), plain)
    first = front_end.train()(waves)
    assert not torch.equal(plain, first) and not torch.equal(first, front_end(waves))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in FEATURES),
        ("log_mel", {"normalize": "none"}),
        ("fbank", {"style": "lhotse"}),
    ],
)
def test_batch_of_lengths(name, options):
    front_end = create(FEATURES[name], FEATURES[name].options(**options)).eval()
    assert torch.isfinite(front_end(torch.zeros(1, 8000))).all()
    waves, lengths = some_speech()
    features = front_end(waves, lengths)
    for row, length in enumerate(LENGTHS):
        alone = front_end(waves[row : row + 1, :length])[0]
        frames = int(front_end.num_frames(lengths)[row])
        assert alone.shape == (front_end.num_features, frames)
        assert_close(features[row, :, :frames], alone, atol=1e-5, rtol=1e-5)
        assert features[row, :, frames:].abs().sum() == 0


@pytest.mark.parametrize("name", FEATURES)
def test_float32_under_autocast(name):
    front_end = create(FEATURES[name], FEATURES[name].options()).eval()
    waves, _ = some_speech((8000,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = front_end(waves.bfloat16())
        again = front_end(waves)
    assert inside.dtype == torch.float32
    assert_close(again, front_end(waves), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda: LogMel(LogMelOptions())(torch.zeros(1, 256)), "256.*257"),
        (lambda: LogMel(LogMelOptions())(torch.zeros(2, 9000), torch.tensor([9000, 100])), "100"),
        (lambda: KaldiFbank(KaldiFbankOptions())(torch.zeros(1, 399)), "399.*400"),
        (lambda: LogMel(LogMelOptions())(torch.zeros(1, 2, 9000)), r"\(1, 2, 9000\)"),
        (lambda: LogMel(LogMelOptions(low_hz=20.0, high_hz=9000.0)), "9000"),
    ],
)
def test_refusals(make, values):
    with pytest.raises(ValueError, match=values):
        make()


def test_normalised_waveforms():
    waves = torch.randn(2, 500, generator=torch.Generator().manual_seed(4)) * 3 + 2
    found = normalize_waveforms(waves, torch.tensor([500, 200]))
    assert_close(found[1, :200], normalize_waveforms(waves[1:, :200])[0])
    assert not found[1, 200:].any()


def speech(num_samples, seed=0):
    """Noise with pauses and a spectrum that falls by 60 dB, as in speech."""
    generator = torch.Generator().manual_seed(seed)
    white = torch.randn(2, num_samples, generator=generator)
    spectrum = torch.fft.rfft(white)
    spectrum *= 10 ** torch.linspace(0, -3, spectrum.shape[1])
    loudness = (torch.arange(num_samples) % 8000 < 6000) * 0.99 + 0.01
    return 0.1 * torch.fft.irfft(spectrum, num_samples) * loudness


FORMS = [(name, {}) for name in FEATURES] + [
    (
        "log_mel",
        {"normalize_waveform": True, "preemphasis": 0.97, "window": "hann", "normalize": "none"},
    ),
    ("fbank", {"window": "povey", "scale": 1.0, "normalize": "none"}),
    ("mfcc", {"num_mels": 30, "num_cepstra": 20}),
    ("tf_mel", {"normalize": "none"}),
]


@pytest.mark.parametrize(("name", "options"), FORMS)
def test_equal_features(name, options):
    plain = create(FEATURES[name], FEATURES[name].options(**options)).eval()
    convolved = copy.deepcopy(plain)
    use_convolution(convolved)
    for num_samples in (16000, 12345):
        ours = plain(speech(num_samples))
        theirs = convolved(speech(num_samples))
        assert_close(theirs, ours, atol=2e-3, rtol=1e-3)
        assert (theirs - ours).norm() <= 1e-4 * ours.norm()
