"""What `--out` may replace: never an input, and no file of another program without --force."""

import shutil
from pathlib import Path

import pytest

from speakernet.cli.shared import is_own
from tests.commands import run_command


@pytest.fixture
def inputs(voices, calibrated, tmp_path, monkeypatch):
    """Copies of everything that a command can read, in the working folder."""
    monkeypatch.chdir(tmp_path)
    names = "model.pt people.db trials.txt labels.csv a.wav key"
    paths = {name: tmp_path / name for name in names.split()}
    shutil.copy(calibrated, paths["model.pt"])
    shutil.copy(voices / "trials.txt", paths["trials.txt"])
    shutil.copy(voices / "s00/0.wav", paths["a.wav"])
    paths["labels.csv"].write_text("path,speaker\na.wav,Ada\n")
    paths["key"].write_text("a long key of a store\n")
    files = f"{voices}/s00/0.wav {voices}/s00/1.wav"
    run_command(f"enroll Ada {files} --model model.pt --store people.db")
    return paths


ADAPT = "adapt --model model.pt --recordings {voices} a.wav --labels labels.csv --trials trials.txt"
COMMANDS = [
    ("calibrate --model model.pt --trials trials.txt --audio {voices}", "trials.txt"),
    ("calibrate --model model.pt --trials trials.txt --audio {voices}", "model.pt"),
    ("calibrate --model model.pt --store people.db --cohort a.wav", "a.wav"),
    (ADAPT, "a.wav"),
    (ADAPT, "labels.csv"),
    ("embed a.wav --model model.pt", "a.wav"),
    ("people export --store people.db --key-file key", "key"),
    ("export model.pt --speech a.wav", "a.wav"),
    ("import-weights model.pt --model ResNet", "model.pt"),
    ("import-config labels.csv", "labels.csv"),
]
"""Commands, and the argument among them that is then given as output too."""


def test_an_input_is_never_an_output(inputs, voices, call):
    for command, name in COMMANDS:
        Path("link.pt").unlink(missing_ok=True)
        Path("link.pt").symlink_to(inputs[name])
        before = inputs[name].read_bytes()
        option = "--output" if command.startswith("report") else "--out"
        for path in (name, inputs[name], "link.pt"):
            status, _, err = call(f"{command.format(voices=voices)} {option} {path} --force")
            assert status in (1, 2) and f"would overwrite {name}" in err, (command, path)
            assert inputs[name].read_bytes() == before, (command, path)


@pytest.mark.parametrize("name", ["notes.npz", "people.db"])
def test_a_file_of_another_program_needs_force(inputs, voices, refuse, name):
    command = f"calibrate --model model.pt --trials {voices}/trials.txt"
    if name == "notes.npz":
        command = "embed a.wav --model model.pt"
        Path(name).write_bytes(b"PK\x03\x04 of another program")
    before = Path(name).read_bytes()
    assert "--force" in refuse(f"{command} --out {name}")
    assert Path(name).read_bytes() == before
    run_command(f"{command} --out {name} --force")
    assert Path(name).read_bytes() != before
    # It is ours now.
    assert is_own(Path(name)) is True
    run_command(f"{command} --out {name}")


def test_a_recording_of_the_cohort_is_not_replaced_by_the_model(inputs, voices, refuse):
    """It is named by a list, not by an argument."""
    Path("cohort.txt").write_text(f"a.wav\n{voices / 's05/0.wav'}\n")
    before = Path("a.wav").read_bytes()
    for command in (
        "calibrate --model model.pt --store people.db --cohort cohort.txt",
        "adapt --model model.pt --recordings cohort.txt",
    ):
        assert "would overwrite" in refuse(f"{command} --out a.wav --force")
        assert Path("a.wav").read_bytes() == before


def test_who_replaces_only_its_own_files(inputs, voices, call, refuse):
    for number in (1, 2):
        day = Path(f"day{number}")
        day.mkdir()
        shutil.copy(voices / f"s0{number}/0.wav", day / "meeting.wav")
    command = "who --model model.pt --out turns"
    run_command(f"{command} day1/meeting.wav")
    first = {path.name: path.read_bytes() for path in Path("turns").iterdir()}
    run_command(f"{command} day1/meeting.wav")
    # A different recording with the same name, turns that were corrected, or a ground truth.
    assert call(f"{command} day2/meeting.wav")[0] == 1
    assert {path.name: path.read_bytes() for path in Path("turns").iterdir()} == first
    rttm = Path("turns/meeting.rttm")
    rttm.write_text("SPEAKER meeting 1 0.000 1.000 <NA> <NA> Ada <NA> <NA>\n")
    assert "meeting.rttm" in refuse(f"{command} day1/meeting.wav")
    assert rttm.read_text().endswith("Ada <NA> <NA>\n")
    run_command(f"{command} day1/meeting.wav --force")
    assert rttm.read_bytes() == first["meeting.rttm"]


def test_who_does_not_replace_its_transcript(inputs, refuse):
    shutil.copy(inputs["a.wav"], "talk.wav")
    words = Path("talk.transcript.json")
    words.write_text('[{"word": "hello", "start": 0.1, "end": 0.4}]')
    command = f"who talk.wav --model model.pt --out . --transcript {words}"
    assert "would overwrite" in refuse(f"{command} --force")
    assert "speaker" not in words.read_text()
