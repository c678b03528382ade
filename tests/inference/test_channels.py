"""Recordings with several channels: one person on each, opposite phases, silent and copied
channels.
"""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import soundfile

import speakernet
from speakernet.data.audio import AudioError, audio_info, read_audio
from speakernet.data.ffmpeg import FfmpegError, find_ffmpeg
from speakernet.inference import channels
from speakernet.inference.people import PeopleStore
from speakernet.inference.recordings import Recording, inspect_recording

RATE = 16000


def hiss(num_samples: int, level: float = 0.0005) -> np.ndarray:
    return level * np.random.default_rng(0).standard_normal(num_samples).astype(np.float32)


@pytest.fixture(scope="module")
def calls(voices: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two-channel files by what is on their channels."""
    folder = tmp_path_factory.mktemp("calls")
    left, right = (read_audio(voices / name) for name in ("s00/0.wav", "s05/0.wav"))
    other = np.roll(left, 40) + 0.3 * np.roll(left, 400) + hiss(len(left))
    sounds = {
        "call": (left, right),
        "opposite": (left, -left),
        "nearly_opposite": (0.7 * left, -left),
        "copies": (left, left),
        "half_silent": (left, hiss(len(left))),
        "left_dead": (np.zeros_like(left), left),
        # A microphone array of which two inputs are unused.
        "array": (left, other, np.zeros_like(left), np.zeros_like(left)),
        "two_microphones": (left, other),
        "music_free_hum": (left, 0.1 * np.sin(np.arange(len(left)) / 20).astype(np.float32)),
    }
    paths = {}
    for name, columns in sounds.items():
        paths[name] = folder / f"{name}.flac"
        soundfile.write(paths[name], np.stack(columns, axis=1), RATE)
    return paths


@pytest.fixture(scope="module")
def verifier(calibrated: Path):
    return speakernet.load(calibrated, "cpu")


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    return float((first @ second.T).item() / np.linalg.norm(first) / np.linalg.norm(second))


def likeness(first: Recording, second: Recording) -> float:
    """The correlation of two recordings' samples, which may have opposite phases."""
    num_samples = min(first.num_samples, second.num_samples)
    samples = [recording.read(0, num_samples) for recording in (first, second)]
    return float(abs(np.corrcoef(samples)[0, 1]))


@pytest.fixture(scope="module")
def decoded_calls(calls: dict[str, Path]) -> dict[str, Path]:
    """The same files in a format that only ffmpeg reads."""
    try:
        ffmpeg = find_ffmpeg()
    except FfmpegError:
        pytest.skip("needs ffmpeg")
    paths = {}
    for name, path in calls.items():
        paths[name] = path.with_suffix(".m4a")
        command = [ffmpeg, "-y", "-loglevel", "error", "-i", path, "-b:a", "256k", paths[name]]
        subprocess.run(command, check=True)
    return paths


def test_channels_of_files_that_ffmpeg_decodes(calls, decoded_calls, verifier):
    for name, num_channels in (("call", 2), ("copies", 2), ("array", 4)):
        assert audio_info(decoded_calls[name]).num_channels == num_channels
    for name in ("call", "opposite", "nearly_opposite", "left_dead"):
        expected = verifier.open(calls[name])
        recording = verifier.open(decoded_calls[name])
        # Of channels that are equally loud, either may be chosen.
        assert (recording.channel is None) is (expected.channel is None), name
        cause = expected.channel_warning.partition(":")[0]
        assert recording.channel_warning.partition(":")[0] == cause, name
        assert likeness(recording, expected) > 0.99, name
    paths = calls["call"], decoded_calls["call"]
    for channel in (1, 2):
        first, second = (verifier.open(path, channel=channel) for path in paths)
        assert likeness(first, second) > 0.99


@pytest.mark.parametrize(
    ("name", "channel", "words"),
    [
        ("call", None, "channels differ"),
        ("opposite", 0, "opposite phases"),
        ("nearly_opposite", 1, "opposite phases"),
        ("half_silent", None, ""),
        ("left_dead", None, ""),
        ("array", None, ""),
        ("music_free_hum", None, ""),
    ],
)
def test_what_is_said(calls, verifier, name, channel, words):
    recording = verifier.open(calls[name])
    assert recording.channel == channel
    assert recording.channel_warning.startswith(words)
    assert bool(recording.channel_warning) is bool(words)
    assert ("channel" in " ".join(inspect_recording(recording).warnings)) is bool(words)
    # The same samples as an array.
    samples, rate = soundfile.read(calls[name], dtype="float32")
    as_array = verifier.open(samples, rate)
    assert as_array.channel_warning == recording.channel_warning
    np.testing.assert_allclose(as_array.read(), recording.read(), atol=1e-6)
    # Every choice of the user is taken without a word.
    for wanted in ("mix", "1", 2):
        assert not verifier.open(calls[name], channel=wanted).channel_warning


def test_one_channel_is_that_person(calls, voices, verifier):
    left, right = (verifier.embed(str(voices / name)) for name in ("s00/0.wav", "s05/0.wav"))
    for wanted, expected in ((1, left), (2, right)):
        found = verifier.embed(verifier.open(calls["call"], channel=wanted))
        assert cosine(found, expected) > 0.999
    for name in ("opposite", "nearly_opposite", "left_dead", "copies"):
        assert cosine(verifier.embed(calls[name]), left) > 0.98, name


@pytest.mark.parametrize("wanted", [3, "0", "left", True])
def test_channels_that_do_not_exist(calls, verifier, wanted):
    with pytest.raises(ValueError, match="channel"):
        verifier.open(calls["call"], channel=wanted)


def test_mono_has_no_choice(voices, verifier):
    path = voices / "s00/0.wav"
    np.testing.assert_array_equal(verifier.open(path, channel=2).read(), verifier.open(path).read())


def test_resampled_channels(calls, verifier, tmp_path):
    samples, rate = soundfile.read(calls["opposite"], dtype="float32")
    soundfile.write(tmp_path / "x.wav", samples, rate // 2)
    assert verifier.open(tmp_path / "x.wav").channel == 0
    assert verifier.open(samples, rate // 2).channel_warning.startswith("opposite")


def test_commands_say_it(calls, voices, calibrated, tmp_path, caplog, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    recording = calls["call"]
    model = f"--model {calibrated}"
    alone = voices / "s00/3.wav"
    assert call(f"enroll Ada {alone} {model} --store people.db")[0] == 0
    verify = f"verify {recording} {alone} {model}"
    enroll = f"enroll Bo {recording} {model} --store other.db"
    embed = f"embed {recording} {alone} {model} --out e.npz"
    identify = f"identify {recording} {model} --store people.db"
    for command in (verify, enroll, embed, identify, f"who {recording} {model} --out turns"):
        for option in ("", "--channel 1", "--channel mix"):
            caplog.clear()
            Path("other.db").unlink(missing_ok=True)
            assert call(f"{command} {option}")[0] in (0, 1), (command, option)
            assert ("channels differ" in caplog.text) is (not option), (command, option)
    assert [call(f"{verify} --channel {channel}")[0] for channel in (1, 2)] == [0, 1]
    assert call(f"{enroll} --strict")[0] == 1
    embeddings = []
    for channel in (1, 2):
        assert call(f"{embed} --channel {channel}")[0] == 0
        embeddings.append(np.load("e.npz")["embeddings"])
    # The first is the call, the second has one channel.
    assert not np.allclose(embeddings[0][0], embeddings[1][0], atol=1e-3)
    np.testing.assert_allclose(embeddings[0][1], embeddings[1][1], atol=1e-5)


def test_embedding_again_does_not_mix_the_other_voice_in(calls, calibrated, tmp_path, call):
    store = tmp_path / "people.db"
    command = f"enroll Ada {calls['call']} --model {calibrated} --store {store} --channel"
    assert call(f"{command} 1")[0] == 0
    assert PeopleStore(store).recordings()[0].source == ""
    # The other channel is another recording.
    assert call(f"{command} 2")[0] == 0
    assert len(PeopleStore(store).recordings()) == 2


def test_only_files_with_channels_are_compared(voices, verifier, monkeypatch):
    def compare(*_: object) -> channels.Chosen:
        raise AssertionError("a file with one channel was read")

    monkeypatch.setattr(channels, "compare", compare)
    assert verifier.open(voices / "s00/0.wav").channel is None


def test_long_recordings_are_sampled():
    """Of hours, a minute is read: the voices alternate every ten seconds."""
    rate = 8000
    asked = []
    random = np.random.default_rng(1)

    def read(start: int, count: int) -> np.ndarray:
        asked.append(count)
        places = np.arange(start, start + count)
        speaker = places // (10 * rate) % 2
        loud = 0.2 * (1.1 + np.sin(places / 500)) * random.standard_normal(count)
        return np.stack(
            [np.where(speaker == 0, loud, 0.001), np.where(speaker == 1, loud, 0.001)], axis=1
        )

    assert channels.choose(read, 3600 * rate, 2, rate, "x").warning.startswith("channels differ")
    assert sum(asked) == 60 * rate


def test_errors_name_the_recording(calls, verifier):
    with pytest.raises(AudioError, match=r"call\.flac.*2 channels"):
        verifier.open(calls["call"], channel=3)
