"""Where somebody speaks: the network of silero-vad, the fallback by energy, stretches and offsets;
a source of the speech of recordings alone.
"""

import warnings

import numpy as np
import pytest
import torch

from speakernet.data import speech
from speakernet.data.audio import read_audio, write_audio
from speakernet.data.lists import StringTable
from speakernet.data.sources import FolderSource
from speakernet.data.speech import (
    cut_to_speech,
    default_detector,
    find_speech,
    speech_of,
    speech_probabilities,
)


@pytest.fixture(autouse=True)
def usual_detector(monkeypatch):
    """The detector of the package, which tests/inference/conftest.py replaces for its session."""
    monkeypatch.setattr(speech, "default_detector", default_detector)


def test_same_as_its_package():
    """The layers built here give what silero-vad's own loop over frames gives."""
    threads = torch.get_num_threads()
    silero_vad = pytest.importorskip("silero_vad")
    waveform = 0.1 * np.random.default_rng(0).standard_normal(16000 + 100).astype(np.float32)
    waveform *= np.abs(np.sin(np.arange(len(waveform)) / 3000)).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = (
            silero_vad.load_silero_vad().audio_forward(torch.from_numpy(waveform), 16000)[0].numpy()
        )
    torch.set_num_threads(threads)
    found = speech_probabilities(waveform)
    assert len(found) == 32 and found == pytest.approx(expected, abs=1e-5)


@torch.inference_mode()
def test_fresh_starts():
    """By hand: a window of 64 frames begins at every 32nd, and a frame has the mean of its two."""
    network = speech._network()
    states = 3 * torch.rand(100, 128, generator=torch.Generator().manual_seed(0))
    found = network._start_afresh(states)
    windows = [network._follow(states[None, first : first + 64])[0] for first in (0, 32, 64, 96)]
    assert len(found) == 100
    assert found[10] == pytest.approx(windows[0][10].item(), abs=1e-6)
    assert found[40] == pytest.approx((windows[0][40] + windows[1][8]).item() / 2, abs=1e-6)
    assert found[99] == pytest.approx((windows[2][35] + windows[3][3]).item() / 2, abs=1e-6)


def test_voice_after_noise(shared_data):
    """A soft voice after noise is found from its first word, although the network has heard noise
    for a long time; rain alone is no voice.
    """
    path = sorted((shared_data / "speechocean_mini" / "dev").glob("*/*.flac"))[0]
    voice = speech_of(read_audio(path), 16000)
    rain = read_audio(sorted((shared_data / "noise_mini").rglob("rain/*.*"))[0])
    assert len(find_speech(rain, 16000)) == 0
    noise = np.resize(rain, 15 * 16000)
    noise *= np.sqrt(np.square(voice).mean() / np.square(noise).mean())
    spoken = find_speech(np.concatenate([noise, voice]), 16000)
    assert spoken[0, 0] == pytest.approx(15.0, abs=0.3)


def test_stretches_of_speech():
    """By hand, with frames of 32 ms and 0.1 s added on both sides."""
    scores = np.repeat([0.0, 0.9, 0.0, 0.4, 0.9, 0.0, 0.8, 0.0], [100, 50, 15, 5, 50, 50, 20, 20])
    # Stretches 0.48 s apart merge, since padding leaves 0.28 s; a stretch that never reaches
    # `BEGIN` is dropped.
    assert speech.stretches(scores, 10.0) == pytest.approx(np.array([[3.1, 220 * 0.032 + 0.1]]))
    assert speech.stretches(scores, 7.0) == pytest.approx(np.array([[3.1, 7.0]]))
    assert len(speech.stretches(scores, 10.0, min_gap_seconds=0.28 - 1e-9)) == 2
    assert len(speech.stretches(scores, 10.0, begin=0.3, end=0.2)) == 2


@pytest.mark.parametrize(("probability", "expected"), [(0.8, 0), (0.9, 1)])
def test_doubtful_speech(monkeypatch, probability, expected):
    monkeypatch.setattr(speech, "_network", lambda: lambda _: torch.full((62,), probability))
    assert len(find_speech(np.zeros(32000, np.float32), 16000)) == expected


def test_offset_rate_and_pieces(monkeypatch):
    """An offset, another sample rate, a gain and the division into pieces do not move what is found
    by energy, as without the network's weights.
    """
    monkeypatch.setattr(speech, "_network", lambda: None)
    assert default_detector() == speech.ENERGY
    random = np.random.default_rng(1)
    is_loud = np.repeat([False, True, False, True, False], [16000, 32000, 16000, 16000, 16000])
    waveform = (np.where(is_loud, 0.1, 0.001) * random.standard_normal(len(is_loud))).astype(
        np.float32
    )
    expected = np.array([[0.9, 3.1], [3.9, 5.1]])
    for changed, rate in (
        (waveform, 16000),
        (waveform + np.float32(0.3), 16000),
        (np.repeat(waveform, 3), 48000),
        # As loud as after a simulated microphone.
        (100 * waveform, 16000),
    ):
        assert find_speech(changed, rate) == pytest.approx(expected, abs=0.07)
    assert find_speech(iter(np.split(waveform, [48000])), 16000) == pytest.approx(
        expected, abs=0.07
    )
    assert len(speech_of(waveform, 16000)) == pytest.approx(3.4 * 16000, abs=2000)


def test_no_speech():
    for waveform in (
        np.full(48000, 0.1, np.float32),
        0.1 * np.random.default_rng(2).standard_normal(48000),
    ):
        assert find_speech(waveform.astype(np.float32), 16000).shape == (0, 2)
        assert len(speech_of(waveform.astype(np.float32), 16000)) == 0


RATE = 16000
EDGES = np.array([[0.5, 1.5], [2.0, 2.25]])


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Two recordings of 3 s, `speech.wav` with speech between `EDGES` and `noise.wav` without; a
    sample is its number.
    """
    ramp = (np.arange(3 * RATE) / 65536).astype(np.float32)
    write_audio(tmp_path / "speech.wav", ramp, RATE)
    write_audio(tmp_path / "noise.wav", -ramp, RATE)

    def found(pieces, sample_rate):
        is_speech = sum(float(piece.sum()) for piece in pieces) > 0
        return EDGES if is_speech else np.zeros((0, 2))

    monkeypatch.setattr(speech, "find_speech", found)
    return FolderSource(str(tmp_path), RATE)


def numbers(samples):
    return np.round(np.asarray(samples) * 65536).astype(int)


def test_crops_and_lengths(source, caplog):
    cut = cut_to_speech(source)
    expected = np.concatenate([np.arange(8000, 24000), np.arange(32000, 36000)])
    # Files hold 16 bits, and are read without the offset, so that only differences are those of the
    # recording.
    assert numbers(cut.read("speech.wav")) == pytest.approx(expected - expected.mean(), abs=2)
    assert np.diff(numbers(cut.read("speech.wav", 15999, 2))) == pytest.approx([8001], abs=2)
    assert len(cut.read("speech.wav", 19999, 50)) == 1
    assert len(cut.read("noise.wav")) == 3 * RATE
    table = cut.lookup_table(StringTable.from_strings(["speech.wav", "noise.wav"]), 1)
    assert np.asarray(table.native_samples).tolist() == [20000, 48000]
    assert "1 of 2 recordings" in caplog.text and "noise.wav" in caplog.text
    assert cut_to_speech(source) is cut, "each source is searched once"
    with pytest.raises(ValueError, match="whole recordings"):
        cut.rows(StringTable.from_strings(["speech.wav"]), None)
