"""Front ends of published models against torchaudio's own and against numbers that the original code gave."""

import json
import math
from pathlib import Path

import pytest
import torch
import torchaudio

from speakernet.frontend.features import KaldiMfcc, LogMel, normalize_waveforms
from speakernet.frontend.options import KaldiMfccOptions, LogMelOptions, SpeechBrainFbankOptions
from speakernet.frontend.speechbrain import SpeechBrainFbank

GOLDEN = json.loads(Path(__file__).with_name("golden_speechbrain.json").read_text())


def wave_of(num_samples, generator):
    times = torch.arange(num_samples) / 16000
    tone = 0.1 * torch.randn(num_samples, generator=generator) + 0.3 * torch.sin(2 * math.pi * 440 * times)
    # From silence to loud: the cut-off 80 dB below the loudest acts.
    return tone[None] * torch.linspace(0.0, 1.0, num_samples) ** 4


def test_speechbrains_filterbank_is_that_of_the_original():
    generator = torch.Generator().manual_seed(5)
    front_end = SpeechBrainFbank(SpeechBrainFbankOptions(num_mels=80))
    for num_samples, golden in GOLDEN.items():
        features = front_end(wave_of(int(num_samples), generator))[0].T  # (frames, mels)
        assert list(features.shape) == golden["shape"][1:]
        for frame, band, value in golden["values"]:
            assert features[frame, band].item() == pytest.approx(value, abs=2e-3), (num_samples, frame, band)


def test_speechbrains_filterbank_of_a_batch_is_that_of_each_alone():
    generator = torch.Generator().manual_seed(1)
    waves = 0.1 * torch.randn(2, 12000, generator=generator)
    front_end = SpeechBrainFbank(SpeechBrainFbankOptions(num_mels=40))
    lengths = torch.tensor([12000, 7333])
    both = front_end(waves, lengths)
    alone = front_end(waves[1:, :7333])
    frames = alone.shape[2]
    torch.testing.assert_close(both[1, :, :frames], alone[0], atol=1e-4, rtol=0)
    assert not both[1, :, frames:].any()


@pytest.mark.parametrize(("num_mels", "num_cepstra"), [(80, 40), (23, 13)])
def test_mfcc_is_kaldis(num_mels, num_cepstra):
    wave = 0.1 * torch.randn(1, 8000, generator=torch.Generator().manual_seed(2))
    options = KaldiMfccOptions(num_mels=num_mels, num_cepstra=num_cepstra, normalize="none")
    found = KaldiMfcc(options).eval()(wave)[0].T
    expected = torchaudio.compliance.kaldi.mfcc(
        wave * 32768, num_ceps=num_cepstra, num_mel_bins=num_mels, window_type="hamming", sample_frequency=16000
    )
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=1e-4)


def test_redimnets_mel_bands():
    generator = torch.Generator().manual_seed(3)
    wave = 0.1 * torch.randn(1, 9000, generator=generator) + 0.05
    options = LogMelOptions(
        num_mels=72, preemphasis=0.97, low_hz=20.0, high_hz=7600.0, normalize_waveform=True, normalize="mean"
    )
    found = LogMel(options)(wave)
    signal = (wave - wave.mean()) / (wave.std(unbiased=False) + 1e-6)
    emphasized = signal - 0.97 * torch.cat((signal[:, 1:2], signal[:, :-1]), dim=1)
    mel = torchaudio.transforms.MelSpectrogram(
        16000,
        n_fft=512,
        win_length=400,
        hop_length=160,
        f_min=20,
        f_max=7600,
        n_mels=72,
        window_fn=torch.hamming_window,
    )
    expected = (mel(emphasized) + 1e-6).log()
    torch.testing.assert_close(found, expected - expected.mean(dim=2, keepdim=True), atol=1e-4, rtol=1e-4)


def test_waveforms_are_normalised_over_their_own_samples():
    waves = torch.randn(2, 500, generator=torch.Generator().manual_seed(4)) * 3 + 2
    found = normalize_waveforms(waves, torch.tensor([500, 200]))
    torch.testing.assert_close(found[1, :200], normalize_waveforms(waves[1:, :200])[0])
    assert not found[1, 200:].any()


def test_bands_beyond_half_the_rate_are_refused():
    with pytest.raises(ValueError, match=r"bands from 20\.0 to 9000\.0 Hz; expected .*at most half of the sample rate"):
        LogMel(LogMelOptions(low_hz=20.0, high_hz=9000.0))
    with pytest.raises(ValueError, match="low_hz below high_hz"):
        LogMel(LogMelOptions(low_hz=300.0, high_hz=200.0))
    assert next(KaldiMfccOptions(num_mels=20, num_cepstra=30).problems())[0] == "num_cepstra"
