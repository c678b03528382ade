"""The inputs of a packed corpus: the files of a folder or list, or members of zip and tar archives,
read in place.

Utterances of a Kaldi folder, of wespeaker's `raw.list` (one JSON object per line) and of its shards
(`shard.list`, one tar archive per line) are named by id, those of other archives by a list if there
is one. Archives are not unpacked: members are read into memory. Names are untrusted and are checked
before anything is read.
"""

import collections
import contextlib
import json
import logging
import os
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy import ndarray

from speakernet.corpora.archives import (
    ArchiveError,
    group_pieces,
    open_pieces,
    tar_members,
    zip_members,
)
from speakernet.corpora.steps import checked_relative, name_problem
from speakernet.data.audio import (
    AUDIO_SUFFIXES,
    EXPECTED,
    AudioError,
    AudioInfo,
    crop_of_file,
    open_audio,
    open_audio_bytes,
    to_int16,
)
from speakernet.data.folders import UnicodeNames, is_hidden, walk_recordings
from speakernet.data.lists import (
    BYTE_ORDER_MARK,
    MAX_SPEAKER_BYTES,
    RAW_LIST,
    UTT2SPK,
    WAV_SCP,
    ListError,
    ListFile,
    NameIndex,
    StringTable,
    not_a_file,
    read_training_list,
    read_wav_scp,
)
from speakernet.data.names import compose_accents
from speakernet.data.packing import PackInput
from speakernet.files import reading
from speakernet.terminal import MAX_NAMED

logger = logging.getLogger(__name__)

NOT_IN_ANY = -1
FOLDER = "folder"
KALDI = "Kaldi folder"
ARCHIVE = "archive"
SHARD_LIST = "shard.list"
RAW_FIELDS = ("key", "wav", "spk")
EXPECTED_RAW = "a JSON object with key, wav and spk, one line of text each"
SHARD_SUFFIXES = (b".tar", b".tar.gz", b".tgz")
SPEAKER_SUFFIXES = (".spk", ".cls", ".json")
SPEAKER_FIELDS = ("speaker", "spk", "speaker_id", "spk_id")
"""Fields of the JSON object beside an utterance in a WebDataset; the first one present counts."""
MAX_JSON_BYTES = 1 << 20
HEAD_BYTES = 65_536
SHOWN_CHARACTERS = 120  # of a malformed value


Recordings = tuple[StringTable, StringTable, StringTable | None]
"""Utterances, the file of each (absolute or relative to the working directory), and its speaker."""


class FileInput(PackInput):
    """Files by name: all recordings, or the listed ones; relative paths are below `root` or the
    working directory.
    """

    def __init__(
        self,
        names: StringTable,
        files: StringTable,
        speakers: StringTable | None,
        description: str,
        listed: StringTable | None = None,
        root: str = "",
    ) -> None:
        if listed is not None:
            rows = NameIndex(names).find(listed)
            names = listed
            # A listed name without a file has row -1, which gives an empty path.
            files = files.take(rows)
            speakers = speakers.take(rows) if speakers else None
        super().__init__(names, description, speakers)
        self._files = files
        self._root = root

    def decode(self, row: int, content: bytes | None, sample_rate: int) -> ndarray:
        """See `PackInput.decode`."""
        file = self._files[row]
        if not file:
            raise _absent(self, row)
        path = os.path.join(self._root, file)  # noqa: PTH118  called a million times
        with open_audio(path) as (opened, info):
            return _samples_of(opened, info, path, sample_rate)


class FolderInput(FileInput):
    """Files below a folder: those in a list, or all of them."""

    def __init__(self, root: str | Path, names: StringTable | None = None) -> None:
        if names is None:
            names = StringTable.from_strings(walk_recordings(root))
        with reading(root, "a folder, and a list of files in it", AudioError):
            for name in names:
                checked_relative(name)
        files = UnicodeNames(root).table(names)
        super().__init__(names, files, None, str(root), root=str(root))


class ArchiveInput(PackInput):
    """Members of one or several archives, and the listed names that none of them has."""

    def __init__(
        self, archives: Sequence["Archive"], listed: StringTable | None, strip: int | None
    ) -> None:
        # Archive and member of each name are arrays, because a corpus may have millions of names.
        names: list[str] = []
        speakers: list[str] = []
        of_archive = [np.zeros(0, dtype=np.int64)]
        of_member = [np.zeros(0, dtype=np.int64)]
        for number, archive in enumerate(archives):
            members, chosen = match_members(archive, listed, strip)
            names += chosen
            of_archive.append(np.full(len(members), number))
            of_member.append(members)
            if archive.speakers:
                speakers += [archive.speakers[member] for member in members.tolist()]
        description = ", ".join(archive.name for archive in archives[:MAX_NAMED])
        if len(archives) > MAX_NAMED:
            description += " and more"
        if len(set(names)) < len(names):
            (repeated, _), *_ = collections.Counter(names).most_common(1)
            raise ArchiveError(
                f"{description}: {repeated!r} occurs twice; pack the archives separately or change "
                "--strip"
            )
        # If one archive has no speakers, there is no training list for the whole.
        has_speakers = len(speakers) == len(names)
        if listed is not None:
            absent = np.flatnonzero(NameIndex(StringTable.from_strings(names)).find(listed) < 0)
            names += listed.take(absent)
            speakers += [""] * len(absent)
            of_archive.append(np.full(len(absent), NOT_IN_ANY))
            of_member.append(np.zeros_like(absent))
        super().__init__(
            StringTable.from_strings(names),
            description,
            StringTable.from_strings(speakers) if has_speakers else None,
        )
        self._archives = archives
        self._of_archive = np.concatenate(of_archive)
        self._of_member = np.concatenate(of_member)

    def items(self, rows: Iterable[int]) -> Iterator[tuple[int, bytes | None]]:
        """See `PackInput.items`. Archive by archive, because a compressed tar is a stream, which
        must be read in order.
        """
        rows = np.asarray(list(rows), dtype=np.int64)
        of_archive = self._of_archive[rows]
        # Within an archive, rows ascend, as `Archive.contents` expects of its members.
        for number, archive in enumerate(self._archives):
            some = rows[of_archive == number]
            yield from zip(some.tolist(), archive.contents(self._of_member[some]), strict=True)
        for row in rows[of_archive == NOT_IN_ANY].tolist():
            yield row, None

    def decode(self, row: int, content: bytes | None, sample_rate: int) -> ndarray:
        """See `PackInput.decode`."""
        if self._of_archive[row] == NOT_IN_ANY:
            raise _absent(self, row)
        archive = self._archives[self._of_archive[row]]
        member = int(self._of_member[row])
        # Members of a zip are read here, so that all threads unpack.
        if content is None:
            content = archive.read(member)
        label = f"{archive.name}: {archive.files[member]}"
        opened, info = open_audio_bytes(content, label)
        with reading(label, EXPECTED, AudioError):
            return _samples_of(opened, info, label, sample_rate)


def _samples_of(file: IO[bytes], info: AudioInfo, name: str, sample_rate: int) -> ndarray:
    """The whole of an open audio file as mono int16 (samples,)."""
    if info.is_truncated:
        # Nobody can see it in the packed corpus, whose lengths are right.
        logger.warning(
            "%s: cut off: the file is shorter than its header says; packed as it is", name
        )
    return to_int16(crop_of_file(file, info, name, 0, None, sample_rate))


def _absent(source: PackInput, row: int) -> AudioError:
    return AudioError(f"{source.names[row]}: it is in the list but not in {source.description}")


def open_inputs(
    sources: Sequence[str | Path], listed: StringTable | None = None, strip: int | None = None
) -> PackInput:
    """Open `sources` as one input: one folder, one list, or archives (the pieces of one archive
    count as one).
    """
    # Decided by content, because archives and lists come with any suffix or none.
    kinds = {Path(source): _kind(Path(source)) for source in sources}
    path, kind = next(iter(kinds.items()))
    if len(kinds) == 1:
        if kind == FOLDER:
            return FolderInput(path, listed)
        if kind == KALDI:
            return FileInput(*_read_kaldi_folder(path), str(path), listed)
        if kind == RAW_LIST:
            return FileInput(*read_raw_list(path), str(path), listed)
    archives: list[Path] = []
    for path, kind in kinds.items():
        if kind == SHARD_LIST:
            archives += read_shard_list(path)
        elif kind == ARCHIVE:
            archives.append(path)
        else:
            raise AudioError(
                "a folder or list is among several sources; expected one folder, one list, or only "
                "archives"
            )
    return ArchiveInput([open_archive(pieces) for pieces in group_pieces(archives)], listed, strip)


def match_members(
    archive: "Archive", listed: StringTable | None, strip: int | None
) -> tuple[ndarray, list[str]]:
    """Members to take, ascending, and their names in the corpus.

    With a list, members are matched to its names: leading folders that are not in the list are
    dropped, and a different suffix counts as a different format of the same recording (`.m4a` in
    the archive, `.wav` in the list).
    """
    folders = [name.split("/") for name in archive.names]
    if listed is None:
        stripped = ["/".join(steps[strip or 0 :]) for steps in folders]
        rows = [row for row, name in enumerate(stripped) if name]
        return np.array(rows, dtype=np.int64), [stripped[row] for row in rows]
    depths = range(max(map(len, folders), default=0)) if strip is None else [strip]
    # How many leading folders an archive has in addition to the names of the list differs between
    # corpora. So every depth is tried, and the one that finds most names wins; of equal ones, the
    # smallest. Suffixes are ignored only if nothing matches with them.
    best = np.full(len(folders), -1)
    for plain in (str, without_suffix):
        # A Mac's archive has decomposed names.
        index = NameIndex(StringTable.from_strings(plain(compose_accents(name)) for name in listed))
        for depth in depths:
            names = (plain(compose_accents("/".join(steps[depth:]))) for steps in folders)
            rows_of_list = index.find(StringTable.from_strings(names))
            if np.count_nonzero(rows_of_list >= 0) > np.count_nonzero(best >= 0):
                best = rows_of_list
        if (best >= 0).any():
            break
    members = np.flatnonzero(best >= 0)
    return members, list(listed.take(best[members]))


def _kind(path: Path) -> str:
    if path.is_dir():
        return KALDI if (path / WAV_SCP).is_file() else FOLDER
    with _open(path) as file:
        head = file.read(HEAD_BYTES)
    # The first bytes of archives include zeros, text has none.
    if b"\0" in head:
        return ARCHIVE
    first = head.removeprefix(BYTE_ORDER_MARK).lstrip().split(b"\n", 1)[0].strip()
    if first.startswith(b"{"):
        return RAW_LIST
    return SHARD_LIST if first.lower().endswith(SHARD_SUFFIXES) else ARCHIVE


def _open(*paths: Path) -> IO[bytes]:
    """Open the pieces of an archive, or one list, as one file."""
    for path in paths:
        if not path.is_file():
            raise AudioError(f"{path}: no such folder or archive")
    return open_pieces(paths)


def _read_kaldi_folder(folder: Path) -> Recordings:
    """The recordings of a Kaldi folder, with speakers if it has an `utt2spk`."""
    index, files = read_wav_scp(folder)
    if not (folder / UTT2SPK).is_file():
        return index.names, files, None
    listed = read_training_list(folder)
    rows = NameIndex(listed.paths).find(index.names)
    # An utterance without a speaker has row -1, which gives an empty name.
    speakers = listed.speakers.take(np.where(rows < 0, rows, listed.labels[rows]))
    return index.names, files, speakers


def read_raw_list(path: Path) -> Recordings:
    """Names, files and speakers of a `raw.list`; files are absolute or relative to the working
    directory.
    """
    file = ListFile(path)
    rows: list[list[str]] = []
    for number, line in file:
        text = line.decode("utf-8")
        row: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(text)
        problem = _raw_problem(row)
        if problem:
            file.refuse(number, f"{problem}; found {text[:SHOWN_CHARACTERS]!r}")
        else:
            rows.append([row[field] for field in RAW_FIELDS])
    if not rows:
        raise ListError(f"{path}: the list is empty; expected {EXPECTED_RAW} per line")
    names, files, speakers = map(StringTable.from_strings, zip(*rows, strict=True))
    NameIndex(names).refuse_repeated(path)
    return names, files, speakers


def _raw_problem(row: Any) -> str:
    """What is wrong with the object in one line of a `raw.list`; empty if nothing."""
    if not isinstance(row, dict) or not row.keys() >= set(RAW_FIELDS):
        return f"expected {EXPECTED_RAW}"
    if "vad" in row:
        return (
            "vad: segments are not supported; cut them with make_shard_list.py (--vad_file) "
            "and pack the shards"
        )
    for field in RAW_FIELDS:
        value = row[field]
        if not isinstance(value, str) or not value or name_problem(value) or "\0" in value:
            return f"{field}: expected {EXPECTED_RAW}"
    if len(row["spk"].split()) > 1:
        return "spk: expected one word"
    problem = not_a_file(row["wav"])
    return f"wav: {problem}" if problem else ""


def read_shard_list(path: Path) -> list[Path]:
    """The archives in a `shard.list`, absolute or relative to the working directory; ListError for
    an address.
    """
    file = ListFile(path)
    shards = []
    for number, line in file:
        text = line.decode("utf-8")
        if "://" in text:
            shown = repr(text[:SHOWN_CHARACTERS])
            file.refuse(number, f"{shown} is an address; fetch the shard and give the file")
        shards.append(Path(text))
    return shards


def open_archive(paths: Sequence[Path]) -> "Archive":
    """The archive that consists of the pieces `paths`."""
    expected = "a complete zip or tar archive; give all of its parts, or fetch it again"
    with reading(paths[0], expected, ArchiveError):
        with _open(*paths) as file:
            is_zip = zipfile.is_zipfile(file)
        return ZipAudio(paths) if is_zip else TarAudio(paths)


# How archives are read. A member of a zip can be unpacked on its own, so the threads that decode do
# that too, and every core unpacks. A plain tar is scanned once for the place of each member, which
# is then read like any file. A compressed tar is one stream: it is walked from end to end for the
# names and once more for the contents, by the one thread that feeds the others, which is slow but
# needs neither memory nor disk. Joining the pieces of an archive on disk first would be simpler,
# but needs the space of the whole archive once more.
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

    def contents(self, members: ndarray) -> Iterator[bytes | None]:
        """Bytes of ascending members if the archive can only be read in order; otherwise None: call
        `read`.
        """
        yield from [None] * len(members)


class ZipAudio(Archive):
    """A zip archive, in one file or in pieces."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._zip = zipfile.ZipFile(open_pieces(paths))
        # In the order of their bytes, so that a spinning disk reads sequentially.
        members = sorted(zip_members(self._zip, paths[0]), key=lambda member: member.header_offset)
        names = {member: str(checked_relative(member.filename)) for member in members}
        self._members = [member for member, name in names.items() if _is_audio(name)]
        super().__init__(str(paths[0]), [names[member] for member in self._members])

    def read(self, member: int) -> bytes:
        # From several threads: zipfile locks the file for each read.
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
        speakers: dict[str, str] = {}
        # Opened for each read: a corpus of a thousand shards would keep a thousand files open.
        with open_pieces(paths) as file:
            # A compressed tar starts with the compressor's magic bytes, a plain one has its own at
            # byte 257.
            self._is_plain = file.read(262)[257:262] == b"ustar"
            file.seek(0)
            # A speaker may come before or after its audio, so they are matched at the end.
            for archive, member in self._walk(file):
                name = str(checked_relative(member.name))
                if name.endswith(SPEAKER_SUFFIXES):
                    file_of_speaker = archive.extractfile(member)
                    assert file_of_speaker is not None, "tar_members yields files only"
                    # Limited, because a member of an archive may have any size.
                    content = file_of_speaker.read(MAX_JSON_BYTES + 1)
                    speaker = _speaker(content, f"{paths[0]}: {name}")
                    if speaker:
                        speakers[without_suffix(name)] = speaker
                elif _is_audio(name):
                    files.append(name)
                    places.append((member.offset_data, member.size))
        self._places = np.array(places, dtype=np.int64).reshape(-1, 2)  # (members, 2)
        for name in files:
            if speakers and without_suffix(name) not in speakers:
                raise ArchiveError(
                    f"{paths[0]}: {name}: no {without_suffix(name)}.spk in the shard (nor .cls or "
                    ".json with its speaker); pack such tars separately"
                )
        super().__init__(str(paths[0]), files, speakers)

    def _walk(self, file: IO[bytes]) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
        with tarfile.open(fileobj=file, mode="r:" if self._is_plain else "r|*") as archive:
            for member in tar_members(archive, self._paths[0]):
                yield archive, member

    def contents(self, members: ndarray) -> Iterator[bytes | None]:
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
            # Counted like `files`, so that a member has the same number as there.
            chosen = set(members.tolist())
            number = 0
            for archive, member in self._walk(file):
                if _is_audio(member.name):
                    if number in chosen:
                        yield archive.extractfile(member).read()  # type: ignore[union-attr]
                    number += 1


def _speaker(content: bytes, place: str) -> str:
    """The speaker in a member beside the audio: the whole of it, or a field of a JSON object;
    empty if there is none.
    """
    if place.endswith(".json"):
        with reading(place, f"a JSON object of at most {MAX_JSON_BYTES:,} bytes", ArchiveError):
            fields = dict(json.loads(content))
        present = [str(fields[field]) for field in SPEAKER_FIELDS if field in fields]
        if not present:
            return ""
        content = present[0].encode()
    word = content.decode("utf-8", "replace").strip()
    # A space would split the line of a training list; \ufffd stands for bytes that are not UTF-8.
    is_word = word.split() == [word] and not {"\ufffd", "\0"} & set(word)
    if len(content) > MAX_SPEAKER_BYTES or not is_word:
        raise ArchiveError(
            f"{place}: refused: {word[:40]!r}; expected one word, the speaker of the utterance"
        )
    return word


def _is_audio(name: str) -> bool:
    has_suffix = os.path.splitext(name)[1].lower() in AUDIO_SUFFIXES  # noqa: PTH122
    return has_suffix and not any(map(is_hidden, name.split("/")))


def without_suffix(name: str) -> str:
    """The name of a file without its last suffix."""
    return os.path.splitext(name)[0]  # noqa: PTH122
