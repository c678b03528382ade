"""Training and trial lists as compact arrays: read first, and what samplers and sources refer to by row.

A Kaldi folder (`utt2spk` and `wav.scp`) is a training list as well; its utterances go by their ids. A million rows are
two byte buffers and two integer arrays, never a Python object a row, so that worker processes share them for nothing.
Nothing here opens audio. The end of the file recognises published trial lists.
"""

import functools
import hashlib
import itertools
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from speakernet.data.sharing import Shareable
from speakernet.files import FileError, atomic_write, digest_of, open_regular, own_command, reading
from speakernet.terminal import MAX_NAMED

BLOCK_BYTES = 1 << 16  # Lines are split by blocks of about this size, so that their words are few at a time.
LONGEST_LINE_BYTES = 64 << 10  # A path has 4 KiB at most, a trial two of them.
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SHOWN_CHARACTERS = 120  # of a malformed line
MAX_SPEAKER_BYTES = 255
UTT2SPK, WAV_SCP, SEGMENTS = "utt2spk", "wav.scp", "segments"
KALDI_ARCHIVE = re.compile(rb"\.ark(?:\.gz)?:\d+$")
NAMES_AT_ONCE = 1 << 13


class ListError(FileError):
    """A list that cannot be used; the message names the file, the line and what was expected."""


@dataclass
class MalformedRows:
    """Rows that a list of their kind may not hold: how many there are, and a sentence on each of the first."""

    limit: int = MAX_NAMED
    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, sentence: str) -> None:
        """Count one, and keep it if it is among the first."""
        self.count += 1
        if len(self.first) < self.limit:
            self.first.append(sentence)


class ListFile:
    """A list that is being read: its lines, its checksum, and its malformed rows."""

    def __init__(self, path: str | Path, malformed: MalformedRows | None) -> None:
        self.path = path
        self._malformed = malformed
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Of what was read so far."""
        return self._digest.hexdigest()

    def refuse(self, number: int, problem: str) -> None:
        """Count a malformed line, which is then left out; without `malformed` it is an error."""
        if self._malformed is None:
            raise ListError(f"{self.path}, line {number}: {problem}")
        self._malformed.add(f"line {number}: {problem}")

    def expected(self, number: int, form: str, line: bytes) -> None:
        """Refuse a line that is not of a form."""
        self.refuse(number, f"expected {form}, found {line.decode('utf-8').strip()[:SHOWN_CHARACTERS]!r}")

    def blocks(self) -> Iterator[tuple[int, list[bytes]]]:
        """Many lines at a time, with the number of the first; those that are not text are empty."""
        expected = (
            f"a text file. Lists are made by {own_command('prepare folder')} of your recordings, by "
            f"{own_command('prepare voxceleb')} of VoxCeleb"
        )
        with reading(self.path, expected, ListError), open_regular(self.path) as file:
            rest: bytes | None = b""
            number = 1
            is_old_mac: bool | None = None
            while rest is not None:
                data = file.read(BLOCK_BYTES)
                self._digest.update(data)
                if is_old_mac is None:
                    data = data.removeprefix(BYTE_ORDER_MARK)
                    is_old_mac = b"\r" in data and b"\n" not in data
                lines = (rest + (data.replace(b"\r", b"\n") if is_old_mac else data)).split(b"\n")
                # The last line may go on in the next block.
                rest = lines.pop() if data else None
                for place, line in enumerate([*lines, rest or b""]):
                    if len(line) > LONGEST_LINE_BYTES:
                        raise ListError(
                            f"{self.path}, line {number + place}: longer than {LONGEST_LINE_BYTES:,} bytes; expected a "
                            "list with a line for each utterance or trial"
                        )
                if not _is_text(b"\n".join(lines)):
                    for place, line in enumerate(lines):
                        if not _is_text(line):
                            self.refuse(number + place, "not UTF-8 text; save the list as UTF-8")
                            lines[place] = b""
                yield number, lines
                number += len(lines)


def _is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def split_row(line: bytes) -> list[bytes]:
    """The words of a line; one with tabs is split at tabs only, so that names may hold spaces."""
    if b"\t" not in line:
        return line.split()
    return [word.strip() for word in line.strip().split(b"\t") if word]


class Numbers(dict[bytes, int]):
    """Words and their numbers, in order of first mention: a new word is given the next one."""

    def __missing__(self, word: bytes) -> int:
        number = self[word] = len(self)
        return number


def one_word(speaker: str) -> str:
    """The speaker's name with white space turned to underscores, since a list ends the speaker at white space.

    >>> one_word("Anna Maria")
    'Anna_Maria'
    """
    return "_".join(speaker.split())


class StringTable(Shareable, Sequence[str]):
    """Many strings in one UTF-8 buffer: `offsets[i]:offsets[i + 1]` are the bytes of string i."""

    shared_arrays = ("content", "offsets")

    def __init__(self, content: np.ndarray, offsets: np.ndarray) -> None:
        self.content = np.asarray(content, dtype=np.uint8)
        self.offsets = np.asarray(offsets, dtype=np.int64)

    @classmethod
    def from_bytes(cls, strings: Iterable[Sequence[bytes]]) -> "StringTable":
        """A table of blocks of encoded strings, in their order."""
        contents, lengths = [b""], [np.zeros(1, dtype=np.int64)]
        for block in strings:
            contents.append(b"".join(block))
            lengths.append(np.fromiter(map(len, block), np.int64, len(block)))
        return cls(np.frombuffer(b"".join(contents), dtype=np.uint8), np.cumsum(np.concatenate(lengths)))

    @classmethod
    def from_strings(cls, strings: Iterable[str]) -> "StringTable":
        """A table of the strings, in their order."""
        return cls.from_bytes([[string.encode("utf-8", "surrogateescape") for string in strings]])

    @functools.cached_property
    def checksum(self) -> int:
        """CRC-32 of the strings in their order."""
        return zlib.crc32(self.offsets.tobytes(), zlib.crc32(self.content.tobytes()))

    def take(self, rows: np.ndarray) -> "StringTable":
        """The table of the strings at `rows` (an empty one for row -1)."""
        rows = np.asarray(rows, dtype=np.int64)
        blocks = (rows[first : first + NAMES_AT_ONCE] for first in range(0, len(rows), NAMES_AT_ONCE))
        # Row -1 would end before it begins, which is an empty string.
        return StringTable.from_bytes(self.raws(block) for block in blocks)

    def raw(self, row: int) -> bytes:
        """The UTF-8 bytes of string `row`, as the operating system takes paths."""
        return self.content[self.offsets[row] : self.offsets[row + 1]].tobytes()

    def raws(self, rows: np.ndarray) -> list[bytes]:
        """`raw` for many rows, with one look at the offsets."""
        content = self.content.data
        ends = self.offsets[rows + 1].tolist()
        return [content[start:end].tobytes() for start, end in zip(self.offsets[rows].tolist(), ends, strict=True)]

    def each_raw(self) -> Iterator[bytes]:
        """`raw` for all rows, few of them at a time."""
        for first in range(0, len(self), NAMES_AT_ONCE):
            yield from self.raws(np.arange(first, min(first + NAMES_AT_ONCE, len(self))))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row):  # type: ignore[no-untyped-def, override]
        if isinstance(row, slice):
            return [self[one] for one in range(*row.indices(len(self)))]
        if row < 0:
            row += len(self)
        if not 0 <= row < len(self):
            raise IndexError(row)
        return self.raw(row).decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (raw.decode("utf-8", "surrogateescape") for raw in self.each_raw())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StringTable):
            return NotImplemented
        return np.array_equal(self.offsets, other.offsets) and np.array_equal(self.content, other.content)

    __hash__ = None  # type: ignore[assignment]


class NameIndex:
    """Rows of a table by name: hashes in order, 16 bytes a name, where a dictionary would take ten times as much."""

    def __init__(self, names: StringTable) -> None:
        self._names = names
        hashes = np.fromiter(map(hash, names.each_raw()), np.int64, len(names))
        self._order = np.argsort(hashes, kind="stable")
        self._sorted = hashes[self._order]

    def find(self, names: StringTable) -> np.ndarray:
        """The first row that has each name, -1 if none has; int64 (names,)."""
        if not len(self._sorted):
            return np.full(len(names), -1, dtype=np.int64)
        hashes = np.fromiter(map(hash, names.each_raw()), np.int64, len(names))
        rows = self._order[np.minimum(np.searchsorted(self._sorted, hashes), len(self._sorted) - 1)]
        # Of two names with one hash, which no one will see, the second is not found, never taken for the first.
        pairs = zip(names.each_raw(), self._names.take(rows).each_raw(), strict=True)
        return np.where(np.fromiter((one == other for one, other in pairs), bool, len(names)), rows, -1)

    def refuse_repeated(self, path: str | Path) -> None:
        """Raise ListError if a name occurs twice."""
        repeated = np.flatnonzero(self.find(self._names) != np.arange(len(self._names)))
        if len(repeated):
            raise ListError(f"{path}: {self._names[int(repeated[0])]!r} is there twice; remove one")


@dataclass
class TrainingList:
    """A training list: path and speaker of every utterance."""

    paths: StringTable
    labels: np.ndarray
    speakers: StringTable
    source: str
    sha256: str = ""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass
class TrialList:
    """A trial list: pairs of rows of `names`."""

    names: StringTable
    enrol: np.ndarray
    test: np.ndarray
    labels: np.ndarray | None
    source: str
    sha256: str = ""

    def __len__(self) -> int:
        return len(self.enrol)

    @functools.cached_property
    def checksum(self) -> int:
        """CRC-32 of the trials: names, pairs and labels."""
        total = self.names.checksum
        for column in (self.enrol, self.test, self.labels):
            total = zlib.crc32(b"" if column is None else column.tobytes(), total)
        return total


@dataclass
class Recordings:
    """Which file, absolute or from the working directory, holds which utterance, and who speaks (None: not known)."""

    names: StringTable
    files: StringTable
    speakers: StringTable | None = None


def audio_folder_of(path: str | Path) -> Path:
    """The default folder of a list's audio: a Kaldi folder itself, else the folder of the list."""
    return Path(path) if Path(path).is_dir() else Path(path).parent


def read_training_list(path: str | Path, malformed: MalformedRows | None = None) -> TrainingList:
    """Read `speaker path` lines; the path is all after the first white space. Blank lines are skipped."""
    if Path(path).name in (UTT2SPK, WAV_SCP):
        # Its columns are the other way round: every utterance would be a speaker.
        raise ListError(f"{path}: a file of a Kaldi folder; name the folder, {Path(path).parent}")
    is_kaldi = Path(path).is_dir()
    file = ListFile(Path(path) / UTT2SPK if is_kaldi else path, malformed)
    if is_kaldi and not Path(file.path).is_file():
        raise ListError(
            f"{path}: a folder without {UTT2SPK}; expected a list of 'speaker path' lines, or a Kaldi folder with "
            f"{WAV_SCP} and {UTT2SPK}"
        )
    speakers = Numbers()
    labels, paths = [np.empty(0, dtype=np.int32)], []
    form = "'utterance speaker'" if is_kaldi else "'speaker path'"
    for block in _pairs_of(file, form, _long_speaker, is_kaldi=is_kaldi):
        labels.append(np.fromiter(map(speakers.__getitem__, block[0]), np.int32, len(block[0])))
        paths.append(block[1])
    # By name, not by first mention: a list that is shuffled has the same classes.
    by_name = sorted(speakers)
    new_label = np.empty(len(speakers), dtype=np.int32)
    new_label[[speakers[name] for name in by_name]] = np.arange(len(speakers))
    known = StringTable.from_bytes([by_name])
    return TrainingList(StringTable.from_bytes(paths), new_label[np.concatenate(labels)], known, str(path), file.sha256)


def _pairs_of(
    file: ListFile, form: str, problem_of: Callable[[list[bytes]], str], *, is_kaldi: bool = False
) -> Iterator[list[list[bytes]]]:
    """Both columns of a list of two, block after block: the speaker or the id, and all the rest of the line."""
    is_empty = True
    for number, lines in file.blocks():
        pairs = [line.strip().split(None, 1) for line in lines]
        if is_kaldi:
            # The speaker comes last, and an utterance is one word.
            pairs = [pair[::-1] if len(pair) < 2 or len(pair[1].split()) == 1 else [*pair, b""] for pair in pairs]
        for place, pair in enumerate(pairs):
            if len(pair) == 2:
                if problem := problem_of(pair):
                    file.refuse(number + place, problem)
                    pairs[place] = []
            elif pair:
                file.expected(number + place, form, lines[place])
                pairs[place] = []
        kept = [pair for pair in pairs if pair]
        if kept:
            is_empty = False
            yield [list(column) for column in zip(*kept, strict=True)]
    if is_empty:
        raise ListError(f"{file.path}: the list is empty; expected one {form} a line")


def read_wav_scp(path: str | Path) -> Recordings:
    """Read the `utterance file` lines of Kaldi's `wav.scp`; the file is all after the first white space."""
    blocks = zip(*_pairs_of(ListFile(path, None), "'utterance file'", _no_file), strict=True)
    return Recordings(*map(StringTable.from_bytes, blocks))


def _long_speaker(pair: list[bytes]) -> str:
    num_bytes = len(pair[0])
    return (
        f"a speaker name of {num_bytes} bytes; at most {MAX_SPEAKER_BYTES} are taken"
        if num_bytes > MAX_SPEAKER_BYTES
        else ""
    )


def _no_file(pair: list[bytes]) -> str:
    is_one = not (pair[1].endswith(b"|") or KALDI_ARCHIVE.search(pair[1]))
    return "" if is_one else not_a_file(pair[1].decode("utf-8"))


def not_a_file(text: str) -> str:
    """Why a command or a place in one of Kaldi's archives is refused in place of a file."""
    what = "a command, which no list may start" if text.endswith("|") else "a place in a Kaldi archive"
    return f"{text!r} is {what}; write the audio out as WAV files and name those"


class TrialForm(NamedTuple):
    """One of the forms of a trial list's lines: a description, fields, labels and which field the label is."""

    words: str
    num_fields: int
    labels: dict[bytes, int]
    label: int = 0

    def takes(self, row: Sequence[bytes]) -> bool:
        """Whether a line's words are of this form."""
        is_labelled = len(row) == self.num_fields and (not self.labels or row[self.label] in self.labels)
        return is_labelled and all(row)


FORMS = (
    TrialForm("'1 enrol test' or '0 enrol test' (as its other lines)", 3, {b"0": 0, b"1": 1}),
    TrialForm(
        "'enrol test target' or 'enrol test nontarget' (as its other lines)", 3, {b"nontarget": 0, b"target": 1}, 2
    ),
    TrialForm("'enrol test' (as its other lines)", 2, {}),
)
TRIAL_FORMS = "'1 enrol test' or '0 enrol test', 'enrol test target|nontarget', or 'enrol test' for unlabelled pairs"


def read_trials(path: str | Path, malformed: MalformedRows | None = None) -> TrialList:
    """Read trials: label first (`1 enrol test`), Kaldi's (`enrol test target`) or unlabelled pairs; one form a file.

    A line with tabs is split at tabs only, so that names may hold spaces.
    """
    file = ListFile(path, malformed)
    numbers = Numbers()
    pairs: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    form: TrialForm | None = None
    for number, lines in file.blocks():
        rows = [split_row(line) for line in lines]
        # A file has the form of the first line that has any.
        form = form or next((one for row in rows for one in FORMS if one.takes(row)), None)
        kept = [row for row in rows if form is not None and form.takes(row)]
        if len(kept) < len(rows):
            for place, row in enumerate(rows):
                if row and not (form and form.takes(row)):
                    file.expected(number + place, form.words if form else TRIAL_FORMS, lines[place])
        if form is None or not kept:
            continue
        columns = list(zip(*kept, strict=True))
        if form.labels:
            labels.append(np.fromiter(map(form.labels.__getitem__, columns.pop(form.label)), np.int8, len(kept)))
        # In the order of the file, so that a row's number is that of the first mention.
        mentioned = itertools.chain.from_iterable(zip(*columns, strict=True))
        pairs.append(np.fromiter(map(numbers.__getitem__, mentioned), np.int32, 2 * len(kept)))
    if not pairs:
        raise ListError(f"{path}: the list is empty; expected lines {TRIAL_FORMS}")
    both = np.concatenate(pairs).reshape(-1, 2)
    known = np.concatenate(labels) if labels else None
    # A dictionary keeps the order in which it grew, so position n of it is row n.
    names = StringTable.from_bytes([list(numbers)])
    return TrialList(names, both[:, 0].copy(), both[:, 1].copy(), known, str(path), file.sha256)


def repeated_trials(trials: TrialList) -> tuple[int, np.ndarray]:
    """How many trials repeat an ordered pair, and which rows of them contradict its label, int64 (rows,)."""
    # Row numbers of a million names, multiplied, pass 2^31.
    pairs = trials.enrol.astype(np.int64) * len(trials.names) + trials.test
    order = np.argsort(pairs, kind="stable")
    is_again = np.diff(pairs[order]) == 0
    if trials.labels is None:
        return int(is_again.sum()), np.empty(0, dtype=np.int64)
    return int(is_again.sum()), np.sort(order[1:][is_again & (np.diff(trials.labels[order]) != 0)])


def write_training_list(path: str | Path, pairs: Iterable[tuple[str, str]]) -> None:
    """Write (speaker, path) pairs, atomically."""
    with atomic_write(path) as file:
        for speaker, name in pairs:
            if not speaker or speaker.split() != [speaker] or not name.strip() or len(name.splitlines()) != 1:
                raise ListError(f"{path}: speaker {speaker!r}, path {name!r}: a speaker is one word, a path one line")
            file.write(f"{speaker} {name}\n")


def write_trials(path: str | Path, rows: Iterable[tuple[int | None, str, str]]) -> None:
    """Write (label, enrol, test) rows, label first, atomically; label None writes unlabelled pairs.

    Names with spaces make the line tab-separated.
    """
    with atomic_write(path) as file:
        for label, enrol, test in rows:
            fields = [*([] if label is None else [str(int(label))]), enrol, test]
            if any("\t" in field or len(field.splitlines()) != 1 for field in fields):
                raise ListError(
                    f"{path}: cannot write the trial {fields}: names hold a tab or a line break, or are empty"
                )
            file.write(("\t" if any(" " in field for field in fields) else " ").join(fields) + "\n")


class PublishedList(NamedTuple):
    """A published list: trials, targets, MD5 of the file, and SHA-256 of `_normal_form_sha256` if it is known."""

    name: str
    num_trials: int
    num_targets: int
    md5: str
    normal_form_sha256: str = ""


# Counts and MD5 sums: the corpus's own page, http://www.robots.ox.ac.uk/~vgg/data/voxceleb/. The sums of the normal
# form were computed from the published files of VoxCeleb1-O; those of E and H were not at hand.
PUBLISHED = (
    PublishedList(
        *("VoxCeleb1-O, original", 37720, 18860, "29fc7cc1c5d59f0816dc15d6e8be60f7"),
        "933fa89593c5814fae4183b1bda4ca567139e048d483d8673fa24c7eb642ff06",
    ),
    PublishedList(
        *("VoxCeleb1-O, cleaned", 37611, 18802, "b73110731c9223c1461fe49cb48dddfc"),
        "4624b63da6b55bcc232e4dd77ff42a34e51732d5d7cdf1f1c952bb511f56268d",
    ),
    PublishedList("VoxCeleb1-E, original", 581480, 290743, "b9ecf7aa49d4b656aa927a8092844e4a"),
    PublishedList("VoxCeleb1-E, cleaned", 579818, 289921, "a53e059deb562ffcfc092bf5d90d9f3a"),
    PublishedList("VoxCeleb1-H, original", 552536, 276270, "21c341b6b2168eea2634df0fb4b8fff1"),
    PublishedList("VoxCeleb1-H, cleaned", 550894, 275488, "857790e09d579a68eb2e339a090343c8"),
)
VOXCELEB_NAME = re.compile(r"(?:.*/)?(id1\d{4}/[\w-]{11}/\d{5})(?:\.\w+)?")
"""Speaker, video and clip of a VoxCeleb1 utterance, in any folder and with any file ending."""


@dataclass(frozen=True)
class ListIdentity:
    """Which published list a trial list is: its name (empty: none), how it was recognised, what it is confused with."""

    name: str = ""
    sentence: str = ""
    confused_with: str = ""


def list_identity(trials: TrialList) -> ListIdentity:
    """Say which published list a trial list is, so that a figure is compared with its own kind.

    Original and cleaned VoxCeleb1 lists differ by a sixth of the error rate; the file's name does not show it. A
    list is recognised by the MD5 of the published file, else by its content, else by its counts and names.
    """
    published = next((one for one in PUBLISHED if one.num_trials == len(trials)), None)
    if published is None:
        return ListIdentity()
    name, size = published.name, f"{len(trials):,} trials"
    # The original and the cleaned list are neighbours.
    other = PUBLISHED[PUBLISHED.index(published) ^ 1]
    confused = f"often confused with {other.name} ({other.num_trials:,} trials); their error rates must not be compared"
    path = Path(trials.source)
    if path.is_file() and digest_of(path, "md5") == published.md5:
        return ListIdentity(name, f"this is {name}, {size}, as published", confused)
    if trials.labels is None:
        return ListIdentity(name, f"as many pairs as {name} ({size}), without labels", confused)
    num_targets = int(np.count_nonzero(trials.labels))
    if num_targets != published.num_targets:
        found = f"as many trials as {name} ({size}), but {num_targets:,} targets in place of {published.num_targets:,}"
        return ListIdentity("", f"{found}: not that list as published")
    content = _normal_form_sha256(trials)
    if content and content == published.normal_form_sha256:
        return ListIdentity(name, f"this is {name}, {size}, the published trials in another layout", confused)
    same = f"as many trials and targets as {name} ({size}), but other"
    if not content:
        return ListIdentity("", f"{same} names than VoxCeleb1's")
    if published.normal_form_sha256:
        return ListIdentity("", f"{same} trials, or in another order", confused)
    likely = f"most likely {name}: {size}, its number of targets and VoxCeleb1's names; the order is not checked"
    return ListIdentity(name, likely, confused)


def identify_trials(trials: TrialList) -> str:
    """A sentence on which published list this is; empty if it is none of them."""
    found = list_identity(trials)
    return "; ".join(text for text in (found.sentence, found.confused_with) if text)


def _normal_form_sha256(trials: TrialList) -> str:
    """SHA-256 of `label speaker/video/clip speaker/video/clip` lines; empty if a name is not VoxCeleb1's."""
    found = [VOXCELEB_NAME.fullmatch(name) for name in trials.names]
    names = [one.group(1) for one in found if one is not None]
    if len(names) != len(found) or trials.labels is None:
        return ""
    digest = hashlib.sha256()
    for label, enrol, test in zip(trials.labels.tolist(), trials.enrol.tolist(), trials.test.tolist(), strict=True):
        digest.update(f"{label} {names[enrol]} {names[test]}\n".encode())
    return digest.hexdigest()
