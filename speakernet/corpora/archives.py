"""Archives that come in parts, joined or read as if they were; zip and tar unpacked safely and in parallel.

An archive is data from outside: its names are checked, links and devices are refused, and so is one that unpacks to far
more than its size. Every file is written under a temporary name and renamed, so a final name is a whole file.
"""

import bisect
import contextlib
import io
import lzma
import os
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from speakernet.corpora import verified
from speakernet.corpora.download import check_space
from speakernet.corpora.safe_paths import Folder, UnsafeNameError, checked_relative
from speakernet.corpora.summary import StepSummary
from speakernet.files import (
    FileError,
    human_bytes,
    md5_of,
    open_regular,
    parallel_map,
    reading,
    temporary_beside,
    writing,
)
from speakernet.terminal import Bar

BLOCK_BYTES = 1 << 20
#: Recorded speech packs to a third at best; silence could reach 1000. An honest corpus stays far below this.
MAX_RATIO = 100
#: Archives that unpack to less are harmless whatever their ratio.
ALWAYS_ALLOWED_BYTES = 256 << 20
ZIP_LINK_MODE = 0o120000
MODE_MASK = 0o170000
ADVICE = "free some space or unpack into another folder"
DAMAGE = (zipfile.BadZipFile, EOFError, RuntimeError, zlib.error, lzma.LZMAError, struct.error)
"""What a damaged member of a zip, or one packed in a way that is not known here, is answered with."""
#: Names of parts: `vox1_dev_wav_partaa`, `corpus.part1`, `corpus.zip.001`.
PART = re.compile(r"^(?P<stem>.*?)(?:[._-]?part[._-]?[a-z]{1,2}|[._-]?part[._-]?\d+|\.\d{3})$")


class ArchiveError(FileError):
    """An archive that is damaged or that would do what an archive must not."""


def group_parts(paths: Sequence[Path]) -> list[list[Path]]:
    """Paths grouped into archives: the parts of one archive together and in order, in order of first mention.

    >>> [[path.name for path in group] for group in group_parts([Path("a_partab"), Path("b.zip"), Path("a_partaa")])]
    [['a_partaa', 'a_partab'], ['b.zip']]
    """
    groups: dict[tuple[Path, str], list[Path]] = {}
    for path in paths:
        match = PART.match(path.name)
        key = match["stem"] + "/part" if match else path.name
        groups.setdefault((path.parent, key), []).append(path)
    return [sorted(group) for group in groups.values()]


class JoinedFile(io.RawIOBase):
    """Several files read as one."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__()
        self._files = [open_regular(path) for path in paths]
        self._starts = [0]
        for path in paths:
            self._starts.append(self._starts[-1] + path.stat().st_size)
        self._position = 0

    def readable(self) -> bool:
        """Whether it can be read: yes."""
        return True

    def seekable(self) -> bool:
        """Whether it can be read anywhere: yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte; see `io.IOBase.seek`."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._starts[-1]}[whence]
        if base + offset < 0:
            raise OSError(f"cannot seek to byte {base + offset}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """The byte that is read next."""
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """The next `size` bytes, fewer only at the end; all that is left without a size."""
        left = max(0, self._starts[-1] - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        blocks = []
        while wanted > 0:
            number = bisect.bisect_right(self._starts, self._position) - 1
            file = self._files[number]
            file.seek(self._position - self._starts[number])
            block = file.read(min(wanted, self._starts[number + 1] - self._position))
            if not block:
                break
            blocks.append(block)
            self._position += len(block)
            wanted -= len(block)
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    def close(self) -> None:
        """Close every part."""
        for file in self._files:
            file.close()
        super().close()


def join_parts(
    parts: Sequence[Path], whole: Path, md5: str | None, summary: StepSummary, keep_parts: bool = False
) -> None:
    """Join parts into the whole archive, streamed, and remove the parts only once the whole is verified.

    A whole that is there and verified is left alone (and leftover parts are removed). What a killed run left half
    joined is begun again.
    """
    if verified.has_md5(whole, md5):
        summary.add_skipped()
    else:
        missing = [part.name for part in parts if not part.is_file()]
        if missing:
            summary.add_broken(whole.name, f"parts are missing: {', '.join(missing)}; run --download first")
            return
        num_bytes = sum(part.stat().st_size for part in parts)
        # The parts are kept until the sum is right: for a moment both are on the disk.
        check_space(whole.parent, num_bytes)
        half = temporary_beside(whole)
        with Bar(f"join {whole.name}", num_bytes, "B") as bar:
            _copy_parts(parts, half, bar.update)
        found = md5_of(half)
        if md5 is not None and found != md5:
            half.unlink()
            summary.add_broken(whole.name, f"MD5 of the joined parts is {found}, expected {md5}; the parts are kept")
            return
        half.replace(whole)
        verified.remember(whole, found)
        summary.add_made()
    if not keep_parts:
        for part in parts:
            part.unlink(missing_ok=True)


def extract(
    archive: Path,
    folder: str | Path,
    summary: StepSummary,
    num_jobs: int = 1,
) -> None:
    """Unpack a zip or tar archive into `folder`; members that are already there with the right size are skipped.

    Args:
        archive: .zip, .tar, .tar.gz, .tgz, .tar.bz2 or .tar.xz.
        folder: nothing outside of it is written.
        summary: counts the members.
        num_jobs: threads for a zip (a compressed tar is one stream and takes one).

    Raises:
        ArchiveError: an unsafe name, a link, a bomb, or not an archive; of a zip nothing is then written at all.
        DiskFullError: the disk cannot hold the content.
    """
    with reading(archive, "a whole zip or tar archive; remove it and fetch it again", ArchiveError):
        open_regular(archive).close()
        try:
            if zipfile.is_zipfile(archive):
                _extract_zip(archive, Folder(folder), summary, num_jobs)
            elif tarfile.is_tarfile(archive):
                _extract_tar(archive, Folder(folder), summary)
            else:
                raise ArchiveError(f"{archive} is neither a zip nor a tar archive, or is damaged; fetch it again")
        except UnsafeNameError as error:
            raise ArchiveError(f"{archive}: refused: {error}") from error


def zip_members(archive: zipfile.ZipFile, path: Path) -> list[zipfile.ZipInfo]:
    """The files of an open zip, every one checked before the first is read.

    Raises:
        ArchiveError: a link, two members of one name, or a bomb.
        UnsafeNameError: an absolute name or one with `..`.
    """
    members = [member for member in archive.infolist() if not (member.filename and member.is_dir())]
    seen: set[str] = set()
    for member in members:
        if (member.external_attr >> 16) & MODE_MASK == ZIP_LINK_MODE:
            raise ArchiveError(f"{path}: refused: {member.filename!r} is a link; an audio archive holds files only")
        name = str(checked_relative(member.filename))
        if name in seen:
            raise ArchiveError(f"{path}: refused: two members are called {name!r}")
        seen.add(name)
    for name in seen:
        if folder := next((str(one) for one in PurePosixPath(name).parents if str(one) in seen), None):
            raise ArchiveError(f"{path}: refused: {folder!r} is a file and the folder of {name!r}")
    _refuse_bomb(path, sum(member.file_size for member in members))
    return members


def _extract_zip(path: Path, folder: Folder, summary: StepSummary, num_jobs: int) -> None:
    with zipfile.ZipFile(path) as archive:
        members = zip_members(archive, path)
        missing = [
            member
            for member in members
            if not _is_there(folder.root / checked_relative(member.filename), member.file_size)
        ]
        summary.add_skipped(len(members) - len(missing))
        check_space(folder.root, sum(member.file_size for member in missing))

        def take(member: zipfile.ZipInfo) -> tuple[str, str | None]:
            try:
                with archive.open(member) as source:
                    _write_member(source.read, _target(folder, member.filename), member.file_size)
            except (*DAMAGE, ArchiveError) as error:
                return member.filename, str(error)
            return member.filename, None

        for name, problem in parallel_map(take, missing, num_jobs, f"extract {path.name}", total=len(missing)):
            if problem is None:
                summary.add_made()
            else:
                summary.add_broken(name, problem)


def _extract_tar(path: Path, folder: Folder, summary: StepSummary) -> None:
    taken = 0
    bar = Bar(f"extract {path.name}")
    # Stream mode keeps no table of members, so that memory stays flat; nothing is read twice.
    with path.open("rb") as compressed, tarfile.open(fileobj=compressed, mode="r|*") as archive, bar:
        for member in _tar_members(archive):
            bar.update()
            if member.isdir():
                continue
            if not member.isfile():
                raise ArchiveError(f"{path}: refused: {member.name!r} is a link or a device; expected files only")
            target = _target(folder, member.name)
            taken += member.size
            _refuse_bomb(path, taken)
            if _is_there(target, member.size):
                summary.add_skipped()
                continue
            check_space(folder.root, member.size)
            source = archive.extractfile(member)
            assert source is not None
            _write_member(source.read, target, member.size)
            summary.add_made()


def _tar_members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    while (member := archive.next()) is not None:
        yield member
        # tarfile keeps every header it has seen, which a million files would turn into a gigabyte.
        archive.members = []  # type: ignore[attr-defined]


def _refuse_bomb(path: Path, unpacked_bytes: int) -> None:
    packed_bytes = path.stat().st_size
    if unpacked_bytes > max(ALWAYS_ALLOWED_BYTES, MAX_RATIO * packed_bytes):
        raise ArchiveError(
            f"{path}: refused: {human_bytes(packed_bytes)} would unpack to {human_bytes(unpacked_bytes)} or more; "
            f"expected at most {MAX_RATIO} times its size"
        )


def _is_there(path: Path, num_bytes: int) -> bool:
    try:
        return path.stat().st_size == num_bytes
    except FileNotFoundError:
        return False


def _target(folder: Folder, name: str) -> Path:
    with writing(folder.root / name, "it may be a folder where a file is there, or the other way round"):
        return folder.path(name)


def _write_member(read: Callable[[int], bytes], target: Path, num_bytes: int) -> None:
    """Write exactly the declared bytes under a temporary name, then rename."""
    half = temporary_beside(target)
    written = 0
    try:
        with writing(target, ADVICE):
            output = half.open("wb")
        try:
            while block := read(BLOCK_BYTES):
                written += len(block)
                if written > num_bytes:
                    raise ArchiveError(f"{target.name} unpacks to more than the {num_bytes} bytes that it declares")
                with writing(target, ADVICE):
                    output.write(block)
            with writing(target, ADVICE):
                output.flush()
        finally:
            # Flushed, or what could not be is said already.
            with contextlib.suppress(OSError):
                output.close()
        if written != num_bytes:
            raise ArchiveError(f"{target.name} unpacks to {written} bytes, but declares {num_bytes}")
        with writing(target, ADVICE):
            half.replace(target)
    except BaseException:
        half.unlink(missing_ok=True)
        raise


def _copy_parts(parts: Sequence[Path], target: Path, on_bytes: Callable[[int], object]) -> None:
    with target.open("wb") as output:
        for part in parts:
            with part.open("rb") as source:
                while block := source.read(BLOCK_BYTES):
                    output.write(block)
                    on_bytes(len(block))
        output.flush()
        os.fsync(output.fileno())
