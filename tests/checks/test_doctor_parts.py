"""The doctor's work shared by several machines: what the last of them says is what one would have said."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from speakernet.checks.full import CheckRequest, CheckResult, full_check
from speakernet.cli import main
from speakernet.data.audio import write_audio
from speakernet.files import FileError
from speakernet.parts import PartError, WorkPart


@pytest.fixture()
def corpus(tmp_path: Path) -> Path:
    """Two lists with nearly everything that can be wrong, spread over the files."""
    random = np.random.default_rng(3)
    for row in range(9):
        write_audio(tmp_path / f"s{row % 3}/{row}.wav", 0.1 * random.standard_normal(16000 + row), 16000)
    write_audio(tmp_path / "s0/silent.wav", np.zeros(16000, dtype=np.float32), 16000)
    write_audio(tmp_path / "s1/short.wav", 0.1 * random.standard_normal(3000), 8000)
    (tmp_path / "s2/empty.wav").write_bytes(b"")
    (tmp_path / "s2/twice.wav").write_bytes((tmp_path / "s0/0.wav").read_bytes())
    names = [f"s{row % 3}/{row}.wav" for row in range(9)] + ["s0/silent.wav", "s1/short.wav", "s2/empty.wav"]
    names += ["s2/twice.wav", "s1/gone.wav"]
    (tmp_path / "train.txt").write_text("".join(f"{name.split('/')[0]} {name}\n" for name in names))
    (tmp_path / "trials.txt").write_text("1 s0/0.wav s0/3.wav\n0 s0/0.wav s1/lost.wav\n")
    return tmp_path


def request_of(corpus: Path, *, is_fast: bool = False) -> CheckRequest:
    trials = ((corpus / "trials.txt", corpus),)
    return CheckRequest(corpus / "train.txt", corpus, trials, corpus / "exps", is_fast=is_fast, num_jobs=2)


def said(result: CheckResult) -> list[str]:
    """Everything but what the machine had free, and how fast its disk was, just now."""
    changing = ("disk", "limits", "free space", "shared memory")
    return [f"{one.level} {one}" for one in result.findings if not one.check.endswith(changing)]


@pytest.mark.parametrize("is_fast", [False, True])
def test_the_last_part_says_what_one_machine_says(corpus: Path, tmp_path: Path, is_fast: bool) -> None:
    request, folder = request_of(corpus, is_fast=is_fast), tmp_path / "found"
    whole = full_check(request)
    for number in (3, 1):
        result = full_check(request, WorkPart(number, 3), folder)
        assert result.findings == [] and WorkPart(2, 3) in result.missing
    last = full_check(request, WorkPart(2, 3), folder)
    assert said(last) == said(whole) and last.missing == ()
    assert any("stand under two speakers" in one for one in said(last)) != is_fast
    assert {name: list(seconds) for name, seconds in last.durations.items()} == {
        name: list(seconds) for name, seconds in whole.durations.items()
    }


def test_parts_without_a_file_of_a_list_change_nothing(corpus: Path, tmp_path: Path) -> None:
    """Five parts, of three trial files."""
    request = request_of(corpus, is_fast=True)
    for number in range(1, 6):
        last = full_check(request, WorkPart(number, 5), tmp_path / "many")
    assert said(last) == said(full_check(request))


def test_parts_of_another_check_are_refused(corpus: Path, tmp_path: Path) -> None:
    request, folder = request_of(corpus), tmp_path / "found"
    full_check(request, WorkPart(1, 2), folder)
    with pytest.raises(PartError, match="parts of 2 and of 3"):
        full_check(request, WorkPart(1, 3), folder)
    with pytest.raises(PartError, match="the parts 1/2 are of other lists, another rate or another thoroughness"):
        full_check(replace(request, is_fast=True), WorkPart(2, 2), folder)
    (folder / "part-0002-of-0002.npz").write_bytes(b"nothing")
    with pytest.raises(FileError, match=r"part-0002-of-0002\.npz"):
        full_check(request, WorkPart(2, 2), folder)


def test_the_command(corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(corpus)
    options = ["doctor", "--list", "train.txt", "--root", ".", "--trials", "trials.txt"]
    whole = main(options)
    assert whole == 2
    capsys.readouterr()
    assert main([*options, "--part", "1/2", "--part_folder", "found"]) == 0
    assert capsys.readouterr().out == "part 1/2 is done; the parts 2/2 are missing\n"
    assert main([*options, "--part", "2/2", "--part_folder", "found"]) == whole
    assert "of 14 files cannot be read" in " ".join(capsys.readouterr().out.split())
    assert main([*options, "--part", "2/2"]) == 1
    assert "--part and --part_folder belong together" in capsys.readouterr().err
