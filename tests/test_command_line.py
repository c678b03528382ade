"""The command line at its edges: a reader that goes away, refusals of the system."""

import errno
import os
import re
import subprocess
import sys

import pytest

from speakernet.cli import BROKEN_PIPE, main


# Of a command's own help argparse ends well, whoever listens.
@pytest.mark.parametrize(
    ("command_line", "status"), [("list", BROKEN_PIPE), ("--help", BROKEN_PIPE), ("train --help all", 0)]
)
def test_a_reader_that_goes_away_ends_the_command_in_silence(command_line: str, status: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "speakernet", *command_line.split()]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (status, "")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "a/b.pt"),
            r"a/b\.pt: No space left on device; the disk is full",
        ),
        (OSError(errno.EROFS, "Read-only file system", "a"), "a: Read-only file system; .* choose another place"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error; the disk or the network"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "a/b"), "a/b: Not a directory; part of that path"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "Broken pipe; see to that"),
        (MemoryError("2 TiB"), r"out of memory \(2 TiB\); take a smaller batch"),
        (RuntimeError("CUDA out of memory. Tried\nGPU 0"), r"out of memory \(CUDA out of memory. Tried\); take"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_system_refuses_is_said_with_what_to_do(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(arguments) -> int:
        raise error

    monkeypatch.setattr("speakernet.cli.list_parts.run", refused)
    assert main(["list"]) == 1
    assert re.search(said, capsys.readouterr().err)
