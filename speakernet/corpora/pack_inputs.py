"""The inputs of a packed corpus: the files of a folder or list, or members of zip and tar archives,
read in place.

Utterances of a Kaldi folder, of wespeaker's `raw.list` (one JSON object per line) and of its shards
(`shard.list`, one tar archive per line) are named by id, those of other archives by a list if there
is one. Archives are not unpacked: members are read into memory. Names are untrusted and are checked
before anything is read.
"""

import collections
import json
import os
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from speakernet.corpora.archives import (
    ArchiveError,
    group_pieces,
    open_pieces,
    tar_members,
    zip_members,
)
from speakernet.corpora.steps import checked_relative, name_problem
from speakernet.data.audio import AUDIO_SUFFIXES, AudioError, read_audio, read_audio_bytes, to_int16
from speakernet.data.folders import LeftOut, UnicodeNames, is_hidden, walk_files
from speakernet.data.lists import (
    BYTE_ORDER_MARK,
    MAX_SPEAKER_BYTES,
    RAW_LIST,
    UTT2SPK,
    ListError,
    ListFile,
    NameIndex,
    Recordings,
    StringTable,
    not_a_file,
    read_training_list,
)
from speakernet.data.names import composed
from speakernet.data.opening import KaldiSource, is_kaldi
from speakernet.data.packing import PackInput
from speakernet.files import reading

NOT_IN_ANY = -1
FOLDER = "folder"
KALDI = "Kaldi folder"
ARCHIVE = "archive"
SHARD_LIST = "shard.list"
RAW_FIELDS = ("key", "wav", "spk")
SHARD_SUFFIXES = (b".tar", b".tar.gz", b".tgz")
SPEAKER_SUFFIXES = (".spk", ".cls", ".json")
SPEAKER_FIELDS = ("speaker", "spk", "speaker_id", "spk_id")
"""Fields of the JSON object beside an utterance in a WebDataset; the first one present counts."""
MAX_JSON_BYTES = 1 << 20
HEAD_BYTES = 65_536
SHOWN_CHARACTERS = 120  # of a malformed value
ABSENT = "{name}: it is in the list but not in {source}"
NAMED_ARCHIVES = 5
"""Number of archives named in a message."""


class FileInput(PackInput):
    """Files by name: all recordings, or those in a list; relative paths are below `root` or the
    working directory.
    """

    def __init__(
        self,
        recordings: Recordings,
        description: str,
        *,
        root: str = "",
        wanted: StringTable | None = None,
    ) -> None:
        names = recordings.names
        files = recordings.files
        speakers = recordings.speakers
        if wanted is not None:
            rows = NameIndex(names).find(wanted)
            names = wanted
            files = files.take(rows)
            speakers = speakers.take(rows) if speakers else None
        super().__init__(names, description, speakers)
        self._files = files
        self._root = root

    def decode(self, row: int, content: bytes | None, sample_rate: int) -> np.ndarray:
        file = self._files[row]
        if not file:
            raise AudioError(ABSENT.format(name=self.names[row], source=self.description))
        path = os.path.join(self._root, file)  # noqa: PTH118  called a million times
        return to_int16(read_audio(path, sample_rate=sample_rate))


class FolderInput(FileInput):
    """Files below a folder: those in a list, or all of them."""

    def __init__(self, root: str | Path, names: StringTable | None = None) -> None:
        if names is None:
            left_out = LeftOut()
            names = StringTable.from_strings(walk_files(root, AUDIO_SUFFIXES, left_out))
            left_out.log(root)
        with reading(root, "a folder, and a list of files in it", AudioError):
            for name in names:
                checked_relative(name)
        files = UnicodeNames(root).table(names)
        super().__init__(Recordings(names, files), str(root), root=str(root))


class ArchiveInput(PackInput):
    """Members of one or several archives, and the names in a list that none of them has."""

    def __init__(
        self, archives: Sequence["Archive"], wanted: StringTable | None, strip: int | None
    ) -> None:
        names: list[str] = []
        speakers: list[str] = []
        of_archive = []
        of_member = []
        for number, archive in enumerate(archives):
            members, chosen = match_members(archive, wanted, strip)
            names += chosen
            speakers += (
                [archive.speakers[member] for member in members.tolist()]
                if archive.speakers
                else []
            )
            of_archive.append(np.full(len(members), number))
            of_member.append(members)
        description = ", ".join(archive.name for archive in archives[:NAMED_ARCHIVES])
        description += " and more" if len(archives) > NAMED_ARCHIVES else ""
        if len(set(names)) < len(names):
            (twice, _), *_ = collections.Counter(names).most_common(1)
            raise ArchiveError(
                f"{description}: {twice!r} occurs twice; pack the archives separately or change "
                "--strip"
            )
        # If one archive has no speakers, there is no training list for the whole.
        has_speakers = len(speakers) == len(names)
        if wanted is not None:
            absent = np.flatnonzero(NameIndex(StringTable.from_strings(names)).find(wanted) < 0)
            names += [wanted[row] for row in absent.tolist()]
            speakers += [""] * len(absent)
            of_archive.append(np.full(len(absent), NOT_IN_ANY))
            of_member.append(np.zeros(len(absent), dtype=np.int64))
        known = StringTable.from_strings(speakers) if has_speakers else None
        super().__init__(StringTable.from_strings(names), description, known)
        self._archives = archives
        self._of_archive = np.concatenate(of_archive)
        self._of_member = np.concatenate(of_member)

    def items(self, rows: Iterable[int]) -> Iterator[tuple[int, bytes | None]]:
        # A compressed tar is a stream, which must be read in order.
        rows = np.asarray(list(rows), dtype=np.int64)
        for number, archive in enumerate(self._archives):
            some = rows[self._of_archive[rows] == number]
            yield from zip(some.tolist(), archive.contents(self._of_member[some]), strict=True)
        for row in rows[self._of_archive[rows] == NOT_IN_ANY].tolist():
            yield row, None

    def decode(self, row: int, content: bytes | None, sample_rate: int) -> np.ndarray:
        if self._of_archive[row] == NOT_IN_ANY:
            raise AudioError(ABSENT.format(name=self.names[row], source=self.description))
        archive = self._archives[self._of_archive[row]]
        member = int(self._of_member[row])
        content = archive.read(member) if content is None else content
        label = f"{archive.name}: {archive.files[member]}"
        return to_int16(read_audio_bytes(content, label, sample_rate=sample_rate))


def open_inputs(
    sources: Sequence[str | Path], wanted: StringTable | None = None, strip: int | None = None
) -> PackInput:
    """Open `sources` as one input: one folder, one list, or archives (the pieces of one archive
    count as one).
    """
    kinds = [(path, _kind(path)) for path in map(Path, sources)]
    if len(kinds) == 1:
        path, kind = kinds[0]
        if kind == FOLDER:
            return FolderInput(path, wanted)
        if kind in (KALDI, RAW_LIST):
            recordings = read_raw_list(path) if kind == RAW_LIST else _of_kaldi_folder(path)
            return FileInput(recordings, str(path), wanted=wanted)
    if {kind for _, kind in kinds} - {ARCHIVE, SHARD_LIST}:
        raise AudioError(
            "a folder or list is among several sources; expected one folder, one list, or only "
            "archives"
        )
    paths = [
        one
        for path, kind in kinds
        for one in (read_shard_list(path) if kind == SHARD_LIST else [path])
    ]
    for path in paths:
        _kind(path)
    return ArchiveInput([open_archive(pieces) for pieces in group_pieces(paths)], wanted, strip)


def match_members(
    archive: "Archive", wanted: StringTable | None, strip: int | None
) -> tuple[np.ndarray, list[str]]:
    """Members to take, ascending, and their names in the corpus.

    With a list, members are matched to its names: leading folders that are not in the list are
    dropped, and a different suffix counts as a different format of the same recording (`.m4a` in
    the archive, `.wav` in the list).
    """
    if wanted is None:
        kept = [
            (row, "/".join(name.split("/")[strip or 0 :])) for row, name in enumerate(archive.names)
        ]
        kept = [(row, name) for row, name in kept if name]
        return np.array([row for row, _ in kept], dtype=np.int64), [name for _, name in kept]
    depths = (
        range(max((name.count("/") for name in archive.names), default=0) + 1)
        if strip is None
        else [strip]
    )
    found = [np.zeros(0, dtype=np.int64)]
    for plain in (str, without_suffix):
        # A Mac's archive has decomposed names.
        index = NameIndex(StringTable.from_strings(map(plain, map(composed, wanted))))
        for depth in depths:
            stripped = (composed("/".join(name.split("/")[depth:])) for name in archive.names)
            found.append(index.find(StringTable.from_strings(map(plain, stripped))))
        rows = max(found, key=lambda one: np.count_nonzero(one >= 0))
        if (rows >= 0).any():
            break
    members = np.flatnonzero(rows >= 0)
    return members, [wanted[row] for row in rows[members].tolist()]


def _kind(path: Path) -> str:
    """The kind of a source."""
    if path.is_dir():
        return KALDI if is_kaldi(path) else FOLDER
    if not path.is_file():
        raise AudioError(f"{path}: no such folder or archive")
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    first = head.removeprefix(BYTE_ORDER_MARK).lstrip().split(b"\n", 1)[0].strip()
    # The first bytes of archives include zeros, text has none.
    if b"\0" not in head and first.startswith(b"{"):
        return RAW_LIST
    return SHARD_LIST if b"\0" not in head and first.lower().endswith(SHARD_SUFFIXES) else ARCHIVE


def _of_kaldi_folder(path: Path) -> Recordings:
    """The recordings of a Kaldi folder, with speakers if it has an `utt2spk`."""
    source = KaldiSource(path)
    if not (path / UTT2SPK).is_file():
        return Recordings(source.names, source.files)
    listed = read_training_list(path)
    rows = NameIndex(listed.paths).find(source.names)
    speakers = listed.speakers.take(np.where(rows < 0, rows, listed.labels[rows]))
    return Recordings(source.names, source.files, speakers)


def read_raw_list(path: Path) -> Recordings:
    """Names, files and speakers of a `raw.list`; files are absolute or relative to the working
    directory.
    """
    file = ListFile(path)
    rows: list[tuple[str, ...]] = []
    for number, line in file:
        text = line.decode("utf-8")
        try:
            row: Any = json.loads(text)
        except (ValueError, RecursionError):
            row = None
        if problem := _raw_problem(row):
            file.refuse(number, f"{problem}; found {text[:SHOWN_CHARACTERS]!r}")
        else:
            rows.append(tuple(row[field] for field in RAW_FIELDS))
    if not rows:
        raise ListError(
            f"{path}: the list is empty; expected one JSON object with {', '.join(RAW_FIELDS)} per "
            "line"
        )
    names, files, speakers = (
        StringTable.from_strings(column) for column in zip(*rows, strict=True)
    )
    NameIndex(names).refuse_repeated(path)
    return Recordings(names, files, speakers)


def _raw_problem(row: Any) -> str:
    """What is wrong with the object in one line of a `raw.list`; empty if nothing."""
    if not isinstance(row, dict) or not set(RAW_FIELDS) <= set(row):
        return f"expected a JSON object with {', '.join(RAW_FIELDS)}"
    if "vad" in row:
        return (
            "vad: segments are not supported; cut them with make_shard_list.py (--vad_file) "
            "and pack the shards"
        )
    for field in RAW_FIELDS:
        value = row[field]
        if not isinstance(value, str) or not value or name_problem(value) or "\0" in value:
            return f"{field}: expected one line of text"
    if row["spk"].split() != [row["spk"]]:
        return "spk: expected one word"
    return f"wav: {problem}" if (problem := not_a_file(row["wav"])) else ""


def read_shard_list(path: Path) -> list[Path]:
    """The archives in a `shard.list`, absolute or relative to the working directory; ListError for
    an address.
    """
    file = ListFile(path)
    found = []
    for number, line in file:
        text = line.decode("utf-8")
        if "://" in text:
            file.refuse(
                number,
                f"{text[:SHOWN_CHARACTERS]!r} is an address; fetch the shard and give the file",
            )
        found.append(Path(text))
    return found


def open_archive(paths: Sequence[Path]) -> "Archive":
    """The archive that consists of the pieces `paths`."""
    with reading(
        paths[0],
        "a complete zip or tar archive; give all of its parts, or fetch it again",
        ArchiveError,
    ):
        with open_pieces(paths) as file:
            is_zip = zipfile.is_zipfile(file)
        return ZipAudio(paths) if is_zip else TarAudio(paths)


class Archive:
    """The audio files in an archive, in stored order."""

    def __init__(
        self, name: str, files: Sequence[str], speakers: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.files = files
        self.names = [without_suffix(file) for file in files] if speakers else files
        self.speakers = [speakers[key] for key in self.names] if speakers else []

    def read(self, member: int) -> bytes:
        """The bytes of one member that `contents` did not yield; called from several threads."""
        raise AudioError(
            f"{self.name}: {self.files[member]}: the archive ends in the middle of this file"
        )

    def contents(self, members: np.ndarray) -> Iterator[bytes | None]:
        """Bytes of ascending members if the archive can only be read in order; otherwise None: call
        `read`.
        """
        yield from [None] * len(members)


class ZipAudio(Archive):
    """A zip archive, in one file or in pieces."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._zip = zipfile.ZipFile(open_pieces(paths))
        members = zip_members(self._zip, paths[0])
        for one in members:
            checked_relative(one.filename)
        # In the order of their bytes, so that a spinning disk reads sequentially.
        self._members = sorted(
            (one for one in members if _is_audio(one.filename)), key=lambda one: one.header_offset
        )
        super().__init__(
            str(paths[0]), [str(checked_relative(one.filename)) for one in self._members]
        )

    def read(self, member: int) -> bytes:
        with reading(f"{self.name}: {self.files[member]}", "a whole member", AudioError):
            return self._zip.read(self._members[member])


class TarAudio(Archive):
    """A tar archive, in one file or in pieces.

    A wespeaker or WebDataset shard has the speaker beside KEY.wav: in KEY.spk, KEY.cls or a field
    of KEY.json.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        files = []
        places = []
        speakers = {}
        # Opened for each read: a corpus of a thousand shards would keep a thousand files open.
        with open_pieces(paths) as file:
            # A compressed tar starts with the compressor's magic bytes, a plain one has its own at
            # byte 257.
            self._is_plain = file.read(262)[257:262] == b"ustar"
            file.seek(0)
            for archive, member in self._walk(file):
                name = str(checked_relative(member.name))
                if name.endswith(SPEAKER_SUFFIXES):
                    content = archive.extractfile(member).read(MAX_JSON_BYTES + 1)  # type: ignore[union-attr]
                    if name.endswith(".json"):
                        content = _speaker_in_json(content, paths[0], name)
                    if content:
                        speakers[without_suffix(name)] = _speaker(content, paths[0], name)
                elif _is_audio(name):
                    files.append(name)
                    places.append((member.offset_data, member.size))
        self._places = np.array(places, dtype=np.int64).reshape(-1, 2)
        unnamed = [one for one in files if without_suffix(one) not in speakers] if speakers else []
        if unnamed:
            raise ArchiveError(
                f"{paths[0]}: {unnamed[0]}: no {without_suffix(unnamed[0])}.spk in the shard (nor "
                ".cls or .json with its speaker); pack such tars separately"
            )
        super().__init__(str(paths[0]), files, speakers)

    def _walk(self, file: IO[bytes]) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
        with tarfile.open(fileobj=file, mode="r:" if self._is_plain else "r|*") as archive:
            for member in tar_members(archive, self._paths[0]):
                yield archive, member

    def contents(self, members: np.ndarray) -> Iterator[bytes | None]:
        """See `Archive.contents`. Plain archives are read at the members' offsets, compressed ones
        from end to end.
        """
        if not len(members):
            return
        with open_pieces(self._paths) as file:
            if self._is_plain:
                for offset, size in self._places[members].tolist():
                    file.seek(offset)
                    content = file.read(size)
                    yield content if len(content) == size else None
                return
            wanted = set(members.tolist())
            audio = (
                (archive, member) for archive, member in self._walk(file) if _is_audio(member.name)
            )
            for number, (archive, member) in enumerate(audio):
                if number in wanted:
                    yield archive.extractfile(member).read()  # type: ignore[union-attr]


def _speaker_in_json(content: bytes, path: Path, name: str) -> bytes:
    """The speaker in a JSON member of a WebDataset; empty if there is none."""
    with reading(
        f"{path}: {name}", f"a JSON object of at most {MAX_JSON_BYTES:,} bytes", ArchiveError
    ):
        fields = json.loads(content)
    fields = fields if isinstance(fields, dict) else {}
    return next((str(fields[field]).encode() for field in SPEAKER_FIELDS if field in fields), b"")


def _speaker(content: bytes, path: Path, name: str) -> str:
    """The speaker in a member beside the audio."""
    word = content.decode("utf-8", "replace").strip()
    if (
        len(content) > MAX_SPEAKER_BYTES
        or word.split() != [word]
        or "\ufffd" in word
        or "\0" in word
    ):
        raise ArchiveError(
            f"{path}: refused: {name}: {word[:40]!r}; expected one word, the speaker of the "
            "utterance"
        )
    return word


def _is_audio(name: str) -> bool:
    has_suffix = os.path.splitext(name)[1].lower() in AUDIO_SUFFIXES  # noqa: PTH122
    return has_suffix and not any(map(is_hidden, name.split("/")))


def without_suffix(name: str) -> str:
    """The name of a file without its last suffix."""
    return os.path.splitext(name)[0]  # noqa: PTH122
