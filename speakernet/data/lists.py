"""Training and trial lists as compact arrays: read first, and what samplers and sources refer to by row.

A Kaldi folder (`utt2spk` and `wav.scp`) is a training list as well; its utterances go by their ids.

A million rows are two byte buffers and two integer arrays, never a Python object a row, so that worker processes share
them for nothing. Nothing here opens audio.
"""

import functools
import itertools
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speakernet.data.list_lines import Column, Lines, ListError, ListFile, MalformedRows, Numbers, number_words
from speakernet.data.sharing import SharedArray
from speakernet.files import atomic_write

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
