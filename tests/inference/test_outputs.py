"""What `--out` may replace: never an input, and no file of another program without --force."""

import shutil
from pathlib import Path

import pytest

from speakernet.checkpoint import read_checkpoint
from speakernet.cli import main
from speakernet.files import is_own
from speakernet.models.model_file import is_model_file


@pytest.fixture()
def inputs(
    voices: Path, calibrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Path]:
    """Copies of everything that a command can read, in the working folder."""
    monkeypatch.chdir(tmp_path)
    paths = {
        name: tmp_path / name
        for name in ("model.pt", "people.db", "trials.txt", "labels.csv", "a.wav", "key")
    }
    shutil.copy(calibrated, paths["model.pt"])
    shutil.copy(voices / "trials.txt", paths["trials.txt"])
    shutil.copy(voices / "s00/0.wav", paths["a.wav"])
    paths["labels.csv"].write_text("path,speaker\na.wav,Ada\n")
    paths["key"].write_text("a long key of a store\n")
    files = [str(voices / f"s00/{number}.wav") for number in (0, 1)]
    assert main(["enroll", "Ada", *files, "--model", "model.pt", "--store", "people.db"]) == 0
    return paths


def calls(voices: Path) -> list[tuple[list[str], str]]:
    """Commands, and the argument among them that is then given as output too."""
    model = ["--model", "model.pt", "--device", "cpu"]
    calibrate = ["calibrate", *model, "--trials", "trials.txt", "--audio", str(voices)]
    adapt = [
        "adapt",
        *model,
        "--recordings",
        str(voices),
        "a.wav",
        "--labels",
        "labels.csv",
        "--trials",
        "trials.txt",
    ]
    export = ["people", "export", "--store", "people.db", "--key-file", "key"]
    return [
        (calibrate, "trials.txt"),
        (calibrate, "model.pt"),
        (["calibrate", *model, "--store", "people.db", "--cohort", "a.wav"], "people.db"),
        (["calibrate", *model, "--store", "people.db", "--cohort", "a.wav"], "a.wav"),
        *((adapt, name) for name in ("model.pt", "a.wav", "labels.csv", "trials.txt")),
        (["embed", "a.wav", *model], "a.wav"),
        (export, "people.db"),
        (export, "key"),
        (["export", "model.pt", "--speech", "a.wav"], "a.wav"),
        (["report", "trials.txt", "labels.csv"], "labels.csv"),
        (["import-weights", "model.pt", "--model", "ResNet"], "model.pt"),
        (["import-config", "labels.csv"], "labels.csv"),
    ]


def test_an_input_is_never_an_output(inputs, voices, capsys):
    for command, name in calls(voices):
        option = "--output" if command[0] == "report" else "--out"
        Path("link.pt").unlink(missing_ok=True)
        Path("link.pt").symlink_to(inputs[name])
        before = inputs[name].read_bytes()
        for path in (name, str(inputs[name]), "link.pt"):
            status = main([*command, option, path, "--force"])
            assert status in (1, 2), (command, path)
            assert inputs[name].read_bytes() == before, (command, path)
            assert f"would overwrite {name}" in capsys.readouterr().err, (command, path)


@pytest.mark.parametrize("name", ["notes.npz", "trials.txt", "people.db"])
def test_a_file_of_another_program_is_only_replaced_with_force(inputs, voices, capsys, name):
    if name == "notes.npz":
        command = ["embed", "a.wav", "--model", "model.pt"]
        Path(name).write_bytes(b"PK\x03\x04 of another program")
    else:
        command = ["calibrate", "--model", "model.pt", "--trials", str(voices / "trials.txt")]
    before = Path(name).read_bytes()
    assert main([*command, "--out", name]) == 1
    assert "--force" in capsys.readouterr().err
    assert Path(name).read_bytes() == before
    assert main([*command, "--out", name, "--force"]) == 0
    assert Path(name).read_bytes() != before
    # It is ours now.
    assert is_own(Path(name)) is True
    assert main([*command, "--out", name]) == 0


def test_own_files_of_every_kind_are_recognised(inputs, tmp_path):
    assert main(["embed", "a.wav", "--model", "model.pt", "--out", "e.npz"]) == 0
    for suffix in (".json", ".npz"):
        assert main(["people", "export", "--store", "people.db", "--out", f"people{suffix}"]) == 0
    assert main(["export", "model.pt", "--out", "model.safetensors"]) == 0
    for name in ("model.pt", "e.npz", "people.json", "people.npz", "model.safetensors"):
        assert is_own(tmp_path / name), name
    for name in ("people.db", "trials.txt", "labels.csv", "a.wav", "missing.pt"):
        assert not is_own(tmp_path / name), name


def test_a_recording_of_the_cohort_is_not_replaced_by_the_model(inputs, voices, capsys):
    """It is named by a list, not by an argument."""
    Path("cohort.txt").write_text(f"a.wav\n{voices / 's05/0.wav'}\n")
    before = Path("a.wav").read_bytes()
    for command in (
        ["calibrate", "--model", "model.pt", "--store", "people.db", "--cohort", "cohort.txt"],
        ["adapt", "--model", "model.pt", "--recordings", "cohort.txt"],
    ):
        assert main([*command, "--out", "a.wav", "--force"]) == 1
        assert "would overwrite" in capsys.readouterr().err
        assert Path("a.wav").read_bytes() == before


def test_who_replaces_only_its_own_files_of_the_same_recording(inputs, voices, capsys):
    days = [Path(f"day{number}") for number in (1, 2)]
    for number, day in enumerate(days):
        day.mkdir()
        shutil.copy(voices / f"s0{number}/0.wav", day / "meeting.wav")
    command = ["who", "--model", "model.pt", "--out", "turns"]
    assert main([*command, "day1/meeting.wav"]) == 0
    first = {path.name: path.read_bytes() for path in Path("turns").iterdir()}
    assert main([*command, "day1/meeting.wav"]) == 0
    # Another recording of the same name.
    assert main([*command, "day2/meeting.wav"]) == 1
    assert "--force" in capsys.readouterr().err
    # Turns that somebody corrected, or a ground truth of the same name.
    assert {path.name: path.read_bytes() for path in Path("turns").iterdir()} == first
    rttm = Path("turns/meeting.rttm")
    rttm.write_text("SPEAKER meeting 1 0.000 1.000 <NA> <NA> Ada <NA> <NA>\n")
    assert main([*command, "day1/meeting.wav"]) == 1
    assert "meeting.rttm" in capsys.readouterr().err
    assert rttm.read_text().endswith("Ada <NA> <NA>\n")
    assert main([*command, "day1/meeting.wav", "--force"]) == 0
    assert rttm.read_bytes() == first["meeting.rttm"]


def test_who_does_not_replace_its_transcript(inputs, voices, capsys):
    shutil.copy(inputs["a.wav"], "talk.wav")
    words = Path("talk.transcript.json")
    words.write_text('[{"word": "hello", "start": 0.1, "end": 0.4}]')
    command = ["who", "talk.wav", "--model", "model.pt", "--out", ".", "--transcript", str(words)]
    assert main([*command, "--force"]) == 1
    assert "would overwrite" in capsys.readouterr().err
    assert "speaker" not in words.read_text()


def test_calibrate_writes_to_a_new_name(inputs, voices):
    assert (
        main(
            [
                "calibrate",
                "--model",
                "model.pt",
                "--trials",
                str(voices / "trials.txt"),
                "--out",
                "new/c.pt",
            ]
        )
        == 0
    )
    assert is_model_file(read_checkpoint("new/c.pt"))
