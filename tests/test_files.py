"""Files and foundations: errors that name a file, appended files, shards, the run folder, tables,
seeds.
"""

import ast
import logging
import os
import resource
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from speakernet import files, run_folder
from speakernet import random as seeding
from speakernet.cli.train import _log_file
from speakernet.data import parts
from speakernet.run_folder import lock_folder, refuse_unusable
from tests.commands import run_command


class OwnError(files.FileError):
    """The error of a package."""


# With what the message shows of the error.
ERRORS = {
    KeyError(105): "kind",
    MemoryError(): r"\(MemoryError\)",
    RecursionError("deep"): r"\(deep\)",
    TypeError("None"): "kind",
    zipfile.BadZipFile(): r"\(BadZipFile\)",
}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_every_error_of_a_reader(error):
    message = rf"^my\.csv: .*{ERRORS[error]}; expected a table"
    with (
        pytest.raises(OwnError, match=message) as caught,
        files.reading("my.csv", "a table of two columns", OwnError),
    ):
        raise error
    assert caught.value.__cause__ is error


def test_errors_of_system_and_text(tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    for name, reason in (("absent", "no such file"), ("latin", "position 3")):
        message = f"{name}: .*{reason}.*; expected a list"
        with (
            pytest.raises(OwnError, match=message),
            files.reading(tmp_path / name, "a list", OwnError),
        ):
            files.open_text(tmp_path / name).read()


def test_own_errors_keep_their_message():
    for raised, kind in ((files.FileError, OwnError), (OwnError, files.FileError)):
        with pytest.raises(OwnError, match=r"^line 3 of my list$"), files.reading("x", "y", kind):
            raise raised("line 3 of my list")
    with pytest.raises(KeyboardInterrupt), files.reading("x", "y"):
        raise KeyboardInterrupt


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(files.FileError, match=f"{path} is a .*expected a file"):
            files.open_regular(path)


def npz(path, header, content):
    text = header.ljust(117).encode() + b"\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "a.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + content
        )
    return path


def test_arrays(tmp_path):
    arrays = {
        "a": np.arange(5),
        "b": np.array(["x", "yz"]),
        "c": np.zeros((2, 0)),
        "d": np.array("word"),
    }
    for write in (np.savez, np.savez_compressed):
        write(tmp_path / "a.npz", **arrays)
        found = files.read_arrays(tmp_path / "a.npz", "arrays")
        assert list(found) == list(arrays)
        for name, expected in arrays.items():
            np.testing.assert_array_equal(found[name], expected)
            assert found[name].dtype == expected.dtype


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ("'<i8', 'shape': (1000000000000,)", "claims 8,000,000,000,000 bytes and has 24"),
        ("'<i8', 'shape': (4,)", "claims 32 bytes and has 24"),
        ("'|O', 'shape': (3,)", "Object arrays cannot be loaded"),
        ("'<i8', 'shape': (3", "EOF in multi-line"),
        ("'<i8', 'shape': (-1,)", "claims -8 bytes"),
    ],
)
def test_arrays_with_false_sizes(claim, message, tmp_path):
    header = f"{{'fortran_order': False, 'descr': {claim}, }}"
    with pytest.raises(OwnError, match=rf"my\.npz: .*{message}.*; expected arrays"):
        files.read_arrays(npz(tmp_path / "my.npz", header, b"\0" * 24), "arrays", OwnError)


def test_member_larger_than_its_file(tmp_path):
    header = "{'fortran_order': False, 'descr': '<i8', 'shape': (500000000,), }"
    path = npz(tmp_path / "my.npz", header, b"\0" * 24)
    content = bytearray(path.read_bytes())
    # The two sizes in the directory at the end.
    directory = content.index(b"PK\x01\x02")
    content[directory + 20 : directory + 28] = 2 * (128 + 8 * 500_000_000).to_bytes(4, "little")
    path.write_bytes(content)
    message = r"my\.npz: .*claims 4,000,000,128 bytes, more than the file can hold"
    with pytest.raises(files.FileError, match=message):
        files.read_arrays(path, "arrays")


def test_incomplete_line_is_removed(tmp_path, caplog):
    file = run_folder.GrowingFile(tmp_path / "log.txt")
    assert file.append(b"one\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (7, before[1]))
    try:
        assert not file.append(b"two\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "log.txt").read_bytes() == b"one\n"
    (tmp_path / "log.txt").rename(tmp_path / "old.txt")
    (tmp_path / "log.txt").mkdir()
    assert not file.append(b"three\n")
    (tmp_path / "log.txt").rmdir()
    assert file.append(b"four\n") and (tmp_path / "log.txt").read_bytes() == b"four\n"
    assert caplog.text.count("cannot be written") == 1


def test_a_log_on_a_full_device(caplog, capsys):
    with _log_file(Path("/dev/full")):
        for number in range(3):
            logging.getLogger(files.__name__).warning("line %d", number)
    assert caplog.text.count("/dev/full cannot be written") == 1 and "line 2" in caplog.text
    assert "Traceback" not in capsys.readouterr().err


@given(some.integers(0, 200), some.integers(1, 40))
def test_parts_make_the_whole(num_rows, count):
    shares = [parts.share(range(num_rows), number, count) for number in range(1, count + 1)]
    assert [row for share in shares for row in share] == list(range(num_rows))
    sizes = {len(share) for share in shares}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    "text", ["3/2", "0/4", "1/0", "2", "-1/4", "1/4/2", "", "99999999999999999999/4"]
)
def test_bad_parts(text):
    with pytest.raises(parts.PartError):
        parts.parse_part(text)


def test_names_of_parts(tmp_path):
    names = "part-0002-of-0003.npz part-0001-of-0003.npz part-0003-of-0003 other.npz"
    for name in names.split():
        (tmp_path / name).touch()
    found = list(parts.parts_in(tmp_path, ".npz"))
    assert found == [parts.WorkPart(1, 3), parts.WorkPart(2, 3)]
    assert parts.list_parts(parts.missing_parts(found, tmp_path)) == "3/3"
    assert parts.parts_in(tmp_path / "nothing") == {}
    with pytest.raises(parts.PartError):
        parts.missing_parts([parts.WorkPart(1, 3), parts.WorkPart(2, 4)], "corpus")
    many = [parts.WorkPart(number, 30) for number in range(1, 31)]
    assert parts.list_parts(many).endswith("20/30 and more")


def test_keyed_generators():
    first = seeding.numpy_generator(1, 2, 3).random(4)
    assert np.array_equal(first, seeding.numpy_generator(1, 2, 3).random(4))
    for others in ((1, 2, 4), (1, 3, 2), (2, 2, 3), (1, 2)):
        assert not np.array_equal(first, seeding.numpy_generator(*others).random(4))
    seeds = {seeding.derive_seed(seed, key) for seed in range(3) for key in range(3)}
    assert len(seeds) == 9 and all(0 <= seed < 1 << 63 for seed in seeds)


def test_atomic_write_replaces_files_only(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to("/dev/null")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "null", "folder"):
        with pytest.raises(files.FileError, match=name), files.atomic_write(tmp_path / name):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "null", "pipe"]


def test_atomic_write_keeps_the_old_file_when_it_fails(tmp_path):
    target = tmp_path / "file.txt"
    with files.atomic_write(target) as file:
        file.write("old")
    with pytest.raises(RuntimeError), files.atomic_write(target) as file:
        file.write("half")
        raise RuntimeError("interrupted")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


LOCKED = """
import sys
from speakernet.run_folder import lock_folder
with lock_folder(sys.argv[1]):
    print("held", flush=True)
    input()
"""


def test_lock_of_another_process(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", LOCKED, tmp_path], **pipes)
    process.stdout.readline()
    # A refusal does not change the holder's name in the file.
    for _ in range(2):
        with pytest.raises(ValueError, match=f"process {process.pid} on "), lock_folder(tmp_path):
            raise AssertionError("it was held twice")
    process.kill()
    process.communicate()
    with lock_folder(tmp_path):
        pass


def test_one_reader_and_writer(repository):
    calls = {
        path.name
        for path in (repository / "speakernet").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save")
    }
    assert calls == {"checkpoint.py"}


def test_unusable_folders(tmp_path, monkeypatch, capsys):
    """Refused before anything is read or created."""
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "a" / "b"):
        with pytest.raises(ValueError, match=rf"save_path: {folder} .*a file"):
            refuse_unusable(folder)
        run_command(f"train --save_path {folder} --train_list nowhere.txt", 1)
        error = capsys.readouterr().err
        assert str(folder) in error and "nowhere" not in error
    refuse_unusable(tmp_path / "a" / "b")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="read-only"):
        refuse_unusable(tmp_path / "a" / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batch_size: 010", "010 has a leading zero"),
        ("rates: [1, -007]", "-007 has a leading zero"),
        ("batch_size: 1:30", "1:30 would be a number to base 60"),
        ("date: !!timestamp x", "'x' is not a valid timestamp"),
        ("date: 2026-13-45", "'2026-13-45' is not a valid timestamp"),
        ("deep: [{rate: !!int y}]", "'y' is not a valid int"),
        ("stages: &s [*s]", r"\*s is inside &s"),
        ("a: &x {b: [1, {c: *x}]}", r"\*x is inside &x"),
    ],
)
def test_values_that_yaml_misreads(text, words):
    with pytest.raises(files.FileError, match=f"my.yaml.*{words}") as refused:
        files.read_yaml(text, "my.yaml")
    assert "object has no attribute" not in str(refused.value)


def test_leading_zeros_of_text_and_fractions():
    values = files.read_yaml("{name: '010', rate: 0.5, none: 0, id: 0x1f}", "here")
    assert values == {"name": "010", "rate": 0.5, "none": 0, "id": 31}
