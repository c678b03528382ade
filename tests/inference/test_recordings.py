"""Recordings: speech and quality, inputs of a command line, a WAV from a pipe."""

import io
import json
import sys

import numpy as np
import pytest

import speakernet
from speakernet.data.audio import AudioError, encode_audio, read_audio, write_audio
from speakernet.inference import recordings
from speakernet.inference.recordings import Recording, chunks_of, inspect_recording, open_piped

RATE = 16000


def speech(seconds=4.0, pauses=0.25, rate=RATE):
    """Wide-band, noise-like syllables with pauses."""
    random = np.random.default_rng(3)
    times = np.arange(int(seconds * rate)) / rate
    signal = random.standard_normal(len(times)) * np.clip(np.sin(2 * np.pi * 3 * times), 0.1, 1)
    return (0.05 * np.where(times % 1 < 1 - pauses, signal, 0.001 * signal)).astype(np.float32)


def noise(level):
    return level * np.random.default_rng(1).standard_normal(4 * RATE).astype(np.float32)


def test_seconds_of_speech():
    found = inspect_recording(speech(), sample_rate=RATE)
    assert found.warnings == ()
    assert found.seconds == 4.0 and found.speech_seconds == pytest.approx(3.8, abs=0.2)
    half = np.concatenate([speech(2.0), np.zeros(10 * RATE, np.float32)])
    assert inspect_recording(half, sample_rate=RATE).speech_seconds == pytest.approx(1.8, abs=0.2)


@pytest.mark.parametrize(
    ("audio", "expected"),
    [
        (speech(1.0), "too short"),
        (np.clip(40 * speech(), -1, 1), "clipped"),
        (speech() + noise(0.02), "noisy"),
        (noise(0.1), "no speech: none was found in 4.00 s"),
    ],
)
def test_warnings(audio, expected):
    assert expected in " ".join(inspect_recording(audio, sample_rate=RATE).warnings)


def test_truncated_file(tmp_path):
    path = tmp_path / "cut.wav"
    write_audio(path, speech())
    whole = inspect_recording(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 4])
    found = inspect_recording(path)
    assert whole.warnings == () and len(found.warnings) == 1 and "cut off" in found.warnings[0]
    assert found.seconds == pytest.approx(3.0, abs=0.01) and found.digest != whole.digest
    # The digest is of the samples.
    write_audio(tmp_path / "b.flac", speech())
    for given in (tmp_path / "b.flac", read_audio(tmp_path / "b.flac")):
        assert inspect_recording(given, sample_rate=RATE).digest == whole.digest


def test_refused_recordings():
    for audio in (0.0002 * speech(), speech()[:320]):
        with pytest.raises(AudioError, match=r"the array: "):
            inspect_recording(audio, sample_rate=RATE)


def test_long_recordings(tmp_path):
    longest = []
    # An hour in a sparse file, which takes no disk space.
    size = 2 * RATE * 3600
    write_audio(tmp_path / "hour.wav", np.zeros(1, np.int16))
    with (tmp_path / "hour.wav").open("r+b") as file:
        for place, number in ((4, 36 + size), (40, size)):
            file.seek(place)
            file.write(number.to_bytes(4, "little"))
        file.truncate(44 + size)
    plain = Recording.read

    class Watched(Recording):
        def read(self, start=0, num_samples=None):
            longest.append(num_samples)
            return plain(self, start, num_samples)

    hour = Watched(**vars(recordings.open_recording(tmp_path / "hour.wav", None, RATE)))
    assert hour.seconds == 3600
    assert sum(len(waveform) for _, waveform in hour.pieces()) == hour.num_samples
    assert max(longest) <= 60 * RATE and len(longest) == 60
    short = inspect_recording(speech(), sample_rate=RATE)
    long = inspect_recording(np.tile(speech(), 60), sample_rate=RATE)
    assert long.speech_seconds == pytest.approx(60 * short.speech_seconds, rel=0.05)
    assert long.warnings == ()


class Pipe(io.BytesIO):
    """Returns at most seven bytes at a time, like a slow recorder."""

    def read(self, size=-1):
        return super().read(min(7, size) if size >= 0 else 7)


def endless(content):
    """The header that recorders write before they know the length."""
    return content[:4] + b"\xff\xff\xff\xff" + content[8:40] + b"\xff\xff\xff\xff" + content[44:]


@pytest.mark.parametrize("size", [0, 0x7FFFF000, 0xFFFFFFF0, 6000])
def test_sizes_of_a_pipe(size):
    content = encode_audio(np.arange(3000, dtype=np.int16), RATE, "WAV")
    assert content[36:40] == b"data"
    piped = content[:40] + size.to_bytes(4, "little") + content[44:]
    # Only behind samples of a known number is there something else; half a sample is ignored.
    behind = b"LIST\4\0\0\0INFO" if size == 6000 else b"\0"
    pipe = Pipe(piped + behind)
    info, begun = open_piped(pipe)
    assert (info.sample_rate, info.num_channels) == (RATE, 1)
    found = np.concatenate(list(chunks_of(pipe, info, begun)))[:, 0]
    np.testing.assert_array_equal(found * 32768, np.arange(3000))


def test_a_recording_without_a_suffix(tmp_path):
    write_audio(tmp_path / "a.wav", speech())
    recording = (tmp_path / "a.wav").rename(tmp_path / "recording")
    source, names = recordings.audio_inputs([str(recording)], RATE)
    assert list(names) == [str(recording)] and len(source.read(str(recording))) == 4 * RATE
    # A text is a list.
    (tmp_path / "list").write_text("recording\n")
    assert list(recordings.audio_inputs([str(tmp_path / "list")], RATE)[1]) == [str(recording)]


def test_verify_while_reading(voices, uncalibrated, monkeypatch, call):
    content = endless((voices / "s00/3.wav").read_bytes())
    enrolled = voices / "s00/4.wav"
    command = f"verify - {enrolled} --model {uncalibrated}"
    verifier = speakernet.load(uncalibrated, "cpu")
    for option, status in (("--threshold=-1.0", 0), ("--threshold=1.0", 1), ("", 2)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        actual, out, err = call(f"{command} --json {option}")
        assert actual == status, err
        if option:
            expected = verifier.verify(voices / "s00/3.wav", enrolled, threshold=0.5)
            assert json.loads(out)["score"] == pytest.approx(expected.score, abs=1e-5)
            assert [f"after {seconds} s" in err for seconds in range(1, 5)] == [True] * 3 + [False]


@pytest.mark.parametrize("content", [b"", b"RIFF\0\0\0\0WAVEjunk", b"fLaC" + bytes(100)])
def test_pipe_without_a_wav(content):
    with pytest.raises(AudioError, match="standard input"):
        open_piped(io.BytesIO(content))
