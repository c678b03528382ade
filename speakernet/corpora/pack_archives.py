"""Zip and tar archives and wespeaker's shards, of which audio is read as it lies.

Nothing is unpacked: a member is read into memory. Names are data from outside and are checked before anything is read.
"""

import os
import tarfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from speakernet.corpora.archives import ArchiveError, JoinedFile, zip_members
from speakernet.corpora.safe_paths import UnsafeNameError, checked_relative
from speakernet.corpora.walking import READABLE_SUFFIXES
from speakernet.data.audio import AudioError
from speakernet.data.ffmpeg import CONVERTIBLE_SUFFIXES
from speakernet.data.lists import MAX_SPEAKER_BYTES

AUDIO_SUFFIXES = READABLE_SUFFIXES | CONVERTIBLE_SUFFIXES
SPEAKER_SUFFIX = ".spk"


def open_archive(paths: Sequence[Path]) -> "Archive":
    """The archive that the parts `paths` make.

    Raises:
        ArchiveError: damaged, a name that leads outside, a link, a shard that does not hold together.
    """
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


class Archive(ABC):
    """The audio files in an archive, in the order in which they lie.

    Args:
        name: of the archive.
        files: its audio files.
        speakers: by the key that a file has in a shard, which is its name without the suffix; empty for no shard.
    """

    def __init__(self, name: str, files: Sequence[str], speakers: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.files = files
        self.names = [without_suffix(file) for file in files] if speakers else files
        self.speakers = [speakers[key] for key in self.names] if speakers else []

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
            raise AudioError(f"{self.name}: {self.files[member]}: damaged in the archive ({error})") from error


class TarAudio(Archive):
    """A tar archive, in one file or in parts, or a shard of wespeaker's, which holds KEY.spk beside KEY.wav."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        # Opened anew by whoever reads: a corpus of a thousand shards would hold a thousand files open.
        with JoinedFile(paths) as file:
            # A compressed tar begins with the compressor's mark, a plain one has its own at byte 257.
            head = file.read(262)
            self._is_plain = head[257:262] == b"ustar"
            file.seek(0)
            files, places, speakers = self._scan(file)
        self._places = np.array(places, dtype=np.int64).reshape(-1, 2)
        lonely = [one for one in files if without_suffix(one) not in speakers] if speakers else []
        if lonely:
            key = without_suffix(lonely[0])
            raise ArchiveError(f"{paths[0]}: {lonely[0]}: no {key}.spk in the shard; pack tars without speakers apart")
        super().__init__(str(paths[0]), files, speakers)

    def _scan(self, file: JoinedFile) -> tuple[list[str], list[tuple[int, int]], dict[str, str]]:
        files, places, speakers = [], [], {}
        with self._open(file) as archive:
            for member in _tar_files(archive, str(self._paths[0])):
                name = str(checked_relative(member.name))
                if name.endswith(SPEAKER_SUFFIX):
                    content = archive.extractfile(member)
                    assert content is not None
                    speakers[without_suffix(name)] = _speaker(content.read(MAX_SPEAKER_BYTES + 1), self._paths[0], name)
                elif _is_audio(name):
                    files.append(name)
                    places.append((member.offset_data, member.size))
        return files, places, speakers

    def read(self, member: int) -> bytes:
        """See `Archive.read`: called for what `contents` could not give."""
        raise AudioError(f"{self.name}: {self.files[member]}: the archive ends in the middle of it")

    def contents(self, members: np.ndarray) -> Iterator[bytes | None]:
        """See `Archive.contents`: plain archives are read where the members lie, compressed ones from end to end."""
        if not len(members):
            return
        with JoinedFile(self._paths) as file:
            if not self._is_plain:
                yield from self._streamed(file, set(members.tolist()))
                return
            for offset, size in self._places[members].tolist():
                file.seek(offset)
                content = file.read(size)
                yield content if len(content) == size else None

    def _streamed(self, file: JoinedFile, wanted: set[int]) -> Iterator[bytes]:
        number = -1
        with self._open(file) as archive:
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


def _tar_files(archive: tarfile.TarFile, name: str) -> Iterator[tarfile.TarInfo]:
    while (member := archive.next()) is not None:
        if not member.isdir():
            if not member.isreg() or member.issparse():
                raise ArchiveError(f"{name}: refused: {member.name!r} is a link or a device; expected files only")
            yield member
        # tarfile keeps every header it has seen, which a million files would turn into a gigabyte.
        archive.members = []  # type: ignore[attr-defined]


def _speaker(content: bytes, path: Path, name: str) -> str:
    """What a .spk member says."""
    word = content.decode("utf-8", "replace").strip()
    if len(content) > MAX_SPEAKER_BYTES or word.split() != [word] or "\ufffd" in word or "\0" in word:
        raise ArchiveError(f"{path}: refused: {name}: {word[:40]!r}; expected one word, the speaker of the utterance")
    return word


def _is_audio(name: str) -> bool:
    base = name.rsplit("/", 1)[-1]
    return os.path.splitext(base)[1].lower() in AUDIO_SUFFIXES and not base.startswith(".")  # noqa: PTH122


def without_suffix(name: str) -> str:
    """The name of a file without its last suffix."""
    return os.path.splitext(name)[0]  # noqa: PTH122
