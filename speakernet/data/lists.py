"""Training and trial lists as compact arrays: read first, and what samplers and sources refer to by row.

A Kaldi folder (`utt2spk` and `wav.scp`) is a training list as well; its utterances go by their ids.

A million rows are two byte buffers and two integer arrays, never a Python object a row, so that worker processes share
them for nothing. Nothing here opens audio.
"""

import functools
import hashlib
import itertools
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from speakernet.data.sharing import SharedArray
from speakernet.files import FileError, atomic_write, open_regular, own_command, reading
from speakernet.terminal import MAX_NAMED

BLOCK_BYTES = 8 << 20  # Lines are split by blocks of about this size, so that the masks stay small.
LONGEST_LINE_BYTES = 64 << 10  # A path has 4 KiB at most, a trial two of them.
NEWLINE, TAB, SPACE = 10, 9, 32
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SHOWN_CHARACTERS = 120  # of a malformed line
_WHITESPACE = np.zeros(256, dtype=bool)
_WHITESPACE[[9, 10, 11, 12, 13, 32]] = True


class ListError(FileError):
    """A list that cannot be used; the message names the file, the line and what was expected."""


@dataclass
class MalformedRows:
    """Rows that a list of their kind may not hold, found by the list's own reader.

    Attributes:
        limit: rows that are kept in words.
        count: how many there are.
        first: the first of them, as "line 7: expected 'speaker path', found 'b'".
    """

    limit: int = MAX_NAMED
    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, sentence: str) -> None:
        """Count one, and keep it if it is among the first."""
        self.count += 1
        if len(self.first) < self.limit:
            self.first.append(sentence)


class ListFile:
    """A list that is being read: its lines, its checksum, and what becomes of malformed ones."""

    def __init__(self, path: str | Path, malformed: MalformedRows | None) -> None:
        self.path = path
        self._malformed = malformed
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Of what was read so far."""
        return self._digest.hexdigest()

    def refuse(self, line: int, problem: str) -> None:
        """Note a malformed line, which is then left out; where nobody takes notes it ends the reading."""
        if self._malformed is None:
            raise ListError(f"{self.path}, line {line}: {problem}")
        self._malformed.add(f"line {line}: {problem}")

    def blocks(self, *, tabs_only_where_present: bool) -> Iterator["Lines"]:
        """The lines of the file, many at a time; those that are no text are blank."""
        expected = (
            f"a text file. Lists are made by {own_command('prepare folder')} of your recordings, by "
            f"{own_command('prepare voxceleb')} of VoxCeleb"
        )
        with reading(self.path, expected, ListError), open_regular(self.path) as file:
            rest, line = b"", 1
            is_old_mac: bool | None = None
            while True:
                data = file.read(BLOCK_BYTES)
                self._digest.update(data)
                if is_old_mac is None:
                    is_old_mac = b"\r" in data and b"\n" not in data
                # Lines that end in a carriage return alone would be one.
                block = rest + (data.replace(b"\r", b"\n") if is_old_mac else data)
                # The last line may go on in the next block; at the end of the file it need not end in a line break.
                cut = block.rfind(b"\n") + 1 if data else len(block)
                block, rest = block[:cut], block[cut:]
                self._refuse_long(rest, line + block.count(b"\n"))
                # A byte-order mark, as Windows' editors write it, would become part of the first name.
                block = block.removeprefix(BYTE_ORDER_MARK) if line == 1 else block
                if block:
                    lines = _split_lines(self._text_only(block, line), line, tabs_only_where_present)
                    longest = int(np.diff(lines.line_starts, append=len(block)).argmax())
                    self._refuse_long(block[lines.line_starts[longest] :].split(b"\n", 1)[0], line + longest)
                    yield lines
                    line += block.count(b"\n")
                if not data:
                    return

    def _refuse_long(self, content: bytes, line: int) -> None:
        """Refuse what is no list at all, before its one line takes fifty times its size."""
        if len(content) > LONGEST_LINE_BYTES:
            raise ListError(
                f"{self.path}, line {line}: longer than {LONGEST_LINE_BYTES:,} bytes; expected a list with a line for "
                "each utterance or trial"
            )

    def _text_only(self, block: bytes, first_line: int) -> bytes:
        if _is_text(block):
            return block
        lines = block.split(b"\n")
        for number, content in enumerate(lines):
            if not _is_text(content):
                self.refuse(first_line + number, "not UTF-8 text; save the list as UTF-8")
                lines[number] = b""
        return b"\n".join(lines)


def _is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


@dataclass
class Lines:
    """Whole lines, split into words.

    Attributes:
        content: their bytes, uint8 (bytes,).
        first_line: number of the first line in the file.
        has_tabs: whether some are split at tabs only, so that a word may have spaces around it.
        line_starts: first byte of each line, (lines,).
        starts: first byte of each word, (words,).
        ends: byte after each word, (words,).
        first: first word of each line, (lines,).
        count: number of words of each line, (lines,).
    """

    content: np.ndarray
    first_line: int
    has_tabs: bool
    line_starts: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    first: np.ndarray
    count: np.ndarray

    def number(self, line: int) -> int:
        """A line's number in the file."""
        return self.first_line + line

    def words(self) -> list[bytes]:
        """Every word, in order."""
        content = self.content.tobytes()
        if not self.has_tabs:
            # Splits at the very bytes of `_WHITESPACE`, four times as fast as slices.
            return content.split()
        return [content[one:end].strip() for one, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True)]

    def text(self, line: int) -> str:
        """A line for a message."""
        start = int(self.line_starts[line])
        stop = int(self.line_starts[line + 1]) if line + 1 < len(self.line_starts) else len(self.content)
        return self.content[start:stop].tobytes().decode("utf-8", "replace").strip()[:SHOWN_CHARACTERS]


class Column:
    """One word of every line (or several), collected from the blocks of a list."""

    def __init__(self) -> None:
        self._contents: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []

    def __len__(self) -> int:
        return sum(map(len, self._lengths))

    def add(self, content: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """Bytes `starts[i]:ends[i]` of a block, ascending."""
        # +1 where a string begins, -1 behind its end: the running sum marks the bytes of all at once.
        mark = np.zeros(len(content) + 1, dtype=np.int8)
        mark[starts] = 1
        mark[ends] = -1
        self._contents.append(content[np.cumsum(mark[:-1], dtype=np.int8).view(bool)])
        self._lengths.append(ends - starts)

    def joined(self) -> tuple[np.ndarray, np.ndarray]:
        """All of them end to end, and where each starts: what a `StringTable` is made of."""
        offsets = np.zeros(len(self) + 1, dtype=np.int64)
        np.cumsum(np.concatenate(self._lengths), out=offsets[1:])
        return np.concatenate(self._contents), offsets


class Numbers(dict[bytes, int]):
    """Words and their numbers, in order of first mention: a new word is given the next one."""

    def __missing__(self, word: bytes) -> int:
        number = self[word] = len(self)
        return number


def number_words(block: np.ndarray, starts: np.ndarray, ends: np.ndarray, names: dict[bytes, int]) -> np.ndarray:
    """Number of the words `starts[i]:ends[i]` in order of first mention, int32 (words,); grows `names`."""
    lengths = ends - starts
    width = int(lengths.max())
    columns = np.arange(width)
    # Zero-padded rows of equal width compare as NumPy byte strings; the text was checked to hold no zero byte.
    positions = np.minimum(starts[:, None] + columns, len(block) - 1)
    table = np.where(columns < lengths[:, None], block[positions], 0).astype(np.uint8)
    words = np.ascontiguousarray(table).view(f"S{width}")[:, 0]
    # Lists come grouped by speaker more often than not: only the first of each run is looked up.
    is_head = np.ones(len(words), dtype=bool)
    is_head[1:] = words[1:] != words[:-1]
    heads = np.array([names.setdefault(word, len(names)) for word in words[is_head].tolist()], dtype=np.int32)
    return heads[np.cumsum(is_head) - 1]


def _split_lines(block: bytes, first_line: int, tabs_only_where_present: bool) -> Lines:
    content = np.frombuffer(block, dtype=np.uint8)
    is_gap = _WHITESPACE[content]
    line_ends = np.flatnonzero(content == NEWLINE)
    if not len(line_ends) or line_ends[-1] != len(content) - 1:
        line_ends = np.append(line_ends, len(content))
    line_starts = np.concatenate([[0], line_ends[:-1] + 1])
    has_tabs = tabs_only_where_present and b"\t" in block
    if has_tabs:
        tabs = np.flatnonzero(content == TAB)
        has_tab = np.searchsorted(tabs, line_ends) > np.searchsorted(tabs, line_starts)
        lengths = np.diff(np.append(line_starts, len(content)))
        is_gap &= ~(np.repeat(has_tab, lengths) & (content == SPACE))
    # A word begins where a gap ends: both ends of all words from one array, without a Python loop over lines.
    padded = np.ones(len(content) + 2, dtype=bool)
    padded[1:-1] = is_gap
    starts = np.flatnonzero(padded[:-1] & ~padded[1:])[: len(content)]
    ends = np.flatnonzero(~padded[:-1] & padded[1:])
    first = np.searchsorted(starts, line_starts)
    count = np.searchsorted(starts, line_ends) - first
    return Lines(content, first_line, has_tabs, line_starts, starts, ends, first, count)


def one_word(speaker: str) -> str:
    """The speaker's name with white space turned to underscores, since a list ends the speaker at white space.

    >>> one_word("Anna Maria")
    'Anna_Maria'
    """
    return "_".join(speaker.split())


MAX_SPEAKER_BYTES = 255
UTT2SPK, WAV_SCP, SEGMENTS = "utt2spk", "wav.scp", "segments"
COMMAND_MARK, LAST_DIGIT = ord("|"), ord("9")
KALDI_ARCHIVE = re.compile(rb"\.ark(?:\.gz)?:\d+$")
TRIAL_FORMS = "'1 enrol test' or '0 enrol test', 'enrol test target|nontarget', or 'enrol test' for unlabelled pairs"


@dataclass(frozen=True)
class TrialForm:
    """One of the forms that a line of a trial list may have."""

    words: str
    num_fields: int
    labels: dict[bytes, int]
    """What stands for non-target and target; empty where there is no label."""
    label: int = 0
    """Which field it is."""

    def takes(self, fields: Sequence[bytes]) -> bool:
        """Whether a line's fields are of this form."""
        return all(fields) and (not self.labels or fields[self.label] in self.labels)

    def takes_all(self, columns: Sequence[list[bytes]]) -> bool:
        """Whether every line is of this form, from its fields by column."""
        is_labelled = not self.labels or set(columns[self.label]) <= self.labels.keys()
        return is_labelled and all(map(all, columns))


FORMS = (
    TrialForm("'1 enrol test' or '0 enrol test' (as its other lines)", 3, {b"0": 0, b"1": 1}),
    TrialForm(
        "'enrol test target' or 'enrol test nontarget' (as its other lines)", 3, {b"nontarget": 0, b"target": 1}, 2
    ),
    TrialForm("'enrol test' (as its other lines)", 2, {}),
)


class StringTable(Sequence[str]):
    """Many strings in one UTF-8 buffer: `offsets[i]:offsets[i + 1]` are the bytes of string i.

    Handing a table to another process through `torch.multiprocessing` hands over the memory, not a copy, once
    `share()` was called.
    """

    def __init__(self, content: np.ndarray, offsets: np.ndarray) -> None:
        self._content = SharedArray(np.asarray(content, dtype=np.uint8))
        self._offsets = SharedArray(np.asarray(offsets, dtype=np.int64))

    @classmethod
    def from_strings(cls, strings: Iterable[str]) -> "StringTable":
        """A table of the strings, in their order."""
        encoded = [string.encode("utf-8", "surrogateescape") for string in strings]
        offsets = np.zeros(len(encoded) + 1, dtype=np.int64)
        np.cumsum([len(one) for one in encoded], out=offsets[1:])
        return cls(np.frombuffer(b"".join(encoded), dtype=np.uint8), offsets)

    @property
    def content(self) -> np.ndarray:
        """All bytes, shape (bytes,), uint8."""
        return self._content.array

    @property
    def offsets(self) -> np.ndarray:
        """Where each string starts, shape (strings + 1,), int64."""
        return self._offsets.array

    @functools.cached_property
    def checksum(self) -> int:
        """CRC-32 of the strings in their order."""
        return zlib.crc32(self.offsets.tobytes(), zlib.crc32(self.content.tobytes()))

    def share(self) -> "StringTable":
        """Move the buffers into shared memory (once); returns itself."""
        self._content.share()
        self._offsets.share()
        return self

    def take(self, rows: np.ndarray) -> "StringTable":
        """The table of the strings at `rows` (an empty one for row -1), without making Python strings."""
        rows = np.asarray(rows, dtype=np.int64)
        starts, ends = self.offsets[rows], np.where(rows < 0, self.offsets[rows], self.offsets[rows + 1])
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(ends - starts, out=offsets[1:])
        content = np.empty(int(offsets[-1]), dtype=np.uint8)
        source = self.content
        # A loop over what is taken: the index arrays of a gather would take eight bytes for each byte of text.
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            content[offsets[row] : offsets[row + 1]] = source[start:end]
        return StringTable(content, offsets)

    def raw(self, row: int) -> bytes:
        """The UTF-8 bytes of string `row`, what the operating system wants as a path."""
        return self.content[self.offsets[row] : self.offsets[row + 1]].tobytes()

    def raws(self, rows: np.ndarray) -> list[bytes]:
        """`raw` for many rows, with one look at the offsets."""
        content = self.content.data
        ends = self.offsets[rows + 1].tolist()
        return [content[start:end].tobytes() for start, end in zip(self.offsets[rows].tolist(), ends, strict=True)]

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
        content = self.content.tobytes()
        offsets = self.offsets.tolist()
        for start, end in itertools.pairwise(offsets):
            yield content[start:end].decode("utf-8", "surrogateescape")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StringTable):
            return NotImplemented
        return np.array_equal(self.offsets, other.offsets) and np.array_equal(self.content, other.content)

    __hash__ = None  # type: ignore[assignment]


@dataclass
class TrainingList:
    """A training list: path and speaker of every utterance.

    Attributes:
        paths: path of each utterance, as written.
        labels: index into `speakers` for each utterance, int32 (utterances,).
        speakers: the speakers' names, sorted, so that a label means the same on every machine.
        source: the file it came from, for messages.
        sha256: of that file; empty for a list that came from none.
    """

    paths: StringTable
    labels: np.ndarray
    speakers: StringTable
    source: str
    sha256: str = ""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass
class TrialList:
    """A trial list: pairs of rows of `names`.

    Attributes:
        names: every utterance once, in order of first mention.
        enrol: row of the enrolment utterance of each trial, int32 (trials,).
        test: row of the test utterance of each trial, int32 (trials,).
        labels: 1 target, 0 non-target, int8 (trials,); None for unlabelled pairs.
        source: the file it came from, for messages.
        sha256: of that file, or of what was drawn from one; empty for a list that came from none.
    """

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
        for part in (self.enrol, self.test, self.labels):
            total = zlib.crc32(b"" if part is None else part.tobytes(), total)
        return total


@dataclass
class Recordings:
    """Which file holds which utterance.

    Attributes:
        names: the utterances' ids.
        files: the file of each, absolute or from the working directory.
        speakers: who speaks in each; None where it is not said.
    """

    names: StringTable
    files: StringTable
    speakers: StringTable | None = None


def audio_folder_of(path: str | Path) -> Path:
    """Where audio is looked for when nobody says: a Kaldi folder itself, else the folder of the list."""
    return Path(path) if Path(path).is_dir() else Path(path).parent


def read_training_list(path: str | Path, malformed: MalformedRows | None = None) -> TrainingList:
    """Read `speaker path` lines; the path is all after the first white space. Blank lines are skipped.

    Args:
        path: of the list, or of a Kaldi folder, whose `utt2spk` is read (`utterance speaker` lines).
        malformed: where malformed rows are noted and left out; without it the first one is an error.

    Raises:
        ListError: missing, empty, not UTF-8, or a malformed line (named with its number).
    """
    if Path(path).name in (UTT2SPK, WAV_SCP):
        # Its columns stand the other way round: every utterance would be a speaker.
        raise ListError(f"{path}: a part of a Kaldi folder; name the folder, {Path(path).parent}")
    if not Path(path).is_dir():
        return _read_speakers(path, ListFile(path, malformed), "'speaker path'", is_speaker_first=True)
    inner = Path(path) / UTT2SPK
    if not inner.is_file():
        raise ListError(
            f"{path}: a folder without {UTT2SPK}; expected a list of 'speaker path' lines, or a Kaldi folder with "
            f"{WAV_SCP} and {UTT2SPK}"
        )
    return _read_speakers(path, ListFile(inner, malformed), "'utterance speaker'", is_speaker_first=False)


def _read_speakers(path: str | Path, file: ListFile, expected: str, *, is_speaker_first: bool) -> TrainingList:
    """A list of two columns, of which the name of the utterance is the other one."""
    speakers: dict[bytes, int] = {}
    labels, names = [], Column()
    for lines in file.blocks(tabs_only_where_present=False):
        kept = _well_formed(lines, file, expected, None if is_speaker_first else 2)
        first, last = lines.first[kept], lines.first[kept] + lines.count[kept] - 1
        speaker, name = (first, first + 1) if is_speaker_first else (last, first)
        fits = _speaker_fits(lines, np.flatnonzero(kept), speaker, file)
        speaker, name, last = speaker[fits], name[fits], last[fits]
        if not len(speaker):
            continue
        labels.append(number_words(lines.content, lines.starts[speaker], lines.ends[speaker], speakers))
        names.add(lines.content, lines.starts[name], lines.ends[last if is_speaker_first else name])
    if not labels:
        raise ListError(f"{file.path}: the list is empty; expected one {expected} a line")
    # By name, not by first mention: a list that is shuffled has the same classes.
    by_name = sorted(speakers)
    new_label = np.empty(len(speakers), dtype=np.int32)
    for label, speaker_name in enumerate(by_name):
        new_label[speakers[speaker_name]] = label
    table = StringTable.from_strings(one.decode("utf-8") for one in by_name)
    return TrainingList(StringTable(*names.joined()), new_label[np.concatenate(labels)], table, str(path), file.sha256)


def read_wav_scp(path: str | Path) -> Recordings:
    """Read the `utterance file` lines of Kaldi's `wav.scp`; the file is all after the first white space.

    Raises:
        ListError: missing, empty, not UTF-8, a malformed line, a command or a place in an archive in place of a file
            (named with its number).
    """
    file = ListFile(path, None)
    names, files = Column(), Column()
    for lines in file.blocks(tabs_only_where_present=False):
        kept = _well_formed(lines, file, "'utterance file'")
        first, count = lines.first[kept], lines.count[kept]
        starts, ends = lines.starts[first + 1], lines.ends[first + count - 1]
        is_command = lines.content[ends - 1] == COMMAND_MARK
        for row in np.flatnonzero(is_command | (lines.content[ends - 1] <= LAST_DIGIT)).tolist():
            text = lines.content[starts[row] : ends[row]].tobytes()
            if is_command[row] or KALDI_ARCHIVE.search(text):
                line = int(np.flatnonzero(kept)[row])
                file.refuse(lines.number(line), not_a_file(text.decode("utf-8")))
        names.add(lines.content, lines.starts[first], lines.ends[first])
        files.add(lines.content, starts, ends)
    if not len(names):
        raise ListError(f"{path}: the list is empty; expected one 'utterance file' a line")
    return Recordings(StringTable(*names.joined()), StringTable(*files.joined()))


def not_a_file(text: str) -> str:
    """Why a command or a place in one of Kaldi's archives is refused where a file is expected."""
    what = "a command, and no list may start one" if text.endswith("|") else "a place in an archive of Kaldi's"
    return f"{text!r} is {what}; write the audio out as WAV files and name those"


def read_trials(path: str | Path, malformed: MalformedRows | None = None) -> TrialList:
    """Read trials: label first (`1 enrol test`), Kaldi's (`enrol test target`) or unlabelled pairs; one form a file.

    A line with tabs is split at tabs only, so that names may hold spaces.

    Args:
        path: of the list.
        malformed: where malformed rows are noted and left out; without it the first one is an error.

    Raises:
        ListError: missing, empty, not UTF-8, or a malformed line (named with its number).
    """
    file = ListFile(path, malformed)
    rows = Numbers()
    pairs: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    form: TrialForm | None = None
    for lines in file.blocks(tabs_only_where_present=True):
        words = lines.words()
        form = form or _trial_form(lines, words)
        fields, kept = _trial_fields(lines, words, form, file)
        if form is None or not len(kept):
            continue
        if form.labels:
            labels.append(np.fromiter(map(form.labels.__getitem__, fields.pop(form.label)), np.int8, len(kept)))
        # In the order of the file, so that a row's number is that of the first mention.
        mentioned = itertools.chain.from_iterable(zip(*fields, strict=True))
        pairs.append(np.fromiter(map(rows.__getitem__, mentioned), np.int32, 2 * len(kept)))
    if form is None or not pairs:
        raise ListError(f"{path}: the list is empty; expected lines {TRIAL_FORMS}")
    both = np.concatenate(pairs).reshape(-1, 2)
    # A dictionary keeps the order in which it grew, so position n of it is row n.
    names = StringTable.from_strings(name.decode("utf-8") for name in rows)
    known = np.concatenate(labels) if labels else None
    return TrialList(names, both[:, 0].copy(), both[:, 1].copy(), known, str(path), file.sha256)


def write_training_list(path: str | Path, pairs: Iterable[tuple[str, str]]) -> None:
    """Write (speaker, path) pairs, atomically.

    Raises:
        ListError: a speaker that is empty or holds white space, or a path with a line break.
    """
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
            fields = [] if label is None else [str(int(label))]
            fields += [enrol, test]
            if any("\t" in field or len(field.splitlines()) != 1 for field in fields):
                raise ListError(
                    f"{path}: cannot write the trial {fields}: names hold a tab or a line break, or are empty"
                )
            file.write(("\t" if any(" " in field for field in fields) else " ").join(fields) + "\n")


def _well_formed(lines: Lines, file: ListFile, expected: str, num_words: int | None = None) -> np.ndarray:
    """Which lines are rows of two words or more (or of just so many), bool (lines,): neither blank nor malformed."""
    kept = lines.count > 1 if num_words is None else lines.count == num_words
    for line in np.flatnonzero(~kept & (lines.count > 0)).tolist():
        file.refuse(lines.number(line), f"expected {expected}, found {lines.text(line)!r}")
    return kept


def _speaker_fits(lines: Lines, rows: np.ndarray, speakers: np.ndarray, file: ListFile) -> np.ndarray:
    """Which of the words `speakers` (in the lines `rows`) are no longer than a name may be, bool (rows,)."""
    lengths = lines.ends[speakers] - lines.starts[speakers]
    for line, found in zip(rows[lengths > MAX_SPEAKER_BYTES], lengths[lengths > MAX_SPEAKER_BYTES], strict=True):
        problem = f"a speaker name of {found} bytes ({lines.text(line)[:40]!r}…); at most {MAX_SPEAKER_BYTES} are taken"
        file.refuse(lines.number(int(line)), problem)
    return lengths <= MAX_SPEAKER_BYTES


def _trial_form(lines: Lines, words: Sequence[bytes]) -> TrialForm | None:
    """Which form a file has, by the first line that is of any; None where no line is."""
    for first, count in zip(lines.first.tolist(), lines.count.tolist(), strict=True):
        for form in FORMS:
            if count == form.num_fields and form.takes(words[first : first + count]):
                return form
    return None


def _trial_fields(
    lines: Lines, words: Sequence[bytes], form: TrialForm | None, file: ListFile
) -> tuple[list[list[bytes]], np.ndarray]:
    """The lines of this form as columns of words, and which lines they are; the others are refused."""
    expected = form.words if form else TRIAL_FORMS
    kept = lines.count == form.num_fields if form else np.zeros(len(lines.count), dtype=bool)
    fields: list[list[bytes]] = []
    if form:
        if kept[lines.count > 0].all():
            # As nearly always: every column is each so many-th word.
            fields = [list(words[column :: form.num_fields]) for column in range(form.num_fields)]
        else:
            columns = np.arange(form.num_fields)[:, None] + lines.first[kept]
            fields = [[words[word] for word in column] for column in columns.tolist()]
        if not form.takes_all(fields):
            good = np.array([form.takes(row) for row in zip(*fields, strict=True)], dtype=bool)
            fields = [list(itertools.compress(column, good)) for column in fields]
            kept[kept] = good
    for line in np.flatnonzero(~kept & (lines.count > 0)).tolist():
        file.refuse(lines.number(line), f"expected {expected}, found {lines.text(line)!r}")
    return fields, np.flatnonzero(kept)


HASH_SEED = 20260101
ROWS_PER_BLOCK = 1 << 13  # Keeps the temporary arrays in the processor's cache.
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # Odd, so it has an inverse modulo 2**64.


class NameIndex:
    """Rows of a table by name."""

    def __init__(self, names: StringTable) -> None:
        self._names = names
        hashes = hash_names(names)
        self._order = np.argsort(hashes, kind="stable")
        self._sorted = hashes[self._order]

    def find(self, names: StringTable) -> np.ndarray:
        """The first row that has each name, -1 where none has; int64 (names,)."""
        found = np.full(len(names), -1, dtype=np.int64)
        if not len(self._sorted) or not len(names):
            return found
        hashes = hash_names(names)
        places = np.searchsorted(self._sorted, hashes)
        candidates = self._order[np.minimum(places, len(self._sorted) - 1)]
        has_hash = self._sorted[np.minimum(places, len(self._sorted) - 1)] == hashes
        is_same = np.zeros(len(names), dtype=bool)
        is_same[has_hash] = _equal_strings(names, np.flatnonzero(has_hash), self._names, candidates[has_hash])
        found[is_same] = candidates[is_same]
        # Two names with one hash are not to be expected in a lifetime, but a wrong recording would go unnoticed.
        for row in np.flatnonzero(has_hash & ~is_same).tolist():
            place = int(places[row])
            while place < len(self._sorted) and self._sorted[place] == hashes[row]:
                if self._names.raw(int(self._order[place])) == names.raw(row):
                    found[row] = self._order[place]
                    break
                place += 1
        return found

    def refuse_repeated(self, path: str | Path) -> None:
        """Refuse a list that names an utterance twice.

        Raises:
            ListError: it does; the first such name is said.
        """
        repeated = np.flatnonzero(self.find(self._names) != np.arange(len(self._names)))
        if len(repeated):
            raise ListError(f"{path}: {self._names[int(repeated[0])]!r} is there twice; remove one")


def hash_names(names: StringTable) -> np.ndarray:
    """A 64-bit hash of every name, uint64 (names,): a polynomial in scrambled bytes, modulo 2**64."""
    hashes = np.empty(len(names), dtype=np.uint64)
    scrambled = np.random.default_rng(HASH_SEED).integers(1, 2**63, size=256, dtype=np.uint64)
    inverse = np.uint64(pow(int(MULTIPLIER), -1, 2**64))
    block_ends = names.offsets[np.minimum(np.arange(0, len(names) + ROWS_PER_BLOCK, ROWS_PER_BLOCK), len(names))]
    longest = int(np.diff(block_ends).max(initial=0)) + 1
    powers, inverse_powers = _powers(MULTIPLIER, longest), _powers(inverse, longest)
    for first in range(0, len(names), ROWS_PER_BLOCK):
        offsets = names.offsets[first : first + ROWS_PER_BLOCK + 1]
        content = names.content[offsets[0] : offsets[-1]]
        starts = offsets - offsets[0]
        totals = np.zeros(len(content) + 1, dtype=np.uint64)
        np.cumsum(scrambled[content] * powers[: len(content)], out=totals[1:])
        # The sum over one name carries the power of the place where it starts, which the inverse takes away.
        values = (totals[starts[1:]] - totals[starts[:-1]]) * inverse_powers[starts[:-1]]
        values ^= values >> np.uint64(32)
        hashes[first : first + len(values)] = values * MULTIPLIER
    return hashes


def _powers(base: np.uint64, count: int) -> np.ndarray:
    """Powers base ** 0 … base ** (count - 1) modulo 2**64."""
    powers = np.full(count, base, dtype=np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, dtype=np.uint64)


def _equal_strings(left: StringTable, left_rows: np.ndarray, right: StringTable, right_rows: np.ndarray) -> np.ndarray:
    """Whether string `left_rows[i]` of one table is string `right_rows[i]` of the other; bool (rows,)."""
    left_starts, left_ends = left.offsets[left_rows], left.offsets[left_rows + 1]
    right_starts, right_ends = right.offsets[right_rows], right.offsets[right_rows + 1]
    lengths = left_ends - left_starts
    is_same = lengths == right_ends - right_starts
    for first in range(0, len(left_rows), ROWS_PER_BLOCK):
        rows = first + np.flatnonzero(
            is_same[first : first + ROWS_PER_BLOCK] & (lengths[first : first + ROWS_PER_BLOCK] > 0)
        )
        if not len(rows):
            continue
        counts = lengths[rows]
        ends = np.cumsum(counts)
        within = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        is_equal = (
            left.content[np.repeat(left_starts[rows], counts) + within]
            == right.content[np.repeat(right_starts[rows], counts) + within]
        )
        is_same[rows] = np.add.reduceat(~is_equal, ends - counts) == 0
    return is_same


def repeated_trials(trials: TrialList) -> tuple[int, np.ndarray]:
    """Trials whose ordered pair occurred before in the list, and those of them that then had another label.

    Returns:
        How many there are, and the rows of those that contradict, int64 (contradicting,).
    """
    # Row numbers of a million names, multiplied, pass 2^31.
    pairs = trials.enrol.astype(np.int64) * len(trials.names) + trials.test
    order = np.argsort(pairs, kind="stable")
    is_again = np.diff(pairs[order]) == 0
    if trials.labels is None:
        return int(is_again.sum()), np.empty(0, dtype=np.int64)
    return int(is_again.sum()), np.sort(order[1:][is_again & (np.diff(trials.labels[order]) != 0)])
