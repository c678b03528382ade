"""Joining and unpacking archives: whole, interrupted, damaged and hostile ones."""

import contextlib
import gzip
import hashlib
import io
import os
import re
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest

from speakernet.corpora import archives
from speakernet.corpora.archives import ArchiveError, extract, join_parts
from speakernet.corpora.safe_paths import Folder, UnsafeNameError, checked_relative
from speakernet.corpora.summary import StepSummary

ODD_NAMES = ["a b/c'd\".wav", "-y.wav", "--help/x.wav", "語/é.wav", "new\nline.wav", "$(touch x);`id`.wav", "%03d.wav"]


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


def unpack(path, folder, **options):
    with StepSummary("extract", folder) as summary:
        extract(path, folder, summary, **options)
    return summary


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("make, name", [(make_zip, "a.zip"), (make_tar, "a.tar.gz")])
def test_members_come_out_whole_and_a_second_run_makes_nothing(tmp_path, make, name):
    members = {f"wav/id{speaker}/{row}.wav": bytes([speaker, row]) * 500 for speaker in range(5) for row in range(7)}
    members |= {odd: odd.encode() for odd in ODD_NAMES}
    make(tmp_path / name, members)
    summary = unpack(tmp_path / name, tmp_path / "out", num_jobs=3)
    assert tree(tmp_path / "out") == members
    assert (summary.made, summary.broken) == (len(members), 0)
    (tmp_path / "out" / "wav/id1/1.wav").write_bytes(b"cut")
    again = unpack(tmp_path / name, tmp_path / "out", num_jobs=3)
    assert (again.made, again.skipped) == (1, len(members) - 1)
    assert tree(tmp_path / "out") == members


@pytest.mark.parametrize("make, archive_name", [(make_zip, "a.zip"), (make_tar, "a.tar.gz")])
@pytest.mark.parametrize(
    "name", ["../evil", "a/../../evil", "/tmp/evil", "..\\evil", "C:\\evil", "C:/evil", "\\\\host\\share\\evil", ".."]
)
def test_names_that_lead_outside_are_refused(tmp_path, make, archive_name, name):
    make(tmp_path / archive_name, {name: b"evil"})
    with pytest.raises(ArchiveError, match="refused"):
        unpack(tmp_path / archive_name, tmp_path / "deep" / "out")
    assert list(tmp_path.rglob("*evil*")) == []


def test_of_a_zip_with_one_evil_name_nothing_is_written(tmp_path):
    make_zip(tmp_path / "a.zip", {"good.wav": b"good", "../evil": b"evil"})
    with pytest.raises(ArchiveError, match="refused"):
        unpack(tmp_path / "a.zip", tmp_path / "out")
    assert tree(tmp_path / "out") == {}


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_a_tar_are_refused(tmp_path, kind):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        info = tarfile.TarInfo("link")
        info.type = kind
        info.linkname = "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(ArchiveError, match="link or a device"):
        unpack(tmp_path / "a.tar", tmp_path / "out")
    assert not (tmp_path / "out" / "link").exists()


def test_links_in_a_zip_are_refused(tmp_path):
    info = zipfile.ZipInfo("link")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(ArchiveError, match="is a link"):
        unpack(tmp_path / "a.zip", tmp_path / "out")


def test_a_link_on_the_way_is_not_followed_out_of_the_folder(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "wav").symlink_to(outside)
    make_zip(tmp_path / "a.zip", {"wav/new/1.wav": b"content"})
    with pytest.raises(ArchiveError, match="outside"):
        unpack(tmp_path / "a.zip", tmp_path / "out")
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("make, name", [(make_zip, "a.zip"), (make_tar, "a.tar.gz")])
def test_a_bomb_is_refused(tmp_path, monkeypatch, make, name):
    monkeypatch.setattr(archives, "ALWAYS_ALLOWED_BYTES", 1 << 20)
    make(tmp_path / name, {f"{row}.wav": bytes(1 << 20) for row in range(8)})
    with pytest.raises(ArchiveError, match="would unpack to"):
        unpack(tmp_path / name, tmp_path / "out")
    assert sum(len(content) for content in tree(tmp_path / "out").values()) <= 2 << 20


def test_a_member_that_holds_more_than_it_declares_is_not_kept(tmp_path):
    make_zip(tmp_path / "a.zip", {"a.wav": b"x" * 5000, "b.wav": b"good"})
    content = bytearray((tmp_path / "a.zip").read_bytes())
    for position in (22, content.index(b"PK\x01\x02") + 24):
        content[position : position + 4] = (1000).to_bytes(4, "little")
    (tmp_path / "a.zip").write_bytes(bytes(content))
    summary = unpack(tmp_path / "a.zip", tmp_path / "out")
    assert (summary.made, summary.broken) == (1, 1)
    assert "a.wav" not in tree(tmp_path / "out")


def test_a_damaged_member_is_listed_and_the_others_come_out(tmp_path):
    members = {f"{row}.wav": bytes(range(256)) * 20 for row in range(3)}
    make_zip(tmp_path / "a.zip", members)
    content = bytearray((tmp_path / "a.zip").read_bytes())
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        offset = archive.getinfo("1.wav").header_offset
    content[offset + 60] ^= 0xFF
    (tmp_path / "a.zip").write_bytes(bytes(content))
    summary = unpack(tmp_path / "a.zip", tmp_path / "out")
    assert (summary.made, summary.broken) == (2, 1)
    assert "1.wav" in summary.broken_path.read_text()


@pytest.mark.parametrize("keep", [0.5, 0.97])
def test_a_cut_archive_is_an_error_that_says_so(tmp_path, keep):
    make_tar(tmp_path / "a.tar.gz", {f"{row}.wav": hashlib.sha256(bytes([row])).digest() * 3000 for row in range(9)})
    content = (tmp_path / "a.tar.gz").read_bytes()
    (tmp_path / "a.tar.gz").write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(ArchiveError, match=r"damaged|neither"):
        unpack(tmp_path / "a.tar.gz", tmp_path / "out")


def raw_zip(path, name, method, packed, size, crc):
    """A zip of one member put together by hand: whatever its header says."""
    fields = struct.pack("<HHHHHIIIHH", 20, 0, method, 0, 33, crc, len(packed), size, len(name), 0)
    central = b"PK\1\2" + struct.pack("<H", 20) + fields + struct.pack("<HHHII", 0, 0, 0, 0, 0) + name
    begin = b"PK\3\4" + fields + name + packed
    end = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(begin), 0)
    path.write_bytes(begin + central + end)


MEMBERS = {
    "deflated noise": (b"a.wav", 8, b"\xff" * 50, 100, 1, "invalid"),
    "unknown method": (b"a.wav", 99, b"x" * 50, 100, 1, "not supported"),
    "broken lzma": (
        b"a.wav",
        14,
        b"\x09\x14\x05\x00" + b"\xff" * 60,
        100,
        1,
        "[Ii]nvalid|[Cc]orrupt",
    ),
    "wrong sum": (b"a.wav", 0, b"x" * 50, 50, 1, "Bad CRC-32"),
}


@pytest.mark.parametrize("kind", MEMBERS)
def test_a_member_that_cannot_be_unpacked_is_named(tmp_path, kind):
    *fields, message = MEMBERS[kind]
    target = tmp_path / "out"
    raw_zip(tmp_path / "a.zip", *fields)
    summary = unpack(tmp_path / "a.zip", target)
    left = tree(target)
    assert summary.broken == 1 and "a.wav" not in left
    assert any(re.search(message, said.decode()) for said in left.values())


def test_an_empty_name_is_refused(tmp_path):
    raw_zip(tmp_path / "a.zip", b"", 0, b"x", 1, zlib.crc32(b"x"))
    with pytest.raises(ArchiveError, match=r"a\.zip: refused: the name '' is empty"):
        unpack(tmp_path / "a.zip", tmp_path / "out")


def test_a_name_that_is_file_and_folder_is_refused(tmp_path):
    make_zip(tmp_path / "a.zip", {"a": b"file", "a/b.wav": b"below it"})
    with pytest.raises(ArchiveError, match=r"a\.zip: refused: 'a' is a file and the folder of 'a/b\.wav'"):
        unpack(tmp_path / "a.zip", tmp_path / "out")
    make_tar(tmp_path / "a.tar.gz", {"a": b"file", "a/b.wav": b"below it"})
    with pytest.raises(ArchiveError, match=r"a/b\.wav: cannot be written .*a folder where a file is there"):
        unpack(tmp_path / "a.tar.gz", tmp_path / "out")


def test_a_damaged_compressed_tar_is_an_archive_error(tmp_path):
    make_tar(tmp_path / "a.tar.gz", {f"{row}.wav": bytes([row]) * 5000 for row in range(50)})
    content = bytearray((tmp_path / "a.tar.gz").read_bytes())
    for position in range(30, len(content), 40):
        broken = content.copy()
        broken[position] ^= 0xFF
        (tmp_path / "b.tar.gz").write_bytes(broken)
        with contextlib.suppress(ArchiveError):
            unpack(tmp_path / "b.tar.gz", tmp_path / f"out{position}")


def test_a_full_disk_is_said_of_the_file_and_not_of_the_archive(tmp_path, monkeypatch):
    make_zip(tmp_path / "a.zip", {"a.wav": b"x" * 100})
    monkeypatch.setattr(archives, "temporary_beside", lambda path: Path("/dev/full"))
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
    with (
        StepSummary("extract", tmp_path / "out") as summary,
        pytest.raises(ArchiveError, match=r"a\.wav: cannot be written \(No space left on device\); free some space"),
    ):
        extract(tmp_path / "a.zip", tmp_path / "out", summary)


def test_a_pipe_is_no_archive(tmp_path):
    os.mkfifo(tmp_path / "a.zip")
    with pytest.raises(ArchiveError, match=r"a\.zip: not a regular file but a pipe"):
        unpack(tmp_path / "a.zip", tmp_path / "out")


def test_what_is_no_archive_is_refused(tmp_path):
    (tmp_path / "a.zip").write_bytes(gzip.compress(b"hello"))
    with pytest.raises(ArchiveError, match="neither a zip nor a tar"):
        unpack(tmp_path / "a.zip", tmp_path / "out")


def test_parts_are_joined_in_order_and_removed_only_once_verified(tmp_path):
    contents = [bytes([row]) * 1000 for row in range(4)]
    parts = [tmp_path / f"whole_parta{letter}" for letter in "abcd"]
    for part, content in zip(parts, contents, strict=True):
        part.write_bytes(content)
    good = hashlib.md5(b"".join(contents)).hexdigest()
    with StepSummary("concatenate", tmp_path) as summary:
        join_parts(parts, tmp_path / "whole.zip", "0" * 32, summary)
    assert summary.broken == 1
    assert all(part.exists() for part in parts)
    assert not (tmp_path / "whole.zip").exists()
    with StepSummary("concatenate", tmp_path) as summary:
        join_parts(parts, tmp_path / "whole.zip", good, summary)
    assert (tmp_path / "whole.zip").read_bytes() == b"".join(contents)
    assert not any(part.exists() for part in parts)
    with StepSummary("concatenate", tmp_path) as summary:
        join_parts(parts, tmp_path / "whole.zip", good, summary)
    assert (summary.made, summary.skipped, summary.broken) == (0, 1, 0)


def test_missing_parts_are_named(tmp_path):
    with StepSummary("concatenate", tmp_path) as summary:
        join_parts([tmp_path / "partaa"], tmp_path / "whole.zip", None, summary)
    assert "partaa" in summary.broken_path.read_text()


@pytest.mark.parametrize("name", ["a\0b", "", "/", ".", "./", "a/..", "x/../../y"])
def test_unsafe_names(name):
    with pytest.raises(UnsafeNameError):
        checked_relative(name)


def test_a_target_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.wav").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeNameError, match="is a link"):
        Folder(tmp_path / "out").path("a.wav")
