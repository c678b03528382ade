"""Recordings with several channels: one person on each, opposite phases, silent and copied
channels.
"""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import soundfile

from speakernet.data.audio import audio_info, read_audio
from speakernet.inference import channels
from speakernet.inference.people import PeopleStore
from speakernet.inference.recordings import inspect_recording
from tests.commands import run_command

RATE = 16000


def hiss(num_samples):
    return 0.0005 * np.random.default_rng(0).standard_normal(num_samples).astype(np.float32)


@pytest.fixture(scope="module")
def calls(voices, tmp_path_factory):
    """Two-channel files by what is on their channels."""
    folder = tmp_path_factory.mktemp("calls")
    left, right = (read_audio(voices / name) for name in ("s00/0.wav", "s05/0.wav"))
    other = np.roll(left, 40) + 0.3 * np.roll(left, 400) + hiss(len(left))
    silence = np.zeros_like(left)
    sounds = {
        "call": (left, right),
        "opposite": (left, -left),
        "nearly_opposite": (0.7 * left, -left),
        "copies": (left, left),
        "left_dead": (silence, left),
        # A microphone array of which two inputs are unused.
        "array": (left, other, silence, silence),
        "music_free_hum": (left, 0.1 * np.sin(np.arange(len(left)) / 20).astype(np.float32)),
    }
    paths = {name: folder / f"{name}.flac" for name in sounds}
    for name, columns in sounds.items():
        soundfile.write(paths[name], np.stack(columns, axis=1), RATE)
    return paths


def cosine(first, second):
    return (first @ second.T).item() / np.linalg.norm(first) / np.linalg.norm(second)


def likeness(first, second):
    """The correlation of two recordings' samples, which may have opposite phases."""
    num_samples = min(first.num_samples, second.num_samples)
    samples = [recording.read(0, num_samples) for recording in (first, second)]
    return abs(np.corrcoef(samples)[0, 1])


@pytest.mark.parametrize("name", ["call", "opposite", "array"])
def test_channels_of_files_that_ffmpeg_decodes(calls, ffmpeg, verifier, tmp_path, name):
    path = tmp_path / "x.m4a"
    command = f"{ffmpeg} -y -loglevel error -i {calls[name]} -b:a 256k {path}"
    subprocess.run(command.split(), check=True)
    assert audio_info(path).num_channels == (4 if name == "array" else 2)
    expected = verifier.open(calls[name])
    recording = verifier.open(path)
    # Of channels that are equally loud, either may be chosen.
    assert (recording.channel is None) is (expected.channel is None)
    cause = expected.channel_warning.partition(":")[0]
    assert recording.channel_warning.partition(":")[0] == cause
    assert likeness(recording, expected) > 0.99
    first, second = (verifier.open(file, channel=2) for file in (calls[name], path))
    assert name == "array" or likeness(first, second) > 0.99


@pytest.mark.parametrize(
    ("name", "channel", "words"),
    [
        ("call", None, "channels differ"),
        ("opposite", 0, "opposite phases"),
        ("nearly_opposite", 1, "opposite phases"),
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


def test_one_channel_is_that_person(calls, voices, verifier):
    left, right = (verifier.embed(str(voices / name)) for name in ("s00/0.wav", "s05/0.wav"))
    for wanted, expected in ((1, left), (2, right)):
        found = verifier.embed(verifier.open(calls["call"], channel=wanted))
        assert cosine(found, expected) > 0.999
    for name in ("opposite", "nearly_opposite", "left_dead", "copies"):
        assert cosine(verifier.embed(calls[name]), left) > 0.98, name


@pytest.mark.parametrize("wanted", [3, "0", "left"])
def test_channels_that_do_not_exist(calls, verifier, wanted):
    with pytest.raises(ValueError, match=r"call\.flac.*2 channels|channel (0|left)"):
        verifier.open(calls["call"], channel=wanted)


def test_mono_has_no_choice(voices, verifier, monkeypatch):
    """It is not read to compare channels either."""
    monkeypatch.setattr(channels, "compare", lambda *_: 1 / 0)
    path = voices / "s00/0.wav"
    np.testing.assert_array_equal(verifier.open(path, channel=2).read(), verifier.open(path).read())


def test_commands_say_it(calls, voices, calibrated, tmp_path, caplog, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    recording = calls["call"]
    model = f"--model {calibrated}"
    alone = voices / "s00/3.wav"
    run_command(f"enroll Ada {alone} {model} --store people.db")
    verify = f"verify {recording} {alone} {model}"
    enroll = f"enroll Bo {recording} {model} --store other.db"
    embed = f"embed {recording} {model} --out e.npz"
    identify = f"identify {recording} {model} --store people.db"
    for command in (verify, enroll, embed, identify, f"who {recording} {model} --out turns"):
        for option in ("", "--channel 1", "--channel mix"):
            caplog.clear()
            Path("other.db").unlink(missing_ok=True)
            assert call(f"{command} {option}")[0] in (0, 1), (command, option)
            assert ("channels differ" in caplog.text) is (not option), (command, option)
    assert [call(f"{verify} --channel {channel}")[0] for channel in (1, 2)] == [0, 1]
    assert call(f"{enroll} --strict")[0] == 1


def test_embedding_again_does_not_mix_the_other_voice_in(calls, calibrated, tmp_path):
    store = tmp_path / "people.db"
    command = f"enroll Ada {calls['call']} --model {calibrated} --store {store} --channel"
    run_command(f"{command} 1")
    assert PeopleStore(store).recordings()[0].source == ""
    # The other channel is another recording.
    run_command(f"{command} 2")
    assert len(PeopleStore(store).recordings()) == 2


def test_long_recordings_are_sampled():
    """Of hours, a minute is read: the voices alternate every ten seconds."""
    rate = 8000
    asked = []
    random = np.random.default_rng(1)

    def read(start, count):
        asked.append(count)
        places = np.arange(start, start + count)
        is_first = places // (10 * rate) % 2 == 0
        loud = 0.2 * (1.1 + np.sin(places / 500)) * random.standard_normal(count)
        columns = np.where(is_first, loud, 0.001), np.where(is_first, 0.001, loud)
        return np.stack(columns, axis=1)

    assert channels.choose(read, 3600 * rate, 2, rate, "x").warning.startswith("channels differ")
    assert sum(asked) == 60 * rate
