"""Real codecs: length, place in time and loudness stay, draws are keyed, and what is missing is
named.
"""

from typing import get_args

import numpy as np
import pytest
import soundfile
import torch
from torch.testing import assert_close

from speakernet.data.augment.augmenter import Augmenter
from speakernet.data.augment.codecs import (
    CODECS,
    Coding,
    encode_and_decode,
    lacking,
    refuse_lacking,
)
from speakernet.data.augment.options import AugmentOptions, CodecName

CODINGS = [Coding(name, kilobits) for name, codec in CODECS.items() for kilobits in codec.levels]


@pytest.fixture(scope="module")
def vowels():
    """Two seconds of a gliding pulse train through two resonances, in syllables: (2, samples) at
    16 kHz.
    """
    times = np.arange(32_000) / 16_000
    made = []
    for pitch in (110, 190):
        phase = 2 * np.pi * np.cumsum(pitch + 20 * np.sin(3 * times)) / 16_000
        harmonics = [
            np.exp(-(((k * pitch - 600) / 300) ** 2))
            + 0.4 * np.exp(-(((k * pitch - 1700) / 400) ** 2))
            for k in range(1, 16)
        ]
        voice = sum(gain * np.sin(k * phase) for k, gain in enumerate(harmonics, 1))
        made.append(0.1 * voice * (0.55 - 0.45 * np.cos(2 * np.pi * 4 * times)))
    return torch.from_numpy(np.stack(made).astype(np.float32))


def coded(waveforms, coding, sample_rate=16_000):
    if problem := lacking(coding.codec):
        pytest.skip(problem)
    made = waveforms.clone()
    encode_and_decode(made, {0: coding}, sample_rate)
    return made


def test_every_name_has_a_codec():
    assert set(get_args(CodecName)) == {"mu-law", *CODECS}


@pytest.mark.parametrize("coding", CODINGS, ids=str)
@pytest.mark.parametrize("sample_rate", [8_000, 16_000])
def test_place_and_loudness(vowels, coding, sample_rate):
    speech = vowels[:, :: 16_000 // sample_rate]
    made = coded(speech, coding, sample_rate)
    assert_close(made[1], speech[1], atol=0, rtol=0)
    assert torch.isfinite(made).all()
    before, after = speech[0].numpy(), made[0].numpy()
    correlation = np.fft.irfft(np.fft.rfft(after) * np.conj(np.fft.rfft(before)))
    place = int(np.argmax(correlation))
    assert min(place, len(before) - place) <= sample_rate // 8_000
    assert correlation.max() > 0.8 * np.linalg.norm(before) * np.linalg.norm(after)
    assert 20 * np.log10(after.std() / before.std()) == pytest.approx(0, abs=2.5)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("num_samples", [5, 1601, 24_001])
def test_any_length_alone_or_in_a_batch(vowels, name, num_samples):
    speech = 20 * vowels[:, :num_samples]  # beyond full scale
    coding = Coding(name, min(CODECS[name].levels))
    alone = coded(speech, coding)
    together = speech.clone()
    encode_and_decode(together, {1: coding, 0: coding}, 16_000)
    assert_close(together[0], alone[0], atol=0, rtol=0)
    assert not torch.equal(together[1], speech[1])


def test_draws():
    rows = np.arange(8000)
    options = AugmentOptions(codec_probability=0.5, codecs=["mu-law", "gsm", "opus", "opus"])
    drawn = Augmenter({}, None, options).draw(rows, 3)
    mu_law = Augmenter({}, None, AugmentOptions(codec_probability=0.5)).draw(rows, 3)
    assert not mu_law.codings and mu_law.codec.mean() == pytest.approx(0.5, abs=0.02)
    # Which utterances are coded does not depend on the codecs.
    assert {*drawn.codings, *np.flatnonzero(drawn.codec)} == {*np.flatnonzero(mu_law.codec)}
    counts = dict.fromkeys(CODINGS, 0)
    for coding in drawn.codings.values():
        counts[coding] += 1
    assert drawn.codec.sum() / 8000 == pytest.approx(1 / 8, abs=0.02)
    assert counts[Coding("gsm", 13)] / 8000 == pytest.approx(1 / 8, abs=0.02)
    for kilobits in CODECS["opus"].levels:
        assert counts[Coding("opus", kilobits)] / 8000 == pytest.approx(1 / 12, abs=0.02)


def test_in_the_augmenter(vowels):
    options = AugmentOptions(codec_probability=1.0, codecs=["gsm"], volume_db=[-6.0, -6.0])
    made = Augmenter({}, None, options)(vowels.clone(), epoch=0, rows=np.arange(2))
    expected = vowels.clone()
    encode_and_decode(expected, dict.fromkeys(range(2), Coding("gsm", 13)), 16_000)
    assert_close(made, expected * 10 ** (-6 / 20))


def test_missing_codecs_are_named(monkeypatch):
    refuse_lacking(["mu-law", "gsm"])
    monkeypatch.setenv("SPEAKERNET_FFMPEG", "/no/such/ffmpeg")
    for name in ("amr-nb", "amr-wb", "g722"):
        with pytest.raises(ValueError, match=rf"{name}.*apt install ffmpeg"):
            refuse_lacking(["gsm", name])
    monkeypatch.setattr(soundfile, "available_subtypes", lambda file_format: {})
    with pytest.raises(ValueError, match=r"opus.*pip install"):
        refuse_lacking(["opus"])


@pytest.mark.parametrize(
    ("options", "place"),
    [({"codecs": []}, "codecs"), ({"codecs": ["mu-law", "gsm"], "device": "cuda"}, "device")],
)
def test_options_that_contradict(options, place):
    problems = dict(AugmentOptions.model_construct(codec_probability=0.5, **options).problems())
    assert list(problems) == [place]
    assert not dict(AugmentOptions.model_construct(**options).problems())
