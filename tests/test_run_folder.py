"""The run folder: its lock and its names; and checkpoint files have one reader and one writer."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from speakernet.cli import main
from speakernet.run_folder import evaluation_folder, held, move_aside, refuse_unusable


def test_lock_of_another_process(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from speakernet.run_folder import held\n"
        "with held(sys.argv[1]):\n"
        "    print('held', flush=True)\n"
        "    input()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    # Being refused leaves the holder's name alone.
    for _ in range(2):
        with pytest.raises(ValueError, match=f"process {process.pid} on "), held(tmp_path):
            raise AssertionError("it was held twice")
    process.kill()
    process.communicate()
    with held(tmp_path):
        pass


def test_names(tmp_path: Path) -> None:
    assert evaluation_folder(tmp_path, "lists/trials.clean.txt") == tmp_path / "eval" / "trials.clean"
    for number in (1, 2):
        (tmp_path / "old").mkdir()
        assert move_aside(tmp_path / "old").name == f"old.before-{number}"


def test_one_reader_and_writer(repository: Path) -> None:
    calls = {
        path.name
        for path in (repository / "speakernet").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save")
    }
    assert calls == {"checkpoint.py"}


def test_unusable_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before anything is read or made."""
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "a" / "b"):
        with pytest.raises(ValueError, match=rf"save_path: {folder} .*a file"):
            refuse_unusable(folder)
        assert main(["train", "--save_path", str(folder), "--train_list", "nowhere.txt"]) == 1
        error = capsys.readouterr().err
        assert str(folder) in error and "nowhere" not in error
    refuse_unusable(tmp_path / "a" / "b")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="read-only"):
        refuse_unusable(tmp_path / "a" / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
