"""The run folder: its lock and its names; and checkpoint files have one reader and one writer."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from speakernet.run_folder import epoch_path, epoch_paths, evaluation_folder, held, move_aside


def test_a_folder_is_free_again_after_it_was_held(tmp_path: Path) -> None:
    with held(tmp_path):
        with pytest.raises(ValueError, match="in use"), held(tmp_path):
            raise AssertionError("it was held twice")
        assert (tmp_path / "run.lock").read_text().startswith(f"process {os.getpid()} on ")
    with held(tmp_path):
        pass


def test_another_process_is_told_who_holds_it_and_gets_it_after_a_kill(tmp_path: Path) -> None:
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
    # More than one is refused, each with the same words: asking leaves the holder's name alone.
    for _ in range(2):
        with (
            pytest.raises(ValueError, match=rf"another run \(process {process.pid} on .*choose another"),
            held(tmp_path),
        ):
            raise AssertionError("it was held twice")
    process.kill()
    process.communicate()
    with held(tmp_path):
        pass


def test_names(tmp_path: Path) -> None:
    for epoch in (10, 9):
        epoch_path(tmp_path, epoch).parent.mkdir(exist_ok=True)
        epoch_path(tmp_path, epoch).touch()
    assert [path.name for path in epoch_paths(tmp_path)] == ["epoch_0009.pt", "epoch_0010.pt"]
    assert evaluation_folder(tmp_path, "lists/trials.clean.txt") == tmp_path / "eval" / "trials.clean"
    for number in (1, 2):
        (tmp_path / "old").mkdir()
        assert move_aside(tmp_path / "old").name == f"old.before-{number}"


def test_torch_reads_and_writes_files_in_one_place(repository: Path) -> None:
    calls = {
        path.name
        for path in (repository / "speakernet").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save")
    }
    assert calls == {"checkpoint.py"}
