"""What goes into a packed corpus: the files of a folder or list, or members of zip and tar archives, read as they lie.

Archives are not unpacked: a member is read into memory, decoded and dropped. Their names are data from outside and are
checked before anything is read. Names in the corpus are those of the list where there is one.
"""

import os
import tarfile
import tempfile
import threading
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from speakernet.corpora.archives import ArchiveError, JoinedFile, group_parts, zip_members
from speakernet.corpora.conversion import TOLERANCE_SECONDS, TOLERANCE_SHARE
from speakernet.corpora.safe_paths import UnsafeNameError, checked_relative
from speakernet.corpora.walking import READABLE_SUFFIXES, walk_files
from speakernet.data.audio import AudioError, read_audio, read_audio_bytes, to_int16
from speakernet.data.ffmpeg import CONVERTIBLE_SUFFIXES, FfmpegError, decode_to_bytes, find_ffmpeg
from speakernet.data.lists import StringTable
from speakernet.data.packed.names import NameIndex
from speakernet.data.packed.writer import PackInput

AUDIO_SUFFIXES = READABLE_SUFFIXES | CONVERTIBLE_SUFFIXES
NOT_IN_ANY = -1


class FolderInput(PackInput):
    """Files under a folder: those that a list names, or all of them."""

    def __init__(self, root: str | Path, names: StringTable | None = None, ffmpeg: str | None = None) -> None:
        if not Path(root).is_dir():
            raise AudioError(f"{root}: no such folder; give the folder that the list's paths are relative to")
        if names is None:
            names = StringTable.from_strings(walk_files(root, AUDIO_SUFFIXES))
        for name in names:
            _checked(name, str(root))
        super().__init__(names, str(root))
        self._root = str(root)
        self._ffmpeg = ffmpeg

    def decode(self, row: int, content: bytes | None, sample_rate: int) -> np.ndarray:
        """See `PackInput.decode`."""
        path = os.path.join(self._root, self.names[row])  # noqa: PTH118  a million times
        if not _needs_ffmpeg(path) or not os.path.exists(path):  # noqa: PTH110
            return to_int16(read_audio(path, sample_rate=sample_rate))
        return _decode_with_ffmpeg(self._ffmpeg, Path(path), path, sample_rate)


class ArchiveInput(PackInput):
    """Members of one or several archives, and the names of a list that none of them holds."""

    def __init__(
        self, archives: Sequence["Archive"], wanted: StringTable | None, strip: int | None, ffmpeg: str | None = None
    ) -> None:
        """Match members and names.

        Args:
            archives: opened archives.
            wanted: names of a list; None takes every audio file.
            strip: leading folders of the members' names to drop; None finds the number that suits the list (0 without).
            ffmpeg: for m4a and the like; None takes the one of the environment or the PATH.
        """
        names: list[str] = []
        of_archive, of_member = [], []
        for number, archive in enumerate(archives):
            members, chosen = match_members(archive, wanted, strip)
            names += chosen
            of_archive.append(np.full(len(members), number))
            of_member.append(members)
        _refuse_twice(names, archives)
        if wanted is not None:
            absent = NameIndex(StringTable.from_strings(names)).find(wanted) < 0
            absent_names = [wanted[row] for row in np.flatnonzero(absent).tolist()]
            names += absent_names
            of_archive.append(np.full(len(absent_names), NOT_IN_ANY))
            of_member.append(np.zeros(len(absent_names), dtype=np.int64))
        super().__init__(StringTable.from_strings(names), ", ".join(archive.name for archive in archives))
        self._archives = archives
        self._ffmpeg = ffmpeg
        self._of_archive = np.concatenate(of_archive)
        self._of_member = np.concatenate(of_member)

    def items(self, rows: Iterable[int]) -> Iterator[tuple[int, bytes | None]]:
        """See `PackInput.items`: a compressed tar is a stream, which has to be read in order."""
        rows = np.asarray(list(rows), dtype=np.int64)
        for number, archive in enumerate(self._archives):
            some = rows[self._of_archive[rows] == number]
            yield from zip(some.tolist(), archive.contents(self._of_member[some]), strict=True)
        for row in rows[self._of_archive[rows] == NOT_IN_ANY].tolist():
            yield row, None

    def decode(self, row: int, content: bytes | None, sample_rate: int) -> np.ndarray:
        """See `PackInput.decode`."""
        name, number = self.names[row], int(self._of_archive[row])
        if number == NOT_IN_ANY:
            raise AudioError(f"{name}: the list names it, but {self.description} does not hold it")
        archive = self._archives[number]
        member = int(self._of_member[row])
        if content is None:
            content = archive.read(member)
        label = f"{archive.name}: {archive.names[member]}"
        if not _needs_ffmpeg(archive.names[member]):
            return to_int16(read_audio_bytes(content, label, sample_rate=sample_rate))
        # ffmpeg has to seek in m4a, so it cannot be fed through a pipe.
        with tempfile.TemporaryDirectory(prefix="speakernet-") as folder:
            path = Path(folder) / ("audio" + os.path.splitext(archive.names[member])[1])  # noqa: PTH122
            path.write_bytes(content)
            return _decode_with_ffmpeg(self._ffmpeg, path, label, sample_rate)


class Archive(ABC):
    """The audio files in an archive, in the order in which they lie."""

    def __init__(self, name: str, names: Sequence[str]) -> None:
        self.name = name
        self.names = names

    @abstractmethod
    def read(self, member: int) -> bytes:
        """The bytes of one member; called from several threads."""

    def contents(self, members: np.ndarray) -> Iterator[bytes | None]:
        """Bytes of ascending members for archives that can only be read in order; else Nones, and `read` is called."""
        for _ in members:
            yield None


class ZipAudio(Archive):
    """A zip archive, in one file or in parts."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._zip = zipfile.ZipFile(JoinedFile(paths))
        members = zip_members(self._zip, paths[0])
        # In the order of their bytes, so that a spinning disk reads straight through.
        self._members = sorted((one for one in members if _is_audio(one.filename)), key=lambda one: one.header_offset)
        super().__init__(str(paths[0]), [str(checked_relative(one.filename)) for one in self._members])

    def read(self, member: int) -> bytes:
        """See `Archive.read`."""
        try:
            return self._zip.read(self._members[member])
        except (zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError) as error:
            raise AudioError(f"{self.name}: {self.names[member]}: damaged in the archive ({error})") from error


class TarAudio(Archive):
    """A tar archive, in one file or in parts: plain ones are read anywhere, compressed ones from front to back."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._file = JoinedFile(paths)
        self._lock = threading.Lock()
        # A compressed tar begins with the compressor's mark, a plain one has its own at byte 257.
        head = self._file.read(262)
        self._is_plain = head[257:262] == b"ustar"
        self._file.seek(0)
        names, places = [], []
        with self._open(self._file) as archive:
            for member in _tar_files(archive, str(paths[0])):
                name = str(checked_relative(member.name))
                if _is_audio(name):
                    names.append(name)
                    places.append((member.offset_data, member.size))
        self._places = np.array(places, dtype=np.int64).reshape(-1, 2)
        super().__init__(str(paths[0]), names)

    def read(self, member: int) -> bytes:
        """See `Archive.read`."""
        offset, size = self._places[member].tolist()
        with self._lock:
            self._file.seek(offset)
            content = self._file.read(size)
        if len(content) != size:
            raise AudioError(f"{self.name}: {self.names[member]}: the archive ends in the middle of it")
        return content

    def contents(self, members: np.ndarray) -> Iterator[bytes | None]:
        """See `Archive.contents`."""
        if self._is_plain or not len(members):
            yield from super().contents(members)
            return
        wanted = set(members.tolist())
        number = -1
        with JoinedFile(self._paths) as file, self._open(file) as archive:
            for member in _tar_files(archive, self.name):
                if not _is_audio(member.name):
                    continue
                number += 1
                if number in wanted:
                    content = archive.extractfile(member)
                    assert content is not None
                    yield content.read()

    def _open(self, file: JoinedFile) -> tarfile.TarFile:
        return tarfile.open(fileobj=file, mode="r:" if self._is_plain else "r|*")


def open_inputs(
    sources: Sequence[str | Path],
    wanted: StringTable | None = None,
    strip: int | None = None,
    ffmpeg: str | None = None,
) -> PackInput:
    """The input that `sources` are: one folder, or archives (parts of one archive count as one).

    Args:
        sources: a folder, or zip and tar archives.
        wanted: names to pack; None packs every audio file.
        strip: see `ArchiveInput`.
        ffmpeg: likewise.

    Raises:
        AudioError: nothing there, or not a folder or archive.
        ArchiveError: a damaged archive, a name that leads outside, a link.
    """
    paths = [Path(source) for source in sources]
    for path in paths:
        if not path.exists():
            raise AudioError(f"{path}: no such folder or archive")
    if len(paths) == 1 and paths[0].is_dir():
        return FolderInput(paths[0], wanted, ffmpeg)
    if any(path.is_dir() for path in paths):
        raise AudioError("expected one folder or some archives, found a folder among several sources")
    return ArchiveInput([_open_archive(parts) for parts in group_parts(paths)], wanted, strip, ffmpeg)


def match_members(archive: Archive, wanted: StringTable | None, strip: int | None) -> tuple[np.ndarray, list[str]]:
    """Members to take, ascending, and their names in the corpus.

    With a list the members are found under the list's own names: leading folders that the list does not have are
    dropped, and another suffix is another format of the same recording (`.m4a` in the archive, `.wav` in the list).
    """
    if wanted is None:
        kept = [(row, "/".join(name.split("/")[strip or 0 :])) for row, name in enumerate(archive.names)]
        kept = [(row, name) for row, name in kept if name]
        return np.array([row for row, _ in kept], dtype=np.int64), [name for _, name in kept]
    depths = range(max((name.count("/") for name in archive.names), default=0) + 1) if strip is None else [strip]
    best: tuple[np.ndarray, np.ndarray] = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    for plain in (str, _without_suffix):
        index = NameIndex(wanted if plain is str else StringTable.from_strings(map(plain, wanted)))
        for depth in depths:
            stripped = StringTable.from_strings(plain("/".join(name.split("/")[depth:])) for name in archive.names)
            rows = index.find(stripped)
            members = np.flatnonzero(rows >= 0)
            if len(members) > len(best[0]):
                best = members, rows[members]
        if len(best[0]):
            break
    return best[0], [wanted[row] for row in best[1].tolist()]


def _open_archive(paths: Sequence[Path]) -> Archive:
    try:
        with JoinedFile(paths) as file:
            is_zip = zipfile.is_zipfile(file)
        return ZipAudio(paths) if is_zip else TarAudio(paths)
    except UnsafeNameError as error:
        raise ArchiveError(f"{paths[0]}: refused: {error}") from error
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError) as error:
        raise ArchiveError(
            f"{paths[0]}: neither a whole zip nor a whole tar archive ({error}); fetch it again, and of an archive in "
            "parts name every part"
        ) from error


def _tar_files(archive: tarfile.TarFile, name: str) -> Iterator[tarfile.TarInfo]:
    while (member := archive.next()) is not None:
        if not member.isdir():
            if not member.isreg() or member.issparse():
                raise ArchiveError(f"{name}: refused: {member.name!r} is a link or a device; expected files only")
            yield member
        # tarfile keeps every header it has seen, which a million files would turn into a gigabyte.
        archive.members = []  # type: ignore[attr-defined]


def _refuse_twice(names: list[str], archives: Sequence[Archive]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            where = ", ".join(archive.name for archive in archives)
            raise ArchiveError(f"{where}: {name!r} is there twice; pack the archives one by one or change --strip")
        seen.add(name)


def _decode_with_ffmpeg(ffmpeg: str | None, path: Path, label: str, sample_rate: int) -> np.ndarray:
    try:
        # Looked for where it is needed: a corpus of WAV packs on a machine without it.
        raw, facts = decode_to_bytes(find_ffmpeg(ffmpeg), path, sample_rate)
    except FfmpegError as error:
        raise AudioError(f"{label}: {error}") from error
    samples = np.frombuffer(raw[: len(raw) // 2 * 2], dtype="<i2")
    seconds = len(samples) / sample_rate
    if not len(samples):
        raise AudioError(f"{label}: holds no samples")
    if facts.source_seconds and not facts.is_estimate:
        tolerance = max(TOLERANCE_SECONDS, TOLERANCE_SHARE * facts.source_seconds)
        if seconds < facts.source_seconds - tolerance:
            raise AudioError(
                f"{label}: decodes to {seconds:.2f} of {facts.source_seconds:.2f} seconds; it is cut short"
            )
    return samples


def _checked(name: str, where: str) -> None:
    try:
        checked_relative(name)
    except UnsafeNameError as error:
        raise AudioError(f"{where}: refused: {error}") from error


def _is_audio(name: str) -> bool:
    base = name.rsplit("/", 1)[-1]
    return os.path.splitext(base)[1].lower() in AUDIO_SUFFIXES and not base.startswith(".")  # noqa: PTH122


def _needs_ffmpeg(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in CONVERTIBLE_SUFFIXES  # noqa: PTH122


def _without_suffix(name: str) -> str:
    return os.path.splitext(name)[0]  # noqa: PTH122
