"""Front ends against torchaudio's own transforms, by hand, and for utterances of different lengths in one batch."""

import pytest
import torch
import torchaudio
from torch import nn

from speakernet.frontend.features import FrontEnd, KaldiFbank, LogMel
from speakernet.frontend.options import FEATURES, KaldiFbankOptions, LogMelOptions
from speakernet.registry import create

LENGTHS = (16000, 9123, 4801)


def some_speech(lengths=LENGTHS, seed=3):
    """Noise with a slow envelope, loud then soft, padded with large values that must not be looked at."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    waves = 0.1 * torch.randn(len(lengths), longest, generator=generator)
    waves *= torch.linspace(1.0, 0.1, longest)
    for row, length in enumerate(lengths):
        waves[row, length:] = 9.0
    return waves, torch.tensor(lengths)


@pytest.mark.parametrize("num_mels", [40, 56, 64, 80])
@pytest.mark.parametrize("log_input", [True, False])
def test_log_mel_is_what_torchaudio_and_instance_norm_give(num_mels, log_input):
    waves, _ = some_speech((16000, 16000))
    reference = torchaudio.transforms.MelSpectrogram(
        sample_rate=16000, n_fft=512, win_length=400, hop_length=160, window_fn=torch.hamming_window, n_mels=num_mels
    )
    energies = reference(waves) + 1e-6
    expected = nn.InstanceNorm1d(num_mels)(energies.log() if log_input else energies)
    found = LogMel(LogMelOptions(num_mels=num_mels, log_input=log_input))(waves)
    assert found.shape == (2, num_mels, 101)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_hann_window_and_preemphasis_against_torchaudio():
    waves, _ = some_speech((8000,))
    filtered = waves.clone()
    filtered[:, 1:] -= 0.97 * waves[:, :-1]
    filtered[:, 0] -= 0.97 * waves[:, 1]
    reference = torchaudio.transforms.MelSpectrogram(16000, n_fft=512, win_length=400, hop_length=160, n_mels=40)
    expected = nn.InstanceNorm1d(40)((reference(filtered) + 1e-6).log())
    found = LogMel(LogMelOptions(num_mels=40, window="hann", preemphasis=0.97))(waves)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", ["hamming", "povey"])
@pytest.mark.parametrize("scale", [1.0, 32768.0])
def test_fbank_is_kaldis(window, scale):
    waves, _ = some_speech((16000, 16000))
    found = KaldiFbank(KaldiFbankOptions(num_mels=80, scale=scale, window=window, normalize="none")).eval()(waves)
    for row in range(2):
        expected = torchaudio.compliance.kaldi.fbank(
            waves[row : row + 1] * scale, num_mel_bins=80, window_type=window, dither=0.0, sample_frequency=16000
        )
        torch.testing.assert_close(found[row].T, expected, atol=2e-3, rtol=1e-4)


def test_fbank_removes_the_mean_of_each_band():
    waves, _ = some_speech((16000,))
    features = KaldiFbank(KaldiFbankOptions(num_mels=80))(waves)
    assert features.mean(dim=2).abs().max() < 1e-4
    assert (features.std(dim=2) - 1).abs().max() > 0.01  # only the mean


def test_dither_is_training_only_and_repeats_with_its_count():
    waves, _ = some_speech((4000,))
    front_end = KaldiFbank(KaldiFbankOptions(num_mels=80, dither=1.0), seed=5)
    plain = front_end.eval()(waves)
    first = front_end.train()(waves)
    second = front_end(waves)
    assert not torch.equal(plain, first) and not torch.equal(first, second)
    again = KaldiFbank(KaldiFbankOptions(num_mels=80, dither=1.0), seed=5)
    torch.testing.assert_close(again(waves), first, rtol=0, atol=0)
    resumed = KaldiFbank(KaldiFbankOptions(num_mels=80, dither=1.0), seed=5)
    resumed.load_state_dict(again.state_dict())
    torch.testing.assert_close(resumed(waves), second, rtol=0, atol=0)


@pytest.mark.parametrize("name", FEATURES)
def test_a_batch_of_lengths_gives_what_each_alone_gives(name):
    front_end: FrontEnd = create(FEATURES[name], FEATURES[name].options()).eval()
    waves, lengths = some_speech()
    features = front_end(waves, lengths)
    for row, length in enumerate(LENGTHS):
        alone = front_end(waves[row : row + 1, :length])[0]
        frames = int(front_end.num_frames(lengths)[row])
        assert alone.shape == (front_end.num_features, frames)
        torch.testing.assert_close(features[row, :, :frames], alone, atol=1e-5, rtol=1e-5)
        assert features[row, :, frames:].abs().sum() == 0


@pytest.mark.parametrize("normalize", ["mean", "none"])
def test_other_normalisations_with_lengths(normalize):
    front_end = LogMel(LogMelOptions(normalize=normalize))
    waves, lengths = some_speech()
    features = front_end(waves, lengths)
    alone = front_end(waves[2:, : LENGTHS[2]])[0]
    torch.testing.assert_close(features[2, :, : alone.shape[1]], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FEATURES)
def test_float32_whatever_the_autocast(name):
    front_end = create(FEATURES[name], FEATURES[name].options()).eval()
    waves, _ = some_speech((8000,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = front_end(waves.bfloat16())
        again = front_end(waves)
    assert inside.dtype == torch.float32
    torch.testing.assert_close(again, front_end(waves), rtol=0, atol=0)


def test_silence_is_finite():
    for name in FEATURES:
        assert torch.isfinite(create(FEATURES[name], FEATURES[name].options()).eval()(torch.zeros(1, 8000))).all()


def test_other_sample_rates_keep_25_and_10_milliseconds():
    front_end = LogMel(LogMelOptions(), sample_rate=8000)
    assert (front_end.window_samples, front_end.hop_samples, front_end.fft_samples) == (200, 80, 256)
    assert front_end(torch.randn(1, 8000)).shape == (1, 64, 101)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: LogMel(LogMelOptions())(torch.zeros(1, 256)),
            "256 samples is too short for the front end, which needs 257",
        ),
        (lambda: LogMel(LogMelOptions())(torch.zeros(2, 9000), torch.tensor([9000, 100])), "100 samples is too short"),
        (
            lambda: KaldiFbank(KaldiFbankOptions())(torch.zeros(1, 399)),
            "399 samples is too short for the front end, which needs 400",
        ),
        (lambda: LogMel(LogMelOptions())(torch.zeros(1, 2, 9000)), "shape .batch, samples."),
        (lambda: LogMel(LogMelOptions(window="povey")), "window is 'povey'; expected auto or hamming or hann"),
        (lambda: LogMel(LogMelOptions(normalize="cmvn")), "normalize is 'cmvn'"),
    ],
)
def test_what_cannot_be_heard_is_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()
