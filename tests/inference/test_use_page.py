"""The commands and examples of docs/use.md, run as they are written."""

import math
import re
import shlex
import shutil
from pathlib import Path

import pytest

from speakernet.checkpoint import read_checkpoint, write_checkpoint
from speakernet.cli import main
from speakernet.inference.decision import UNCALIBRATED_THRESHOLD, Decision


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


@pytest.fixture()
def page(repository: Path) -> str:
    return (repository / "docs" / "use.md").read_text(encoding="utf-8")


def test_every_command_and_example_runs(page, voices, uncalibrated, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copy(uncalibrated, "best.pt")
    shutil.copytree(voices, "my_voices")
    other = read_checkpoint(uncalibrated)
    other["weights"]["embedding.bias"] += 0.1
    write_checkpoint("new.pt", other)
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    answers = {}
    for line in lines:
        program, *words = shlex.split(line)
        assert program == "speakernet"
        status = main(words)
        answers[line] = capsys.readouterr().out
        assert status in ((0, 1) if words[0] == "verify" else (0,)), line
    assert len(lines) >= 14
    assert Path("best.before-calibration.pt").exists() and Path("own.pt").exists()
    (identified,) = (answers[line] for line in lines if " identify " in line)
    assert re.match(r"(Ada|unknown) score \d", identified)
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, "docs/use.md", "exec"), names)
    assert names["embeddings"].shape == (2, 11) and len(names["track"].start_seconds) == 3
    assert names["decision"].false_accept_rate == 0.01


def test_the_page_says_what_a_verifier_cannot_do_and_names_what_there_is(page, repository):
    for name in ("use.md", "models.md"):
        assert "does not detect replayed or synthetic voices" in (repository / "docs" / name).read_text("utf-8")
    assert f"`default` is {UNCALIBRATED_THRESHOLD}" in page


def test_the_three_lines_of_the_readme(repository, voices, calibrated, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("exps/exp01").mkdir(parents=True)
    shutil.copy(calibrated, "exps/exp01/best.pt")
    shutil.copy(voices / "s00/3.wav", "a.wav")
    shutil.copy(voices / "s00/4.wav", "b.wav")
    (block,) = blocks((repository / "README.md").read_text(encoding="utf-8"), "python")
    assert len([line for line in block.splitlines() if line]) == 3
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("same speaker: score 0.")
    page = " ".join((repository / "README.md").read_text(encoding="utf-8").split())
    assert f"`{Decision(0.71, 3.2, True, 0.4512, 0.01).sentence}`" in page


def test_the_answer_on_the_page_is_one_that_the_command_gives(page):
    (shown,) = blocks(page, "text")
    score, threshold, percent, times = (float(one.replace(",", "")) for one in re.findall(r"\d[\d.,]*", shown))
    assert Decision(score, math.log(times), score >= threshold, threshold, percent / 100).sentence == shown.strip()
