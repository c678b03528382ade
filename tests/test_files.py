"""Files: whatever is wrong with one becomes an error that names it, at once; shares of work in parts."""

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from speakernet.files import (
    FileError,
    PartError,
    WorkPart,
    list_parts,
    missing_parts,
    open_regular,
    open_text,
    parse_part,
    parts_in,
    read_arrays,
    reading,
    share,
)


class OwnError(FileError):
    """The error of a package."""


ERRORS = [
    KeyError("name"),
    MemoryError(),
    RecursionError("deep"),
    TypeError("None"),
    IndexError(3),
    zipfile.BadZipFile(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_every_error_of_a_reader(error: Exception) -> None:
    message = rf"^my\.csv: .*{type(error).__name__}.*; expected a table"
    with pytest.raises(OwnError, match=message) as caught, reading("my.csv", "a table of two columns", OwnError):
        raise error
    assert caught.value.__cause__ is error


def test_errors_of_system_and_text(tmp_path: Path) -> None:
    message = r"absent: cannot be read \(No such file or directory\); expected a list"
    with pytest.raises(OwnError, match=message), reading(tmp_path / "absent", "a list", OwnError):
        open_text(tmp_path / "absent")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    message = r"latin: not UTF-8 text \(byte 3\); expected a list"
    with pytest.raises(OwnError, match=message), reading(tmp_path / "latin", "a list", OwnError):
        open_text(tmp_path / "latin").read()


def test_own_errors_keep_their_message() -> None:
    with pytest.raises(OwnError, match=r"^line 3 of my list$"), reading("x", "y", OwnError):
        raise FileError("line 3 of my list")
    with pytest.raises(OwnError, match=r"^line 3 of my list$"), reading("x", "y", FileError):
        raise OwnError("line 3 of my list")
    with pytest.raises(KeyboardInterrupt), reading("x", "y"):
        raise KeyboardInterrupt


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FileError, match="fifo: not a regular file but a pipe"):
        open_regular(tmp_path / "fifo")
    with pytest.raises(FileError, match="/dev/zero: not a regular file but a device"):
        open_text("/dev/zero")
    with pytest.raises(OwnError, match="Is a directory"), reading(tmp_path, "a file", OwnError):
        open_regular(tmp_path)


def npz(path: Path, header: str, content: bytes = b"", *, compression: int = zipfile.ZIP_STORED) -> Path:
    text = header.ljust(117).encode() + b"\n"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("a.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + content)
    return path


def test_arrays(tmp_path: Path) -> None:
    arrays = {"a": np.arange(5), "b": np.array(["x", "yz"]), "c": np.zeros((2, 0)), "d": np.array("word")}
    for name, write in (("stored", np.savez), ("packed", np.savez_compressed)):
        write(tmp_path / name, **arrays)
        found = read_arrays(tmp_path / f"{name}.npz", "arrays")
        assert list(found) == list(arrays)
        assert all(np.array_equal(found[one], arrays[one]) and found[one].dtype == arrays[one].dtype for one in arrays)


CLAIMS = {
    "size": ("{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000,), }", "claims 8,000,000,000,000 bytes"),
    "objects": ("{'descr': '|O', 'fortran_order': False, 'shape': (3,), }", "Object arrays cannot be loaded"),
    "header": ("{'descr': '<i8', 'fortran_order': False, 'shape': (3", "TokenError"),
    "negative": ("{'descr': '<i8', 'fortran_order': False, 'shape': (-1,), }", "claims -8 bytes"),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_false_claims_of_arrays(name: str, tmp_path: Path) -> None:
    header, message = CLAIMS[name]
    with pytest.raises(OwnError, match=f"my.npz: .*{message}.*; expected arrays"):
        read_arrays(npz(tmp_path / "my.npz", header, b"\0" * 24), "arrays", OwnError)


def test_a_flipped_byte(tmp_path: Path) -> None:
    np.savez(tmp_path / "my.npz", a=np.arange(1000))
    content = bytearray((tmp_path / "my.npz").read_bytes())
    content[2000] ^= 1
    (tmp_path / "my.npz").write_bytes(content)
    with pytest.raises(FileError, match="Bad CRC-32"):
        read_arrays(tmp_path / "my.npz", "arrays")


@given(some.integers(0, 200), some.integers(1, 40))
def test_parts_make_the_whole(num_rows: int, count: int) -> None:
    shares = [share(range(num_rows), number, count) for number in range(1, count + 1)]
    assert [row for one in shares for row in one] == list(range(num_rows))
    sizes = {len(one) for one in shares}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("text", ["3/2", "0/4", "1/0", "2", "-1/4", "1/4/2", "", "99999999999999999999/4"])
def test_bad_parts(text: str) -> None:
    with pytest.raises(PartError):
        parse_part(text)


def test_names_of_parts(tmp_path: Path) -> None:
    for name in ("part-0002-of-0003.npz", "part-0001-of-0003.npz", "part-0003-of-0003", "other.npz"):
        (tmp_path / name).touch()
    found = list(parts_in(tmp_path, ".npz"))
    assert found == [WorkPart(1, 3), WorkPart(2, 3)]
    assert list_parts(missing_parts(found, tmp_path)) == "3/3"
    assert parts_in(tmp_path / "nothing") == {}


def test_parts_of_different_numbers() -> None:
    with pytest.raises(PartError):
        missing_parts([WorkPart(1, 3), WorkPart(2, 4)], "corpus")


def test_many_missing_parts() -> None:
    assert list_parts([WorkPart(one, 30) for one in range(1, 31)]).endswith("20/30 and 10 more")
