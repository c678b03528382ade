"""What goes into a packed corpus: the files of a folder or list, or members of zip and tar archives, read as they lie.

A Kaldi folder, wespeaker's `raw.list` and its shards go by the ids of their utterances, archives by the names of a list
where there is one. Archives are opened in `pack_archives.py`.
"""

import functools
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from speakernet.corpora.archives import ArchiveError, group_parts
from speakernet.corpora.conversion import TOLERANCE_SECONDS, TOLERANCE_SHARE
from speakernet.corpora.pack_archives import AUDIO_SUFFIXES, Archive, open_archive, without_suffix
from speakernet.corpora.safe_paths import UnsafeNameError, checked_relative
from speakernet.corpora.walking import walk_files
from speakernet.corpora.wespeaker_lists import RAW_LIST, SHARD_LIST, list_kind, read_raw_list, read_shard_list
from speakernet.data.audio import AudioError, read_audio, read_audio_bytes, to_int16
from speakernet.data.ffmpeg import CONVERTIBLE_SUFFIXES, FfmpegError, decode_to_bytes, find_ffmpeg
from speakernet.data.lists import UTT2SPK, NameIndex, Recordings, StringTable, read_training_list
from speakernet.data.opening import KaldiSource, is_kaldi
from speakernet.data.packing import PackInput

NOT_IN_ANY = -1
FOLDER, KALDI, ARCHIVE = "folder", "Kaldi folder", "archive"
NAMED_ARCHIVES = 5
"""Of many, in messages."""


class FileInput(PackInput):
    """Files by name."""

    def __init__(
        self,
        recordings: Recordings,
        description: str,
        *,
        root: str = "",
        wanted: StringTable | None = None,
        ffmpeg: str | None = None,
    ) -> None:
        """Take all files, or those that a list names.

        Args:
            recordings: name, file and perhaps speaker of each.
            description: of the source, for messages.
            root: folder of files that are not named absolutely; empty takes the working directory.
            wanted: names of a list; None takes every file.
            ffmpeg: for m4a and the like; None takes the one of the environment or the PATH.
        """
        names, files, speakers = recordings.names, recordings.files, recordings.speakers
        if wanted is not None:
            rows = NameIndex(names).find(wanted)
            names, files, speakers = wanted, files.take(rows), speakers.take(rows) if speakers else None
        super().__init__(names, description, speakers)
        self._files = files
        self._root = root
        self._ffmpeg = ffmpeg

    def decode(self, row: int, content: bytes | None, sample_rate: int) -> np.ndarray:
        """See `PackInput.decode`."""
        file = self._files[row]
        if not file:
            raise AudioError(_absent(self.names[row], self.description))
        path = os.path.join(self._root, file)  # noqa: PTH118  a million times
        if not _needs_ffmpeg(path) or not os.path.exists(path):  # noqa: PTH110
            return to_int16(read_audio(path, sample_rate=sample_rate))
        return _decode_with_ffmpeg(self._ffmpeg, Path(path), path, sample_rate)


class FolderInput(FileInput):
    """Files under a folder: those that a list names, or all of them."""

    def __init__(self, root: str | Path, names: StringTable | None = None, ffmpeg: str | None = None) -> None:
        if not Path(root).is_dir():
            raise AudioError(f"{root}: no such folder; give the folder that the list's paths are relative to")
        if names is None:
            names = StringTable.from_strings(walk_files(root, AUDIO_SUFFIXES))
        for name in names:
            _checked(name, str(root))
        super().__init__(Recordings(names, names), str(root), root=str(root), ffmpeg=ffmpeg)


class ArchiveInput(PackInput):
    """Members of one or several archives, and the names of a list that none of them holds."""

    def __init__(
        self, archives: Sequence[Archive], wanted: StringTable | None, strip: int | None, ffmpeg: str | None = None
    ) -> None:
        """Match members and names.

        Args:
            archives: opened archives.
            wanted: names of a list; None takes every audio file.
            strip: leading folders of the members' names to drop; None finds the number that suits the list (0 without).
            ffmpeg: for m4a and the like; None takes the one of the environment or the PATH.
        """
        names: list[str] = []
        speakers: list[str] = []
        of_archive, of_member = [], []
        sought = None if wanted is None else Wanted(wanted)
        for number, archive in enumerate(archives):
            members, chosen = match_members(archive, sought, strip)
            names += chosen
            speakers += [archive.speakers[member] for member in members.tolist()] if archive.speakers else []
            of_archive.append(np.full(len(members), number))
            of_member.append(members)
        description = _named(archives)
        _refuse_twice(names, description)
        # One archive that does not say who speaks leaves the whole without a list.
        says_speakers = len(speakers) == len(names)
        if wanted is not None:
            absent = NameIndex(StringTable.from_strings(names)).find(wanted) < 0
            absent_names = [wanted[row] for row in np.flatnonzero(absent).tolist()]
            names += absent_names
            speakers += [""] * len(absent_names)
            of_archive.append(np.full(len(absent_names), NOT_IN_ANY))
            of_member.append(np.zeros(len(absent_names), dtype=np.int64))
        said = StringTable.from_strings(speakers) if says_speakers else None
        super().__init__(StringTable.from_strings(names), description, said)
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
            raise AudioError(_absent(name, self.description))
        archive = self._archives[number]
        member = int(self._of_member[row])
        if content is None:
            content = archive.read(member)
        label = f"{archive.name}: {archive.files[member]}"
        if not _needs_ffmpeg(archive.files[member]):
            return to_int16(read_audio_bytes(content, label, sample_rate=sample_rate))
        # ffmpeg has to seek in m4a, so it cannot be fed through a pipe.
        with tempfile.TemporaryDirectory(prefix="speakernet-") as folder:
            path = Path(folder) / ("audio" + os.path.splitext(archive.files[member])[1])  # noqa: PTH122
            path.write_bytes(content)
            return _decode_with_ffmpeg(self._ffmpeg, path, label, sample_rate)


def open_inputs(
    sources: Sequence[str | Path],
    wanted: StringTable | None = None,
    strip: int | None = None,
    ffmpeg: str | None = None,
) -> PackInput:
    """The input that `sources` are: one folder, one list, or archives (parts of one archive count as one).

    Args:
        sources: a folder, a Kaldi folder, a `raw.list`, or zip and tar archives, which a `shard.list` may name.
        wanted: names to pack; None packs every audio file.
        strip: see `ArchiveInput`.
        ffmpeg: likewise.

    Raises:
        AudioError: nothing there, or not a folder or archive.
        ListError: a list or a Kaldi folder that cannot be used.
        ArchiveError: a damaged archive, a name that leads outside, a link.
    """
    kinds = [(path, _kind(path)) for path in map(Path, sources)]
    if len(kinds) == 1:
        path, kind = kinds[0]
        if kind == FOLDER:
            return FolderInput(path, wanted, ffmpeg)
        if kind in (KALDI, RAW_LIST):
            recordings = read_raw_list(path) if kind == RAW_LIST else _of_kaldi_folder(path)
            return FileInput(recordings, str(path), wanted=wanted, ffmpeg=ffmpeg)
    if {kind for _, kind in kinds} - {ARCHIVE, SHARD_LIST}:
        raise AudioError("expected one folder, one list or some archives, found a folder or list among several sources")
    paths = [one for path, kind in kinds for one in (read_shard_list(path) if kind == SHARD_LIST else [path])]
    for path in paths:
        _kind(path)
    return ArchiveInput([open_archive(parts) for parts in group_parts(paths)], wanted, strip, ffmpeg)


class Wanted:
    """The names that a list asks for, found under every suffix; both indexes are made once for all archives."""

    def __init__(self, names: StringTable) -> None:
        self.names = names

    @functools.cached_property
    def exact(self) -> NameIndex:
        """By their names."""
        return NameIndex(self.names)

    @functools.cached_property
    def bare(self) -> NameIndex:
        """By their names without the suffix."""
        return NameIndex(StringTable.from_strings(map(without_suffix, self.names)))


def match_members(archive: Archive, wanted: Wanted | None, strip: int | None) -> tuple[np.ndarray, list[str]]:
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
    for plain in (str, without_suffix):
        index = wanted.exact if plain is str else wanted.bare
        for depth in depths:
            stripped = StringTable.from_strings(plain("/".join(name.split("/")[depth:])) for name in archive.names)
            rows = index.find(stripped)
            members = np.flatnonzero(rows >= 0)
            if len(members) > len(best[0]):
                best = members, rows[members]
        if len(best[0]):
            break
    return best[0], [wanted.names[row] for row in best[1].tolist()]


def _kind(path: Path) -> str:
    """What a source is.

    Raises:
        AudioError: there is nothing.
    """
    if not path.exists():
        raise AudioError(f"{path}: no such folder or archive")
    if path.is_dir():
        return KALDI if is_kaldi(path) else FOLDER
    # A pipe would be waited for without end.
    if not path.is_file():
        raise AudioError(f"{path}: neither a file nor a folder; give a folder, a list or an archive")
    return list_kind(path) or ARCHIVE


def _of_kaldi_folder(path: Path) -> Recordings:
    """Its recordings, with their speakers where it has an `utt2spk`."""
    source = KaldiSource(path)
    if not (path / UTT2SPK).is_file():
        return Recordings(source.names, source.files)
    said = read_training_list(path)
    rows = NameIndex(said.paths).find(source.names)
    speakers = said.speakers.take(np.where(rows < 0, rows, said.labels[rows]))
    return Recordings(source.names, source.files, speakers)


def _absent(name: str, description: str) -> str:
    return f"{name}: the list names it, but {description} does not hold it"


def _named(archives: Sequence[Archive]) -> str:
    shown = ", ".join(archive.name for archive in archives[:NAMED_ARCHIVES])
    return shown if len(archives) <= NAMED_ARCHIVES else f"{shown} and {len(archives) - NAMED_ARCHIVES} more"


def _refuse_twice(names: list[str], where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
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


def _needs_ffmpeg(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in CONVERTIBLE_SUFFIXES  # noqa: PTH122
