"""Training and trial lists as compact arrays, whose rows samplers and sources refer to.

A Kaldi folder (`utt2spk` and `wav.scp`) is also a training list, with utterances named by id. A
million rows are two byte buffers and two integer arrays, never one Python object per row, so that
worker processes share them at no cost. Nothing here opens audio. The functions at the end recognise
published trial lists.
"""

import functools
import hashlib
import itertools
import operator
import re
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy import ndarray

from speakernet.data.names import normal_name
from speakernet.files import FileError, atomic_write, digest_of, open_regular, own_command, reading

Value = TypeVar("Value")

LONGEST_LINE_BYTES = 64 << 10  # A path has 4 KiB at most, a trial two of them.
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
ROWS_AT_ONCE = 1 << 16
SHOWN_CHARACTERS = 120  # of a malformed line
MAX_SPEAKER_BYTES = 255
UTT2SPK = "utt2spk"
WAV_SCP = "wav.scp"
SEGMENTS = "segments"
RAW_LIST = "raw.list"  # wespeaker's
PATH_HEADINGS = frozenset({b"path", b"wav", b"file", b"filename", b"audio"})
"""Headings of a table's column of paths, by which a table is distinguished from a list."""
KALDI_ARCHIVE = re.compile(r"\.ark(?:\.gz)?:\d+$")


class ListError(FileError):
    """An unusable list; the message names the file, the line and what was expected."""


class ListFile:
    """Reads a list: iterate to get (number, stripped line) of every non-blank line.

    A malformed line raises an error; if `malformed` is given, it is skipped and described there
    instead. `kind` describes the expected file in error messages, if it is not a list.
    """

    def __init__(
        self, path: str | Path, malformed: list[str] | None = None, kind: str = ""
    ) -> None:
        self.path = path
        self.digest = hashlib.sha256()  # of what was read so far
        self._malformed = malformed
        self._kind = kind

    def refuse(self, number: int, problem: str) -> None:
        """Report a malformed line."""
        if self._malformed is None:
            raise ListError(f"{self.path}, line {number}: {problem}")
        self._malformed.append(f"line {number}: {problem}")

    def expected(self, number: int, form: str, line: bytes) -> None:
        """Report a line that does not have the given form."""
        self.refuse(number, f"found {line.decode()[:SHOWN_CHARACTERS]!r}; expected {form}")

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        expected = self._kind or (
            f"a text file. {own_command('prepare folder')} makes lists of your recordings, "
            f"{own_command('prepare voxceleb')} of VoxCeleb"
        )
        with reading(self.path, expected, ListError), open_regular(self.path) as file:
            first = file.readline(LONGEST_LINE_BYTES)
            # Most likely a recording was given as the list: text in UTF-8 has no zero bytes.
            if b"\0" in first:
                raise ListError(f"{self.path} is not a text file in UTF-8; expected {expected}")
            file.seek(len(BYTE_ORDER_MARK) if first.startswith(BYTE_ORDER_MARK) else 0)
            self.digest.update(first[: file.tell()])
            num_lines = 0
            # In blocks, because a list may have a million lines.
            while lines := file.readlines(LONGEST_LINE_BYTES):
                block = b"".join(lines)
                self.digest.update(block)
                # Checked as a whole, which is faster; single lines only to find the one at fault.
                is_text = _is_text(block)
                for number, line in enumerate(map(bytes.strip, lines), num_lines + 1):
                    if len(line) > LONGEST_LINE_BYTES:
                        raise ListError(
                            f"{self.path}, line {number}: longer than {LONGEST_LINE_BYTES:,} "
                            "bytes; expected one utterance or trial per line"
                        )
                    if not is_text and not _is_text(line):
                        self.refuse(number, "not text; save the list as UTF-8")
                    elif line:
                        yield number, line
                num_lines += len(lines)


def _is_text(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in line


def split_row(line: bytes) -> list[bytes]:
    """The words of a line; a line with tabs is split only at tabs, so that names may contain
    spaces.
    """
    return [word.strip() for word in line.split(b"\t") if word] if b"\t" in line else line.split()


def numbers() -> defaultdict[bytes, int]:
    """A dictionary that numbers words in order of first mention."""
    # The dictionary numbers a word itself when it is first looked up, which is faster than asking
    # for each of a million words whether it is known.
    return defaultdict(itertools.count().__next__)


# Why not a list of str. A Python string takes 50 bytes before its first letter, and a forked worker
# that only counts a reference to it copies the page it lies in: ten workers would soon hold ten
# lists of a million names. Two arrays have no reference counts, so all processes share them for
# good, whether forked, spawned or mapped from a file; a name is decoded when somebody looks at it.
class StringTable(Sequence[str]):
    """Many strings in one UTF-8 buffer: `offsets[i]:offsets[i + 1]` are the bytes of string i."""

    def __init__(self, content: ndarray, offsets: ndarray) -> None:
        self.content = np.asarray(content, dtype=np.uint8)
        self.offsets = np.asarray(offsets, dtype=np.int64)

    @classmethod
    def from_bytes(cls, strings: Iterable[bytes]) -> "StringTable":
        """A table of encoded strings, in the given order."""
        content = bytearray()
        offsets = array("q", [0])
        for string in strings:
            content += string
            offsets.append(len(content))
        return cls(np.frombuffer(content, dtype=np.uint8), np.frombuffer(offsets, dtype=np.int64))

    @classmethod
    def from_strings(cls, strings: Iterable[str]) -> "StringTable":
        """A table of strings, in the given order."""
        return cls.from_bytes(string.encode("utf-8", "surrogateescape") for string in strings)

    @functools.cached_property
    def checksum(self) -> int:
        """CRC-32 of the strings in their order."""
        return zlib.crc32(self.offsets.tobytes(), zlib.crc32(self.content.tobytes()))

    @property
    def is_ascii(self) -> bool:
        """Whether all strings are ASCII, so that they have one Unicode form."""
        return bool((self.content < 128).all())

    def columns(self) -> dict[str, ndarray]:
        """The two arrays by name."""
        return {"content": self.content, "offsets": self.offsets}

    def take(self, rows: ndarray) -> "StringTable":
        """The table of the strings at `rows` (an empty string for row -1)."""
        # Row -1 ends before it begins, which gives an empty string.
        return StringTable.from_bytes(self.raws(np.asarray(rows, dtype=np.int64)))

    def raws(self, rows: Sequence[int] | ndarray | None = None) -> Iterator[bytes]:
        """The UTF-8 bytes of the strings at `rows`, or of all, in the form the operating system
        uses for paths.
        """
        content = self.content.data
        if rows is None:
            rows = range(len(self))
        # In blocks: a Python list of a hundred million numbers takes gigabytes.
        for first in range(0, len(rows), ROWS_AT_ONCE):
            block = np.asarray(rows[first : first + ROWS_AT_ONCE])
            begins = self.offsets[block].tolist()
            ends = self.offsets[block + 1].tolist()
            for begin, end in zip(begins, ends, strict=True):
                yield content[begin:end].tobytes()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row):  # type: ignore[no-untyped-def, override]
        if isinstance(row, slice):
            return list(self.take(np.arange(len(self))[row]))
        row = range(len(self))[row]
        raw = self.content[self.offsets[row] : self.offsets[row + 1]].tobytes()
        return raw.decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (raw.decode("utf-8", "surrogateescape") for raw in self.raws())

    def equals(self, other: "StringTable") -> bool:
        """Whether both have the same strings in the same order. `==` is identity, so that a source
        can remember something about a table.
        """
        have_same_lengths = np.array_equal(self.offsets, other.offsets)
        return have_same_lengths and np.array_equal(self.content, other.content)


class ByTable(WeakKeyDictionary[StringTable, Value]):
    """Remembers something about each table, for as long as the table is used; nothing in another
    process, which has tables of its own.
    """

    def __reduce__(self) -> Any:
        return ByTable, ()


class NameIndex:
    """Finds rows of a table by name with sorted hashes: 16 bytes per name, a tenth of what a
    dictionary takes.
    """

    def __init__(self, names: StringTable) -> None:
        self.names = names
        hashes = _hashes_of(names)
        self._order = np.argsort(hashes, kind="stable")
        self._sorted = hashes[self._order]

    def find(self, names: StringTable) -> ndarray:
        """The first row with each name, -1 if there is none; int64 (names,)."""
        if not len(self._sorted):
            return np.full(len(names), -1, dtype=np.int64)
        # The leftmost of equal hashes is the first row, because the sort above is stable.
        places = np.searchsorted(self._sorted, _hashes_of(names))
        rows = self._order[np.minimum(places, len(self._sorted) - 1)]
        # If two names ever have the same hash, the second is not found rather than mistaken for the
        # first.
        is_same = map(operator.eq, names.raws(), self.names.raws(rows))
        return np.where(np.fromiter(is_same, bool, len(names)), rows, -1)

    def refuse_repeated(self, path: str | Path) -> None:
        """Raise ListError if a name occurs twice."""
        repeated = np.flatnonzero(self.find(self.names) != np.arange(len(self.names)))
        if len(repeated):
            raise ListError(f"{path}: {self.names[int(repeated[0])]!r} appears twice; remove one")


# Python salts the hashes of bytes in each process, so an index is made where it is used and never
# stored or sent.
def _hashes_of(names: StringTable) -> ndarray:
    return np.fromiter(map(hash, names.raws()), np.int64, len(names))


def places_in_runs(counts: ndarray) -> ndarray:
    """The place of each entry in its run, for runs of these lengths; int64 (entries,).

    >>> places_in_runs(np.array([2, 0, 3]))
    array([0, 1, 0, 1, 2])
    """
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def normal_names(names: StringTable) -> StringTable:
    """Names in the form in which `prepare` compares them; the same object if they are in it
    already.

    >>> list(normal_names(StringTable.from_strings(["./a//b.wav", "a/b.wav"])))
    ['a/b.wav', 'a/b.wav']
    """
    content = names.content.tobytes()
    if content.isascii() and b"./" not in content and b"//" not in content:
        return names
    return StringTable.from_strings(map(normal_name, names))


def repeated_rows(names: StringTable) -> ndarray:
    """The rows whose recording an earlier row names, perhaps in another form; int64 (rows,)."""
    names = normal_names(names)
    return np.flatnonzero(NameIndex(names).find(names) != np.arange(len(names)))


@dataclass
class TrainingList:
    """A training list: path and speaker of every utterance."""

    paths: StringTable
    labels: ndarray
    speakers: StringTable
    source: str
    sha256: str = ""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass
class Models:
    """The recordings of each name of a trial list: one of a test, one or more of a model."""

    recordings: StringTable
    rows: ndarray
    """Rows of `recordings`, those of the first name first, int64."""
    starts: ndarray
    """Where the rows of each name start, int64 (names,)."""
    source: str
    sha256: str = ""

    @property
    def counts(self) -> ndarray:
        """How many recordings each name has, (names,)."""
        return np.diff(np.append(self.starts, len(self.rows)))

    def mean(self, values: ndarray) -> ndarray:
        """From values of recordings, (recordings, …), to their mean over each name, (names, …)."""
        # Every name has a recording; for a name without any, `reduceat` would return the first
        # value of the next name.
        sums = np.add.reduceat(values[self.rows], self.starts, axis=0)
        counts = self.counts.reshape(-1, *[1] * (values.ndim - 1))
        return (sums / counts).astype(values.dtype)

    def of(self, names: ndarray) -> tuple[ndarray, ndarray]:
        """Rows of `recordings` of these names, one name after the other, and how many each has."""
        counts = self.counts[names]
        firsts = np.repeat(self.starts[names], counts)
        return self.rows[firsts + places_in_runs(counts)], counts

    def take(self, names: ndarray) -> "Models":
        """The models at these rows of the table of names."""
        rows, counts = self.of(names)
        used, numbers = np.unique(rows, return_inverse=True)
        starts = np.cumsum(counts) - counts
        return Models(self.recordings.take(used), numbers, starts, self.source, self.sha256)


@dataclass
class TrialList:
    """A trial list: pairs of rows of `names`."""

    names: StringTable
    enrol: ndarray
    test: ndarray
    labels: ndarray | None
    source: str
    sha256: str = ""
    models: Models | None = None
    """None: every name is that of one recording."""

    def __len__(self) -> int:
        return len(self.enrol)

    def pair(self, row: int) -> tuple[str, str]:
        """The names of both sides of a trial."""
        return self.names[int(self.enrol[row])], self.names[int(self.test[row])]

    @property
    def recordings(self) -> StringTable:
        """What is embedded: `names` themselves, unless some are models."""
        return self.names if self.models is None else self.models.recordings

    def mean(self, values: ndarray) -> ndarray:
        """From values of recordings, (recordings, …), to those of names, (names, …)."""
        return values if self.models is None else self.models.mean(values)

    def take(self, rows: ndarray) -> "TrialList":
        """The list of these trials."""
        used, numbers = np.unique(
            np.concatenate([self.enrol[rows], self.test[rows]]), return_inverse=True
        )
        enrol = numbers[: len(rows)].astype(np.int32)
        test = numbers[len(rows) :].astype(np.int32)
        labels = None if self.labels is None else self.labels[rows]
        models = None if self.models is None else self.models.take(used)
        return TrialList(
            self.names.take(used), enrol, test, labels, self.source, self.sha256, models
        )

    def by_recording(self) -> tuple["TrialList", ndarray]:
        """The list with a trial for each recording of a model, and the trial that each comes from,
        int64.
        """
        if self.models is None:
            return self, np.arange(len(self))
        enrol, counts = self.models.of(self.enrol)
        trials = np.repeat(np.arange(len(self)), counts)
        test = self.models.rows[self.models.starts[self.test[trials]]]
        labels = None if self.labels is None else self.labels[trials]
        pairs = TrialList(self.recordings, enrol, test, labels, self.source, self.sha256)
        return pairs, trials

    @functools.cached_property
    def checksum(self) -> int:
        """CRC-32 of the trials: names, pairs, labels and models."""
        total = self.names.checksum
        columns = [self.enrol, self.test, self.labels]
        if self.models is not None:
            total = zlib.crc32(b"%d" % self.models.recordings.checksum, total)
            columns += [self.models.rows, self.models.starts]
        for column in columns:
            total = zlib.crc32(b"" if column is None else column.tobytes(), total)
        return total


def audio_folder_of(path: str | Path) -> Path:
    """The default folder of a list's audio: the Kaldi folder itself, else the folder of the
    list.
    """
    return Path(path) if Path(path).is_dir() else Path(path).parent


# One pass over the lines: speakers are numbered as they come, in four bytes per utterance, and at
# the end these numbers are replaced by those of the sorted names. The class of a speaker thus
# depends only on the set of names: a list in another order, or with more utterances of the same
# speakers, has the same classes.
def read_training_list(path: str | Path, malformed: list[str] | None = None) -> TrainingList:
    """Read `speaker path` lines; the path is everything after the first white space. Blank lines
    are skipped.
    """
    if Path(path).name in (UTT2SPK, WAV_SCP):
        # Its columns are swapped: every utterance would be a speaker.
        raise ListError(
            f"{path}: this file is part of a Kaldi folder; give the folder, {Path(path).parent}"
        )
    is_kaldi = Path(path).is_dir()
    file = ListFile(Path(path) / UTT2SPK if is_kaldi else path, malformed)
    if is_kaldi and not Path(file.path).is_file():
        raise ListError(
            f"{path}: a folder without {UTT2SPK}; expected a list of 'speaker path' lines, or a "
            f"Kaldi folder with {WAV_SCP} and {UTT2SPK}"
        )
    known = numbers()
    labels = array("i")
    form = "'utterance speaker'" if is_kaldi else "'speaker path'"

    def read_paths() -> Iterator[bytes]:
        for number, pair in _pairs_of(file, form, is_one_word=is_kaldi):
            speaker, path = reversed(pair) if is_kaldi else pair
            if len(speaker) > MAX_SPEAKER_BYTES:
                file.refuse(
                    number,
                    f"a speaker name of {len(speaker)} bytes; expected at most {MAX_SPEAKER_BYTES}",
                )
                continue
            labels.append(known[speaker])
            yield path

    paths = StringTable.from_bytes(read_paths())
    if not labels:
        raise ListError(f"{file.path}: the list is empty; expected one {form} per line")
    by_name = sorted(known)
    new_label = np.empty(len(known), dtype=np.int32)
    new_label[[known[name] for name in by_name]] = np.arange(len(known))
    speakers = StringTable.from_bytes(by_name)
    return TrainingList(
        paths, new_label[np.asarray(labels)], speakers, str(path), file.digest.hexdigest()
    )


def _pairs_of(file: ListFile, form: str, *, is_one_word: bool) -> Iterator[tuple[int, list[bytes]]]:
    """Number and words of every line of two words; the second is the rest of the line unless it
    `is_one_word`.
    """
    for number, line in file:
        if number == 1 and _is_manifest(line):
            what = "a table with headings or a JSON manifest"
            todo = (
                "make a table with the columns path and speaker, then "
                f"`{own_command('prepare folder')} FOLDER --csv TABLE`"
            )
            if all(field in line for field in (b'"key"', b'"wav"', b'"spk"')):
                what = f"wespeaker's {RAW_LIST}"
                todo = f"`{own_command('pack')} CORPUS --source {RAW_LIST} --write-list LIST`"
            raise ListError(f"{file.path}: {what}, not a list of {form} lines; {todo}")
        pair = line.split(None, -1 if is_one_word else 1)
        if len(pair) == 2:
            yield number, pair
        else:
            file.expected(number, form, line)


def _is_manifest(line: bytes) -> bool:
    """Whether the first line is that of another kind of file, not of a list."""
    headings = {heading.strip().lower() for heading in re.split(rb"[,;\t]", line)}
    is_table = len(headings) > 1 and not PATH_HEADINGS.isdisjoint(headings)
    return is_table or line.startswith(b"{")


def read_wav_scp(folder: str | Path) -> tuple[NameIndex, StringTable]:
    """Read the `utterance file` lines of a Kaldi folder's `wav.scp`: the utterances, each named
    once, and the file of each, which is everything after the first white space.
    """
    if (Path(folder) / SEGMENTS).exists():
        raise ListError(
            f"{Path(folder) / SEGMENTS}: segments of recordings are not supported; save each as "
            "its own file (Kaldi: utils/data/extract_wav_segments_data_dir.sh) and give that folder"
        )
    path = Path(folder) / WAV_SCP
    file = ListFile(path)
    form = "'utterance file'"
    pairs = []
    for number, pair in _pairs_of(file, form, is_one_word=False):
        if problem := not_a_file(pair[1].decode("utf-8")):
            file.refuse(number, problem)
        pairs.append(pair)
    if not pairs:
        raise ListError(f"{path}: the list is empty; expected one {form} per line")
    names, files = map(StringTable.from_bytes, zip(*pairs, strict=True))
    index = NameIndex(names)
    index.refuse_repeated(path)
    return index, files


def not_a_file(text: str) -> str:
    """Why a command or a place in a Kaldi archive is refused; empty for a file name."""
    if text.endswith("|") or KALDI_ARCHIVE.search(text):
        return (
            f"{text!r} is a command (which lists may not run) or a place in a Kaldi archive; save "
            "the audio as WAV files and name those"
        )
    return ""


class TrialForm(NamedTuple):
    """A form of the lines of a trial list."""

    text: str
    num_fields: int
    place: int
    """Which field is the label."""
    labels: dict[bytes, int]
    """What the labels mean; empty for unlabelled pairs."""

    def fits(self, row: list[bytes]) -> bool:
        """Whether a line has this form."""
        has_fields = len(row) == self.num_fields and all(row)
        return has_fields and (not self.labels or row[self.place] in self.labels)


FORMS: tuple[TrialForm, ...] = (
    TrialForm("'1 enrol test' or '0 enrol test'", 3, 0, {b"0": 0, b"1": 1}),
    TrialForm(
        "'enrol test target' or 'enrol test nontarget'", 3, 2, {b"nontarget": 0, b"target": 1}
    ),
    TrialForm("'enrol test' (unlabelled, like the other lines)", 2, 0, {}),
)


def read_trials(path: str | Path, malformed: list[str] | None = None) -> TrialList:
    """Read trials: label first (`1 enrol test`), Kaldi's (`enrol test target`) or unlabelled pairs;
    one form per file.

    A line with tabs is split only at tabs, so that names may contain spaces.
    """
    file = ListFile(path, malformed)
    known = numbers()
    # Rows of names, four bytes each: lists of all pairs have tens of millions of trials.
    sides = array("i")
    labels = array("b")
    forms = FORMS
    for number, line in file:
        row = split_row(line)
        fitting = [form for form in forms if form.fits(row)]
        if not fitting:
            file.expected(number, ", or ".join(form.text for form in forms), line)
            continue
        # The first valid line determines the form of the file. `1 enrol target` fits two forms; the
        # one with the label in front wins.
        form = fitting[0]
        if len(forms) > 1 and not form.labels and b"*" in row[0]:
            raise ListError(
                f"{path}, line {number}: a trial of ESPnet, 'enrol*test label'; expected 'label "
                r"enrol test' (sed -E 's/^(.*)\*(.*) ([01])$/\3 \1 \2/' LIST > NEW_LIST)"
            )
        forms = (form,)
        if form.labels:
            labels.append(form.labels[row.pop(form.place)])
        sides.append(known[row[0]])
        sides.append(known[row[1]])
    if not sides:
        expected = ", or ".join(form.text for form in FORMS)
        raise ListError(f"{path}: the list is empty; expected lines {expected}")
    enrol, test = np.array(sides).reshape(-1, 2).T.copy()
    # A dictionary keeps insertion order, so its n-th key is row n.
    names = StringTable.from_bytes(known)
    targets = np.array(labels) if labels else None
    return TrialList(names, enrol, test, targets, str(path), file.digest.hexdigest())


def read_enrolment(path: str | Path) -> tuple[dict[bytes, list[bytes]], str]:
    """The recordings of each model, and the SHA-256 of the list.

    A line has a model and one recording or, as in Kaldi's `spk2utt`, all of them; a model may have
    several lines. A line with tabs is split only at tabs, so that names may contain spaces.
    """
    file = ListFile(path)
    models: dict[bytes, list[bytes]] = {}
    for number, line in file:
        model, *recordings = split_row(line)
        if not recordings:
            file.expected(number, "'model recording'; this model has no recordings", line)
        known = models.setdefault(model, [])
        for recording in recordings:
            if recording in known:
                file.refuse(
                    number,
                    f"model {model.decode()!r} has {recording.decode()!r} twice; remove one, or it "
                    "counts double",
                )
            known.append(recording)
    if not models:
        raise ListError(f"{path}: the list is empty; expected lines 'model recording'")
    return models, file.digest.hexdigest()


def read_model_trials(
    path: str | Path, enrolment: str | Path, malformed: list[str] | None = None
) -> TrialList:
    """Read trials and, if there is an enrolment list, the recordings of the models they name."""
    trials = read_trials(path, malformed)
    return with_models(trials, read_enrolment(enrolment), enrolment) if enrolment else trials


def with_models(
    trials: TrialList, enrolment: tuple[dict[bytes, list[bytes]], str], path: str | Path
) -> TrialList:
    """The trials with the recordings of their models; unchanged if they name none of the enrolment
    list at `path`.

    Raises:
        ListError: some are models of the list and others are not.
    """
    listed, sha256 = enrolment
    names = list(trials.names.raws())
    sides = np.unique(trials.enrol).tolist()
    unknown = [names[row].decode() for row in sides if names[row] not in listed]
    # With several lists (`data.test_lists`), some may name models and others recordings, so a list
    # without any model is allowed. A list that mixes both is a mistake.
    if len(unknown) == len(sides):
        return trials
    if unknown:
        raise ListError(
            f"{trials.source}: {len(unknown):,} of {len(sides):,} enrolment names have no "
            f"recordings in {path}, such as {unknown[0]!r}; add lines 'model recording' for them"
        )
    both_sides = np.intersect1d(sides, trials.test).tolist()
    if both_sides:
        raise ListError(
            f"{trials.source}: {names[both_sides[0]].decode()!r} is a model of {path} and also a "
            "test; expected recordings as tests"
        )
    enrolled = set(sides)
    known = numbers()
    rows = array("q")
    starts = array("q")
    for row, name in enumerate(names):
        starts.append(len(rows))
        for recording in listed[name] if row in enrolled else [name]:
            rows.append(known[recording])
    models = Models(
        StringTable.from_bytes(known), np.array(rows), np.array(starts), str(path), sha256
    )
    return replace(trials, models=models)


def repeated_trials(trials: TrialList) -> tuple[int, ndarray]:
    """How many trials repeat an ordered pair, and the rows of those that contradict its label,
    int64 (rows,).
    """
    # With a million names, products of row numbers exceed 2^31.
    pairs = trials.enrol.astype(np.int64) * len(trials.names) + trials.test
    order = np.argsort(pairs, kind="stable")
    is_again = np.diff(pairs[order]) == 0
    if trials.labels is None:
        return int(is_again.sum()), np.empty(0, dtype=np.int64)
    return int(is_again.sum()), np.sort(order[1:][is_again & (np.diff(trials.labels[order]) != 0)])


def write_training_list(path: str | Path, pairs: Iterable[tuple[str, str]]) -> None:
    """Atomically write (speaker, path) pairs."""
    with atomic_write(path) as file:
        for speaker, name in pairs:
            is_line = bool(name.strip()) and len(name.splitlines()) == 1
            if speaker.split() != [speaker] or not is_line:
                raise ListError(
                    f"{path}: speaker {speaker!r}, path {name!r}; expected one word and one line"
                )
            file.write(f"{speaker} {name}\n")


def write_enrolment(path: str | Path, pairs: Iterable[tuple[str, str]]) -> None:
    """Atomically write (model, recording) pairs, one a line."""
    write_trials(path, ((None, model, recording) for model, recording in pairs))


def write_trials(path: str | Path, rows: Iterable[tuple[int | None, str, str]]) -> None:
    """Atomically write (label, enrol, test) rows, label first; label None writes unlabelled pairs.

    A line whose names contain spaces is separated by tabs.
    """
    with atomic_write(path) as file:
        for label, *names in rows:
            if any("\t" in name or len(name.splitlines()) != 1 for name in names):
                raise ListError(
                    f"{path}: cannot write the trial {names}: a name contains a tab or a line "
                    "break, or is empty"
                )
            fields = names if label is None else [str(int(label)), *names]
            # The reader splits at spaces unless the line has a tab.
            separator = "\t" if " " in "".join(names) else " "
            file.write(separator.join(fields) + "\n")


# Name, trials, targets and MD5, from the corpus's own page,
# http://www.robots.ox.ac.uk/~vgg/data/voxceleb/.
PUBLISHED = (
    ("VoxCeleb1-O, original", 37720, 18860, "29fc7cc1c5d59f0816dc15d6e8be60f7"),
    ("VoxCeleb1-O, cleaned", 37611, 18802, "b73110731c9223c1461fe49cb48dddfc"),
    ("VoxCeleb1-E, original", 581480, 290743, "b9ecf7aa49d4b656aa927a8092844e4a"),
    ("VoxCeleb1-E, cleaned", 579818, 289921, "a53e059deb562ffcfc092bf5d90d9f3a"),
    ("VoxCeleb1-H, original", 552536, 276270, "21c341b6b2168eea2634df0fb4b8fff1"),
    ("VoxCeleb1-H, cleaned", 550894, 275488, "857790e09d579a68eb2e339a090343c8"),
)
VOXCELEB_NAME = re.compile(r"(?:.*/)?(id1\d{4}/[\w-]{11}/\d{5})(?:\.\w+)?")
"""Speaker, video and clip of a VoxCeleb1 utterance, in any folder and with any suffix."""


def identify_trials(trials: TrialList) -> str:
    """A sentence that says which published list this is and which one it is confused with; empty if
    it matches none.

    Error rates on the original and the cleaned VoxCeleb1 lists differ by a sixth, and the file name
    does not show which one it is. A list is identified by the MD5 of the published file, or as a
    likely match by its counts and names.
    """
    sizes = [num_trials for _, num_trials, _, _ in PUBLISHED]
    if len(trials) not in sizes:
        return ""
    place = sizes.index(len(trials))
    name, _, num_targets, md5 = PUBLISHED[place]
    other, num_others, _, _ = PUBLISHED[place ^ 1]
    size = f"{len(trials):,} trials"
    confused = (
        f"often confused with {other} ({num_others:,} trials); their error rates must not "
        "be compared"
    )
    if Path(trials.source).is_file() and digest_of(trials.source, "md5") == md5:
        return f"this is {name}, {size}, as published; {confused}"
    problem = ""
    if trials.labels is not None and np.count_nonzero(trials.labels) != num_targets:
        problem = "a different number of targets"
    elif not all(map(VOXCELEB_NAME.fullmatch, trials.names)):
        problem = "without VoxCeleb1's names"
    if problem:
        return f"as many trials as {name} ({size}), but {problem}: not the published list"
    return (
        f"most likely {name}: {size} and VoxCeleb1's names, but not the published file; {confused}"
    )
