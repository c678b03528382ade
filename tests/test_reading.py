"""The doors to files: whatever is wrong with one becomes an error that names it, at once."""

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from speakernet.arrays import read_arrays
from speakernet.files import FileError, open_regular, open_text, reading


class RoomError(FileError):
    """The error of a room."""


ERRORS = [
    KeyError("name"),
    MemoryError(),
    RecursionError("deep"),
    TypeError("None"),
    IndexError(3),
    zipfile.BadZipFile(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_every_error_of_a_reader_names_the_file_and_what_is_expected(error: Exception) -> None:
    message = rf"^my\.csv: .*{type(error).__name__}.*; expected a table"
    with pytest.raises(RoomError, match=message) as caught, reading("my.csv", "a table of two columns", RoomError):
        raise error
    assert caught.value.__cause__ is error


def test_errors_of_the_system_and_of_text_are_said_in_words(tmp_path: Path) -> None:
    message = r"absent: cannot be read \(No such file or directory\); expected a list"
    with pytest.raises(RoomError, match=message), reading(tmp_path / "absent", "a list", RoomError):
        open_text(tmp_path / "absent")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    message = r"latin: not UTF-8 text \(byte 3\); expected a list"
    with pytest.raises(RoomError, match=message), reading(tmp_path / "latin", "a list", RoomError):
        open_text(tmp_path / "latin").read()


def test_errors_that_name_the_file_already_keep_their_words() -> None:
    with pytest.raises(RoomError, match=r"^line 3 of my list$"), reading("x", "y", RoomError):
        raise FileError("line 3 of my list")
    with pytest.raises(RoomError, match=r"^line 3 of my list$"), reading("x", "y", FileError):
        raise RoomError("line 3 of my list")
    with pytest.raises(KeyboardInterrupt), reading("x", "y"):
        raise KeyboardInterrupt


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FileError, match="fifo: not a regular file but a pipe"):
        open_regular(tmp_path / "fifo")
    with pytest.raises(FileError, match="/dev/zero: not a regular file but a device"):
        open_text("/dev/zero")
    with pytest.raises(RoomError, match="Is a directory"), reading(tmp_path, "a file", RoomError):
        open_regular(tmp_path)


def npz(path: Path, header: str, content: bytes = b"", *, compression: int = zipfile.ZIP_STORED) -> Path:
    text = header.ljust(117).encode() + b"\n"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("a.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + content)
    return path


def test_arrays_are_what_was_written(tmp_path: Path) -> None:
    arrays = {"a": np.arange(5), "b": np.array(["x", "yz"]), "c": np.zeros((2, 0)), "d": np.array("word")}
    for name, write in (("stored", np.savez), ("packed", np.savez_compressed)):
        write(tmp_path / name, **arrays)
        found = read_arrays(tmp_path / f"{name}.npz", "arrays")
        assert list(found) == list(arrays)
        assert all(np.array_equal(found[one], arrays[one]) and found[one].dtype == arrays[one].dtype for one in arrays)


CLAIMS = {
    "size": ("{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000,), }", "claims 8,000,000,000,000 bytes"),
    "objects": ("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", "holds Python objects"),
    "header": ("{'descr': '<i8', 'fortran_order': False, 'shape': (3", "damaged or of another kind"),
    "negative": ("{'descr': '<i8', 'fortran_order': False, 'shape': (-1,), }", "claims -8 bytes"),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_what_an_array_claims_is_checked_before_memory_is_taken(name: str, tmp_path: Path) -> None:
    header, message = CLAIMS[name]
    with pytest.raises(RoomError, match=f"my.npz: .*{message}.*; expected arrays"):
        read_arrays(npz(tmp_path / "my.npz", header, b"\0" * 24), "arrays", RoomError)


def test_a_flipped_byte_of_an_array_is_found(tmp_path: Path) -> None:
    np.savez(tmp_path / "my.npz", a=np.arange(1000))
    content = bytearray((tmp_path / "my.npz").read_bytes())
    content[2000] ^= 1
    (tmp_path / "my.npz").write_bytes(content)
    with pytest.raises(FileError, match="Bad CRC-32"):
        read_arrays(tmp_path / "my.npz", "arrays")
