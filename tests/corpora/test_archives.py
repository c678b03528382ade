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

import pytest

from speakernet.corpora import archives
from speakernet.corpora.archives import ArchiveError, extract, join_pieces
from speakernet.corpora.steps import Folder, StepSummary, UnsafeNameError, checked_relative

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


def unpack(path, folder, **options):
    summary = StepSummary("extract", folder)
    extract(path, folder, summary, **options)
    return summary


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@KINDS
def test_members(tmp_path, make, kind):
    members = {
        f"wav/id{speaker}/{row}.wav": bytes([speaker, row]) * 500
        for speaker in range(5)
        for row in range(7)
    }
    members |= {odd: odd.encode() for odd in ODD_NAMES}
    make(tmp_path / kind, members | {"wav/id0": b"a file and a folder"})
    with pytest.raises(ArchiveError, match="id0"):
        unpack(tmp_path / kind, tmp_path / "both")
    make(tmp_path / kind, members)
    summary = unpack(tmp_path / kind, tmp_path / "out", num_jobs=3)
    assert tree(tmp_path / "out") == members
    assert (summary.made, summary.broken) == (len(members), 0)
    (tmp_path / "out" / "wav/id1/1.wav").write_bytes(b"cut")
    again = unpack(tmp_path / kind, tmp_path / "out", num_jobs=3)
    assert (again.made, again.skipped) == (1, len(members) - 1)
    assert tree(tmp_path / "out") == members


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
    make(tmp_path / kind, {"good.wav": b"good", name: b"evil"})
    with pytest.raises(ArchiveError, match="refused"):
        unpack(tmp_path / kind, tmp_path / "deep" / "out")
    assert list(tmp_path.rglob("*evil*")) == []
    # All names of a zip are checked before the first file is written.
    assert kind != "a.zip" or tree(tmp_path / "deep" / "out") == {}


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]
)
def test_links_and_devices_in_a_tar(tmp_path, kind):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        info = tarfile.TarInfo("link")
        info.type = kind
        info.linkname = "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(ArchiveError, match="link"):
        unpack(tmp_path / "a.tar", tmp_path / "out")
    assert not (tmp_path / "out" / "link").exists()


def test_links_in_the_target(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "wav").symlink_to(outside)
    (tmp_path / "out" / "b.wav").symlink_to(tmp_path / "elsewhere")
    make_zip(tmp_path / "a.zip", {"wav/new/1.wav": b"content"})
    with pytest.raises(ArchiveError, match="outside"):
        unpack(tmp_path / "a.zip", tmp_path / "out")
    assert list(outside.iterdir()) == []
    with pytest.raises(UnsafeNameError, match="link"):
        Folder(tmp_path / "out").path("b.wav")


@KINDS
def test_bomb(tmp_path, monkeypatch, make, kind):
    monkeypatch.setattr(archives, "ALWAYS_ALLOWED_BYTES", 1 << 20)
    make(tmp_path / kind, {f"{row}.wav": bytes(1 << 20) for row in range(8)})
    with pytest.raises(ArchiveError, match="would unpack to"):
        unpack(tmp_path / kind, tmp_path / "out")
    assert sum(len(content) for content in tree(tmp_path / "out").values()) <= 2 << 20


def test_truncated_archive_and_other_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.zip")
    (tmp_path / "a.zip").write_bytes(gzip.compress(b"hello"))
    for name in ("pipe.zip", "a.zip"):
        with pytest.raises(ArchiveError, match=name):
            unpack(tmp_path / name, tmp_path / "out")
    make_tar(
        tmp_path / "a.tar.gz",
        {f"{row}.wav": hashlib.sha256(bytes([row])).digest() * 3000 for row in range(9)},
    )
    content = (tmp_path / "a.tar.gz").read_bytes()
    for keep in (0.5, 0.97):
        (tmp_path / "a.tar.gz").write_bytes(content[: int(len(content) * keep)])
        with pytest.raises(ArchiveError, match="a"):
            unpack(tmp_path / "a.tar.gz", tmp_path / "out")


def raw_zip(path, name, method, packed, size, crc):
    """A zip of one member with an arbitrary header."""
    fields = struct.pack("<HHHHHIIIHH", 20, 0, method, 0, 33, crc, len(packed), size, len(name), 0)
    central = (
        b"PK\1\2" + struct.pack("<H", 20) + fields + struct.pack("<HHHII", 0, 0, 0, 0, 0) + name
    )
    begin = b"PK\3\4" + fields + name + packed
    end = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(begin), 0)
    path.write_bytes(begin + central + end)


@pytest.mark.parametrize(
    "member",
    [
        (8, b"\xff" * 50, 100),  # deflated noise
        (99, b"x" * 50, 100),  # an unknown method
        (14, b"\x09\x14\x05\x00" + b"\xff" * 60, 100),  # broken LZMA
        (0, b"x" * 50, 50),  # a wrong checksum
    ],
)
def test_damaged_member(tmp_path, member):
    raw_zip(tmp_path / "a.zip", b"a.wav", *member, 1)
    summary = unpack(tmp_path / "a.zip", tmp_path / "out")
    assert summary.broken == 1 and "a.wav" in summary.first_broken[0]
    assert "a.wav" not in tree(tmp_path / "out")


@KINDS
def test_full_disk(tmp_path, monkeypatch, make, kind):
    def fill_up(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    make(tmp_path / kind, {"a.wav": b"x" * 100})
    monkeypatch.setattr(shutil, "copyfileobj", fill_up)
    with pytest.raises(ArchiveError, match=r"a\.wav.*No space left"):
        unpack(tmp_path / kind, tmp_path / "out")
    assert tree(tmp_path / "out") == {}


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
