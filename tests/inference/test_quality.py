"""What a recording is worth: speech is found, and each thing that can be wrong with it is named."""

import numpy as np
import pytest

from speakernet.data.audio import AudioError, write_audio
from speakernet.inference.quality import inspect_recording, refuse_unusable

RATE = 16000


def speech(seconds=4.0, pauses=0.25, rate=RATE):
    """Noise-like syllables, wide-band, with pauses."""
    random = np.random.default_rng(3)
    times = np.arange(int(seconds * rate)) / rate
    signal = random.standard_normal(len(times)) * np.clip(np.sin(2 * np.pi * 3 * times), 0.1, 1)
    return (0.05 * np.where(times % 1 < 1 - pauses, signal, 0.001 * signal)).astype(np.float32)


def words(audio, **how):
    return " ".join(inspect_recording(audio, sample_rate=how.pop("rate", RATE), **how).warnings)


def test_good_speech_has_no_warning_and_its_seconds_are_counted():
    found = inspect_recording(speech(), sample_rate=RATE)
    assert found.warnings == () and not found.is_silent
    assert found.seconds == 4.0 and found.speech_seconds == pytest.approx(3.0, abs=0.4)
    half = np.concatenate([speech(2.0), np.zeros(10 * RATE, np.float32)])
    assert inspect_recording(half, sample_rate=RATE).speech_seconds == pytest.approx(1.5, abs=0.3)


@pytest.mark.parametrize(
    ("audio", "expected"),
    [
        (speech(1.0), "too short"),
        (np.clip(40 * speech(), -1, 1), "clipped"),
        (0.3 * np.clip(40 * speech(), -1, 1), "clipped"),
        (np.zeros(4 * RATE, np.float32), "silent"),
        (0.0002 * speech(), "silent"),
        (speech() + 0.02 * np.random.default_rng(1).standard_normal(4 * RATE).astype(np.float32), "noisy"),
        (0.1 * np.random.default_rng(1).standard_normal(4 * RATE).astype(np.float32), "too short: 0.0 s of speech"),
        (0.1 * np.sin(np.arange(4 * RATE) / 9).astype(np.float32), "too short: 0.0 s of speech"),
    ],
)
def test_what_is_wrong_is_named(audio, expected):
    assert expected in words(audio)


def test_a_telephone_is_heard():
    assert "band-limited" in words(speech(rate=8000), rate=8000)
    assert "band-limited" not in words(speech())


def test_a_file_whose_end_is_missing_is_heard_and_named(tmp_path):
    write_audio(tmp_path / "cut.wav", speech(), RATE)
    assert inspect_recording(tmp_path / "cut.wav").warnings == ()
    content = (tmp_path / "cut.wav").read_bytes()
    (tmp_path / "cut.wav").write_bytes(content[: len(content) * 3 // 4])
    found = inspect_recording(tmp_path / "cut.wav")
    assert found.seconds == pytest.approx(3.0, abs=0.01)
    assert found.warnings == ("cut off: the file promises more than it holds; copy or record it again",)


def test_silence_nan_and_empty_files_are_refused(tmp_path):
    with pytest.raises(AudioError, match="the array: silent"):
        refuse_unusable(inspect_recording(np.zeros(RATE), sample_rate=RATE))
    with pytest.raises(AudioError, match=r"0\.020 s of audio is too short to know a voice by"):
        refuse_unusable(inspect_recording(speech()[:320], sample_rate=RATE))
    with pytest.raises(AudioError, match="NaN"):
        inspect_recording(np.full(RATE, np.nan), sample_rate=RATE)
    (tmp_path / "empty.wav").touch()
    with pytest.raises(AudioError, match=r"empty.wav"):
        inspect_recording(tmp_path / "empty.wav")
    write_audio(tmp_path / "header.wav", np.zeros(0, np.int16), RATE)
    with pytest.raises(AudioError, match=r"header.wav: the file holds no samples"):
        inspect_recording(tmp_path / "header.wav")


def test_a_long_recording_is_looked_at_in_stretches_as_whole(monkeypatch):
    long = np.tile(speech(), 60)
    reads = []
    from speakernet.inference.recordings import Recording

    plain = Recording.read
    monkeypatch.setattr(Recording, "read", lambda self, *stretch: reads.append(stretch) or plain(self, *stretch))
    found, one = inspect_recording(long, sample_rate=RATE), inspect_recording(speech(), sample_rate=RATE)
    assert len(reads) == 5 and max(stretch[1] for stretch in reads) <= 61 * RATE
    assert found.speech_seconds == pytest.approx(60 * one.speech_seconds, rel=0.05) and found.warnings == ()
    assert found.signal_to_noise_db == pytest.approx(one.signal_to_noise_db, abs=0.5)
