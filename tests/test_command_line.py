"""The command line at its edges: closed streams, readers that go away, refusals of the system."""

import errno
import os
import subprocess
import sys

import pytest

from speakernet.cli import BROKEN_PIPE, main

SPEAKERNET = f"{sys.executable} -m speakernet"


def shell(command: str, **environment: str) -> tuple[int, str, str]:
    ended = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("command", "status", "has_message"),
    [
        ("list >&-", 0, False),
        ("--help >&-", 0, False),
        ("list <&- >&- 2>&-", 0, False),
        ("list >/dev/full", 1, True),
        ("--help >/dev/full", 1, True),
        # 1 would mean different speakers.
        ("verify a.wav b.wav --model none.pt >&-", 2, True),
        ("verify a.wav b.wav --model none.pt 2>&-", 2, False),
        ("list | true; exit ${PIPESTATUS[0]}", BROKEN_PIPE, False),
        # argparse ignores errors when it prints a page of help.
        ("train --help all | true; exit ${PIPESTATUS[0]}", 0, False),
    ],
)
def test_unusable_streams(command: str, status: int, has_message: bool) -> None:
    found, _, errors = shell(f"{SPEAKERNET} {command}")
    assert (found, bool(errors)) == (status, has_message) and "Traceback" not in errors


def test_name_that_the_terminal_cannot_show() -> None:
    command = f"{SPEAKERNET} show-config --given --save_path Ōsaka"
    status, shown, _ = shell(command, PYTHONIOENCODING="ascii")
    assert status == 0 and "\\u014csaka" in shown


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "a/b.pt"), "a/b.pt: No space left on device"),
        (OSError(errno.EROFS, "Read-only file system", "a"), "a: Read-only file system"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "Broken pipe"),
        (MemoryError("2 TiB"), "2 TiB"),
        (RuntimeError("CUDA out of memory. Tried\nGPU 0"), "CUDA out of memory. Tried"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_system_error_is_one_line(
    error: Exception, found: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(arguments) -> int:
        raise error

    monkeypatch.setattr("speakernet.cli.list_components.run", refused)
    assert main(["list"]) == 1
    message = capsys.readouterr().err.strip()
    assert found in message and "\n" not in message
