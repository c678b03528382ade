"""Files that grow: whole pieces, dropped with one word on a full disk, taken up again when there is room."""

import errno
import logging
import os
from pathlib import Path

import pytest

from speakernet import files
from speakernet.cli.train import _log_file
from speakernet.files import GrowingFile


def test_pieces_follow_each_other_and_the_folder_is_made_with_the_first(tmp_path: Path) -> None:
    file = GrowingFile(tmp_path / "run" / "log.txt")
    assert not (tmp_path / "run").exists()
    assert file.append(b"one\n") and file.append(b"two\n")
    assert (tmp_path / "run" / "log.txt").read_bytes() == b"one\ntwo\n"
    file.close()
    assert file.append(b"three\n") and (tmp_path / "run" / "log.txt").read_bytes().endswith(b"two\nthree\n")


def test_a_full_disk_is_said_once_and_half_a_line_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = GrowingFile(tmp_path / "log.txt")
    file.append(b"one\n")

    class Full:
        """The open file on a disk with room for three bytes more."""

        def __init__(self, inner) -> None:
            self.inner, self.room = inner, 3

        def write(self, content) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            taken, self.room = min(self.room, len(content)), 0
            return self.inner.write(content[:taken])

        def __getattr__(self, name):
            return getattr(self.inner, name)

    monkeypatch.setattr(file, "_file", Full(file._file))
    assert not file.append(b"two\n")
    assert (tmp_path / "log.txt").read_bytes() == b"one\n"
    (tmp_path / "log.txt").rename(tmp_path / "old.txt")
    (tmp_path / "log.txt").mkdir()
    assert not file.append(b"three\n")
    (tmp_path / "log.txt").rmdir()
    assert file.append(b"four\n") and (tmp_path / "log.txt").read_bytes() == b"four\n"
    assert caplog.text.count("cannot be written") == 1 and os.strerror(errno.ENOSPC) in caplog.text


def test_a_log_on_a_full_device_is_dropped_and_the_rest_goes_on(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this platform")
    with _log_file(Path("/dev/full")):
        for number in range(3):
            logging.getLogger(files.__name__).warning("line %d", number)
    assert caplog.text.count("/dev/full cannot be written") == 1 and "line 2" in caplog.text
    assert "Traceback" not in capsys.readouterr().err
