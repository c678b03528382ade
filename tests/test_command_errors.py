"""What the command line says of errors of the system: in words, with what to do, without a traceback."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from speakernet import cli
from speakernet.cli import main
from speakernet.run_folder import held


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device; free some space"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "a/b"), "a/b: Not a directory; a part of the path"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), "x: Permission denied; choose a file or folder"),
        (MemoryError("2 TiB"), "out of memory (2 TiB); take a smaller batch"),
        (ChildProcessError("worker 1 ended"), "worker 1 ended"),
    ],
)
def test_errors_of_the_system_are_said_in_words(
    error: BaseException, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "_parse", fail)
    assert main(["list"]) == 1
    shown = capsys.readouterr().err
    assert said in shown and "Errno" not in shown and "Traceback" not in shown


def test_a_reader_that_has_ended_is_left_in_peace(repository: Path) -> None:
    command = [sys.executable, "-m", "speakernet", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=repository) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == cli.BROKEN_PIPE


def test_a_run_folder_that_cannot_be_is_said_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = r"file/run: cannot be written \(Not a directory\); choose another --save_path"
    with pytest.raises(ValueError, match=message), held(tmp_path / "file" / "run"):
        pass
