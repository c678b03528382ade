"""Joining and unpacking archives: intact, interrupted, damaged and hostile ones."""

import errno
import gzip
import hashlib
import io
import os
import shutil
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest

from speakernet.corpora import archives
from speakernet.corpora.archives import ArchiveError, extract, join_pieces
from speakernet.corpora.steps import Folder, StepSummary, UnsafeNameError, checked_relative

pytestmark = pytest.mark.usefixtures("in_tmp_path")
OUT = Path("out")
ODD_NAMES = [
    "a b/c'd\".wav",
    "-y.wav",
    "--help/x.wav",
    "語/é.wav",
    "new\nline.wav",
    "$(touch x);`id`.wav",
    "%03d.wav",
]


def make_zip(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)


def make_tar(path, members):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


KINDS = pytest.mark.parametrize(("make", "kind"), [(make_zip, "a.zip"), (make_tar, "a.tar.gz")])


def unpack(name, **options):
    summary = StepSummary("extract", OUT)
    extract(Path(name), OUT, summary, **options)
    return summary


def tree():
    """The files that were unpacked."""
    files = [path for path in OUT.rglob("*") if path.is_file()]
    return {str(path.relative_to(OUT)): path.read_bytes() for path in files}


@KINDS
def test_members(make, kind):
    members = {
        f"wav/id{speaker}/{row}.wav": bytes([speaker, row]) * 500
        for speaker in range(5)
        for row in range(7)
    }
    members |= {odd: odd.encode() for odd in ODD_NAMES}
    make(kind, members)
    summary = unpack(kind, num_jobs=3)
    assert tree() == members
    assert (summary.made, summary.broken) == (len(members), 0)
    (OUT / "wav/id1/1.wav").write_bytes(b"cut")
    again = unpack(kind, num_jobs=3)
    assert (again.made, again.skipped) == (1, len(members) - 1)
    assert tree() == members
    make(kind, members | {"wav/id0": b"a file and a folder"})
    with pytest.raises(ArchiveError, match="id0"):
        unpack(kind)


@KINDS
@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "a/../../evil",
        "/tmp/evil",
        "..\\evil",
        "C:\\evil",
        "C:/evil",
        "\\\\host\\share\\evil",
        "..",
    ],
)
def test_names_outside_the_folder(tmp_path, make, kind, name):
    make(kind, {"good.wav": b"good", name: b"evil"})
    with pytest.raises(ArchiveError, match="refused"):
        unpack(kind)
    assert list(tmp_path.rglob("*evil*")) == []
    # All names of a zip are checked before the first file is written.
    assert kind != "a.zip" or tree() == {}


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]
)
def test_links_and_devices_in_a_tar(kind):
    with tarfile.open("a.tar", "w") as archive:
        info = tarfile.TarInfo("link")
        info.type = kind
        info.linkname = "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(ArchiveError, match="link"):
        unpack("a.tar")
    assert not (OUT / "link").exists()


def test_links_in_the_target(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    OUT.mkdir()
    (OUT / "wav").symlink_to(outside)
    (OUT / "b.wav").symlink_to(tmp_path / "elsewhere")
    make_zip("a.zip", {"wav/new/1.wav": b"content"})
    with pytest.raises(ArchiveError, match="outside"):
        unpack("a.zip")
    assert list(outside.iterdir()) == []
    with pytest.raises(UnsafeNameError, match="link"):
        Folder(OUT).path("b.wav")


@KINDS
def test_bomb(monkeypatch, make, kind):
    monkeypatch.setattr(archives, "ALWAYS_ALLOWED_BYTES", 1 << 20)
    make(kind, {f"{row}.wav": bytes(1 << 20) for row in range(8)})
    with pytest.raises(ArchiveError, match="would unpack to"):
        unpack(kind)
    assert sum(len(content) for content in tree().values()) <= 2 << 20


def test_truncated_archive_and_other_files():
    os.mkfifo("pipe.zip")
    Path("a.zip").write_bytes(gzip.compress(b"hello"))
    for name in ("pipe.zip", "a.zip"):
        with pytest.raises(ArchiveError, match=name):
            unpack(name)
    make_tar(
        "a.tar.gz",
        {f"{row}.wav": hashlib.sha256(bytes([row])).digest() * 3000 for row in range(9)},
    )
    content = Path("a.tar.gz").read_bytes()
    for keep in (0.5, 0.97):
        Path("a.tar.gz").write_bytes(content[: int(len(content) * keep)])
        with pytest.raises(ArchiveError, match="a"):
            unpack("a.tar.gz")


def raw_zip(path, name, method, packed, size, crc):
    """A zip of one member with an arbitrary header."""
    fields = struct.pack("<HHHHHIIIHH", 20, 0, method, 0, 33, crc, len(packed), size, len(name), 0)
    central = (
        b"PK\1\2" + struct.pack("<H", 20) + fields + struct.pack("<HHHII", 0, 0, 0, 0, 0) + name
    )
    begin = b"PK\3\4" + fields + name + packed
    end = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(begin), 0)
    Path(path).write_bytes(begin + central + end)


@pytest.mark.parametrize(
    "member",
    [
        (8, b"\xff" * 50, 100),  # deflated noise
        (99, b"x" * 50, 100),  # an unknown method
        (14, b"\x09\x14\x05\x00" + b"\xff" * 60, 100),  # broken LZMA
        (0, b"x" * 50, 50),  # a wrong checksum
    ],
)
def test_damaged_member(member):
    raw_zip("a.zip", b"a.wav", *member, 1)
    summary = unpack("a.zip")
    assert summary.broken == 1 and "a.wav" in summary.first_broken[0]
    assert "a.wav" not in tree()


@KINDS
def test_full_disk(monkeypatch, make, kind):
    def fill_up(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    make(kind, {"a.wav": b"x" * 100})
    monkeypatch.setattr(shutil, "copyfileobj", fill_up)
    with pytest.raises(ArchiveError, match=r"a\.wav.*No space left"):
        unpack(kind)
    assert tree() == {}


def test_pieces_are_removed_after_verification(tmp_path):
    contents = [bytes([row]) * 1000 for row in range(4)]
    pieces = [tmp_path / f"whole_parta{letter}" for letter in "abcd"]
    for piece, content in zip(pieces, contents, strict=True):
        piece.write_bytes(content)
    good = hashlib.md5(b"".join(contents)).hexdigest()
    for md5, counts in (("0" * 32, (0, 0, 1)), (good, (1, 0, 0)), (good, (0, 1, 0))):
        summary = StepSummary("concatenate", tmp_path)
        join_pieces(pieces, tmp_path / "whole.zip", md5, summary)
        assert (summary.made, summary.skipped, summary.broken) == counts
        assert all(piece.exists() for piece in pieces) == (md5 != good)
    assert (tmp_path / "whole.zip").read_bytes() == b"".join(contents)


@pytest.mark.parametrize("name", ["a\0b", "", "/", ".", "./", "a/..", "x/../../y"])
def test_unsafe_names(name):
    with pytest.raises(UnsafeNameError):
        checked_relative(name)
