"""Join archive parts and unpack zip and tar archives safely, in parallel, and from where a killed run stopped.

An archive is data from outside: its names are checked, links and devices are refused, and so is one that unpacks to far
more than its size. Every file is written under a temporary name and renamed, so a final name is a whole file.
"""

import logging
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from speakernet.corpora import verified
from speakernet.corpora.download import check_space
from speakernet.corpora.safe_paths import Folder, UnsafeNameError, checked_relative
from speakernet.corpora.summary import StepSummary
from speakernet.files import human_bytes, md5_of, parallel_map, temporary_beside

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20
#: Recorded speech packs to a third at best; silence could reach 1000. An honest corpus stays far below this.
MAX_RATIO = 100
#: Archives that unpack to less are harmless whatever their ratio.
ALWAYS_ALLOWED_BYTES = 256 << 20
ZIP_LINK_MODE = 0o120000
MODE_MASK = 0o170000


class ArchiveError(ValueError):
    """An archive that is damaged or that would do what an archive must not."""


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
        check_space(whole.parent, num_bytes)
        half = temporary_beside(whole)
        with tqdm(total=num_bytes, desc=f"join {whole.name}", unit="B", unit_scale=True, dynamic_ncols=True) as bar:
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
    wanted: Callable[[str], bool] = lambda name: True,
) -> None:
    """Unpack a zip or tar archive into `folder`; members that are already there with the right size are skipped.

    Args:
        archive: .zip, .tar, .tar.gz, .tgz, .tar.bz2 or .tar.xz.
        folder: nothing outside of it is written.
        summary: counts the members.
        num_jobs: threads for a zip (a compressed tar is one stream and takes one).
        wanted: names to take; the others are not counted.

    Raises:
        ArchiveError: an unsafe name, a link, a bomb, or not an archive; of a zip nothing is then written at all.
        DiskFullError: the disk cannot hold the content.
    """
    try:
        if zipfile.is_zipfile(archive):
            _extract_zip(archive, Folder(folder), summary, num_jobs, wanted)
        elif tarfile.is_tarfile(archive):
            _extract_tar(archive, Folder(folder), summary, wanted)
        else:
            raise ArchiveError(f"{archive} is neither a zip nor a tar archive, or is damaged; fetch it again")
    except UnsafeNameError as error:
        raise ArchiveError(f"{archive}: refused: {error}") from error
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise ArchiveError(f"{archive} is damaged ({error}); remove it and fetch it again") from error


def zip_members(archive: zipfile.ZipFile, path: Path) -> list[zipfile.ZipInfo]:
    """The files of an open zip, every one checked before the first is read.

    Raises:
        ArchiveError: a link, two members of one name, or a bomb.
        UnsafeNameError: an absolute name or one with `..`.
    """
    members = [member for member in archive.infolist() if not member.is_dir()]
    seen: set[str] = set()
    for member in members:
        if (member.external_attr >> 16) & MODE_MASK == ZIP_LINK_MODE:
            raise ArchiveError(f"{path}: refused: {member.filename!r} is a link; an audio archive holds files only")
        name = str(checked_relative(member.filename))
        if name in seen:
            raise ArchiveError(f"{path}: refused: two members are called {name!r}")
        seen.add(name)
    _refuse_bomb(path, sum(member.file_size for member in members))
    return members


def _extract_zip(
    path: Path, folder: Folder, summary: StepSummary, num_jobs: int, wanted: Callable[[str], bool]
) -> None:
    with zipfile.ZipFile(path) as archive:
        members = [member for member in zip_members(archive, path) if wanted(member.filename)]
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
                    _write_member(source.read, folder.path(member.filename), member.file_size)
            except (zipfile.BadZipFile, EOFError, ArchiveError, RuntimeError) as error:
                return member.filename, str(error)
            return member.filename, None

        for name, problem in parallel_map(take, missing, num_jobs, f"extract {path.name}", total=len(missing)):
            if problem is None:
                summary.add_made()
            else:
                summary.add_broken(name, problem)


def _extract_tar(path: Path, folder: Folder, summary: StepSummary, wanted: Callable[[str], bool]) -> None:
    taken = 0
    bar = tqdm(desc=f"extract {path.name}", unit="file", dynamic_ncols=True)
    # Stream mode keeps no table of members, so that memory stays flat; nothing is read twice.
    with path.open("rb") as compressed, tarfile.open(fileobj=compressed, mode="r|*") as archive, bar:
        for member in _tar_members(archive):
            bar.update()
            if member.isdir():
                continue
            if not member.isfile():
                raise ArchiveError(f"{path}: refused: {member.name!r} is a link or a device; expected files only")
            target = folder.path(member.name)
            taken += member.size
            _refuse_bomb(path, taken)
            if not wanted(member.name):
                continue
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


def _write_member(read: Callable[[int], bytes], target: Path, num_bytes: int) -> None:
    """Write exactly the declared bytes under a temporary name, then rename."""
    half = temporary_beside(target)
    written = 0
    try:
        with half.open("wb") as output:
            while block := read(BLOCK_BYTES):
                written += len(block)
                if written > num_bytes:
                    raise ArchiveError(f"{target.name} unpacks to more than the {num_bytes} bytes that it declares")
                output.write(block)
        if written != num_bytes:
            raise ArchiveError(f"{target.name} unpacks to {written} bytes, but declares {num_bytes}")
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
