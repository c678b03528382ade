"""Archives in pieces, joined or read as one; zip and tar unpacked safely and in parallel.

Archives are untrusted: every name is checked, and links, devices and archives that unpack to far
more than their size are refused. A file gets its final name when it is complete.
"""

import bisect
import io
import itertools
import re
import shutil
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from speakernet.corpora.download import has_md5, remember_md5
from speakernet.corpora.steps import Folder, StepSummary, check_space
from speakernet.files import (
    FileError,
    atomic_write,
    digest_of,
    error_line,
    human_bytes,
    open_regular,
    parallel_map,
    reading,
    temporary_beside,
    writing,
)
from speakernet.terminal import Bar

BLOCK_BYTES = 1 << 20
BUFFER_BYTES = 1 << 18
#: Recorded speech packs to a third at best, silence to a thousandth; a genuine corpus stays far
# below this ratio.
MAX_RATIO = 100
#: Archives that unpack to less are harmless at any ratio.
ALWAYS_ALLOWED_BYTES = 256 << 20
ADVICE = "free some space or unpack into an empty folder"
#: Names of pieces: `vox1_dev_wav_partaa`, `corpus.part1`, `corpus.zip.001`.
PIECE = re.compile(r"^(?P<stem>.*?)(?:[._-]?part[._-]?[a-z]{1,2}|[._-]?part[._-]?\d+|\.\d{3})$")


class ArchiveError(FileError):
    """An archive that is damaged or unsafe."""


def group_pieces(paths: Sequence[Path]) -> list[list[Path]]:
    """Group paths into archives, in order of first mention; the pieces of one archive are sorted.

    >>> pieces = [Path("a_partab"), Path("b.zip"), Path("a_partaa")]
    >>> [[path.name for path in group] for group in group_pieces(pieces)]
    [['a_partaa', 'a_partab'], ['b.zip']]
    """
    groups: dict[Path, list[Path]] = {}
    for path in paths:
        match = PIECE.match(path.name)
        # No file is named like the second.
        archive = path.parent / match["stem"] / "pieces" if match else path
        groups.setdefault(archive, []).append(path)
    return [sorted(group) for group in groups.values()]


def open_pieces(paths: Sequence[Path]) -> io.BufferedReader:
    """Open several files for reading as one."""
    return io.BufferedReader(_JoinedFile(paths), BUFFER_BYTES)


# zipfile and tarfile need one seekable file. Without this, the pieces would first have to be joined
# on the disk, which takes as much space and time as a second copy of the corpus.
class _JoinedFile(io.RawIOBase):
    def __init__(self, paths: Sequence[Path]) -> None:
        self._files = [open_regular(path) for path in paths]
        self._starts = [0, *itertools.accumulate(path.stat().st_size for path in paths)]
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + (0, self._position, self._starts[-1])[whence]
        if position < 0:
            raise OSError(f"cannot seek to byte {position}")
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        # At most to the end of a piece: the buffered reader around this asks for the rest.
        number = bisect.bisect_right(self._starts, self._position) - 1
        if number == len(self._files):
            return 0
        self._files[number].seek(self._position - self._starts[number])
        count = self._files[number].readinto(buffer)  # type: ignore[attr-defined]
        self._position += count
        return count

    def close(self) -> None:
        for file in self._files:
            file.close()
        super().close()


def join_pieces(
    pieces: Sequence[Path],
    whole: Path,
    md5: str | None,
    summary: StepSummary,
    keep_pieces: bool = False,
) -> None:
    """Join pieces into the whole archive, and remove the pieces only once the whole is verified.

    If a verified whole already exists, only leftover pieces are removed.
    """
    # After a kill, pieces and whole may both be there; then the pieces only have to be removed.
    if has_md5(whole, md5):
        summary.add(skipped=1)
    else:
        problem = _join(pieces, whole, md5)
        if problem:
            summary.add_broken(whole.name, problem)
            return
        summary.add(made=1)
    if not keep_pieces:
        for piece in pieces:
            piece.unlink(missing_ok=True)


def _join(pieces: Sequence[Path], whole: Path, md5: str | None) -> str:
    """Write the whole archive and verify it; returns why that failed, or nothing."""
    missing = [piece.name for piece in pieces if not piece.is_file()]
    if missing:
        return f"pieces are missing: {', '.join(missing)}; run --download first"
    num_bytes = sum(piece.stat().st_size for piece in pieces)
    # The pieces are kept until the checksum is verified, so both are on the disk for a while.
    check_space(whole.parent, num_bytes)
    half = temporary_beside(whole)
    bar = Bar(f"join {whole.name}", num_bytes, "B")
    with bar, atomic_write(half, "wb") as output, open_pieces(pieces) as source:
        while block := source.read(BLOCK_BYTES):
            output.write(block)
            bar.update(len(block))
    joined_md5 = digest_of(half, "md5")
    if md5 not in (None, joined_md5):
        half.unlink()
        return f"MD5 of the joined pieces is {joined_md5}, expected {md5}; the pieces are kept"
    half.replace(whole)
    remember_md5(whole, joined_md5)
    return ""


def extract(archive: Path, folder: str | Path, summary: StepSummary, num_jobs: int = 1) -> None:
    """Unpack a zip or tar archive into `folder`; members that already exist with the right size are
    skipped.

    A zip is unpacked by `num_jobs` threads; a compressed tar is one stream.
    """
    target = Folder(folder)
    with reading(
        archive, "a complete zip or tar archive whose files stay in its folder", ArchiveError
    ):
        open_regular(archive).close()
        if zipfile.is_zipfile(archive):
            _extract_zip(archive, target, summary, num_jobs)
        else:
            _extract_tar(archive, target, summary)


def zip_members(archive: zipfile.ZipFile, path: Path) -> list[zipfile.ZipInfo]:
    """The files in an open zip; ArchiveError if their total size is too large."""
    members = [member for member in archive.infolist() if not (member.filename and member.is_dir())]
    _check_size(path, sum(member.file_size for member in members))
    return members


# Nothing in an archive is believed. A name may climb out of the folder, a link may point anywhere,
# a few kilobytes may unpack to a full disk; `Folder.path`, the test for regular files and
# `_check_size` stop each of them before the first byte is written. An archive of links is refused
# as a whole rather than without them: recordings of a corpus are files.
def tar_members(archive: tarfile.TarFile, path: Path | str) -> Iterator[tarfile.TarInfo]:
    """The files in an open tar archive; ArchiveError for a link or a device."""
    while (member := archive.next()) is not None:
        if not member.isdir():
            if not member.isreg() or member.issparse():
                raise ArchiveError(
                    f"{path}: refused: {member.name!r} is a link or a device; expected files only"
                )
            yield member
        # tarfile keeps every header it has seen: a gigabyte for a million files.
        archive.members = []  # type: ignore[attr-defined]


def _extract_zip(path: Path, folder: Folder, summary: StepSummary, num_jobs: int) -> None:
    with zipfile.ZipFile(path) as archive:
        # All names are checked before the first file is written.
        missing = []
        for member in zip_members(archive, path):
            target = folder.path(member.filename)
            if _is_there(target, member.file_size):
                summary.add(skipped=1)
            else:
                missing.append((member, target))
        # Checked for all members together, so that a disk that is too small is not filled first.
        check_space(folder.root, sum(member.file_size for member, _ in missing))

        def take(item: tuple[zipfile.ZipInfo, Path]) -> None:
            member, target = item
            try:
                output = atomic_write(target, "wb", is_flushed=False)
                with archive.open(member) as source, writing(target, ADVICE), output as file:
                    shutil.copyfileobj(source, file, BLOCK_BYTES)
            except FileError:
                raise
            except Exception as error:
                # A damaged member, or an unknown compression: zipfile raises whatever its parsers
                # raise.
                summary.add_broken(member.filename, error_line(error))
            else:
                summary.add(made=1)

        list(parallel_map(take, missing, num_jobs, f"extract {path.name}", total=len(missing)))


def _extract_tar(path: Path, folder: Folder, summary: StepSummary) -> None:
    num_bytes = 0
    # Stream mode keeps no table of members, so memory stays constant; nothing is read twice.
    bar = Bar(f"extract {path.name}")
    with path.open("rb") as packed, tarfile.open(fileobj=packed, mode="r|*") as archive, bar:
        for member in tar_members(archive, path):
            bar.update()
            num_bytes += member.size
            _check_size(path, num_bytes)
            with writing(folder.root / member.name, ADVICE):
                target = folder.path(member.name)
                is_there = _is_there(target, member.size)
                if not is_there:
                    check_space(folder.root, member.size)
                    source = archive.extractfile(member)
                    assert source is not None, "tar_members yields files only"
                    with atomic_write(target, "wb", is_flushed=False) as output:
                        shutil.copyfileobj(source, output, BLOCK_BYTES)
            summary.add(not is_there, is_there)


def _is_there(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes


def _check_size(path: Path, unpacked_bytes: int) -> None:
    packed_bytes = path.stat().st_size
    if unpacked_bytes > max(ALWAYS_ALLOWED_BYTES, MAX_RATIO * packed_bytes):
        raise ArchiveError(
            f"{path}: refused: {human_bytes(packed_bytes)} would unpack to "
            f"{human_bytes(unpacked_bytes)} or more; expected at most {MAX_RATIO} times its size"
        )
