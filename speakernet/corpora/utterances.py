"""The utterances of a corpus as compact arrays (name, speaker, session, gender), and their split
into training, validation and test.

Built from list files, tables or folder walks; no audio is read here. `pairs` makes trials of them.
"""

import csv
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from speakernet.data.folders import walk_files
from speakernet.data.lists import ListError, StringTable, TrainingList
from speakernet.data.names import compose_accents, normal_name
from speakernet.files import open_text, reading
from speakernet.options import suggestion
from speakernet.random import numpy_generator
from speakernet.terminal import MAX_NAMED

logger = logging.getLogger(__name__)

UNKNOWN = -1
#: Headings that a table may use -> their meaning here.
HEADINGS = {
    "path": "path", "file": "path", "filename": "path", "audio": "path", "wav": "path",
    "speaker": "speaker", "speaker_id": "speaker", "client_id": "speaker", "spk": "speaker",
    "spk_id": "speaker",
    "session": "session", "session_id": "session",
    "gender": "gender", "sex": "gender",
}  # fmt: skip
EXPECTED_HEADINGS = "the headings path,speaker[,session,gender]"

SPLITS = ("train", "validation", "test")
DEFAULT_SHARE = 0.1
MIN_HELD_OUT_SPEAKERS = 2
#: Minimum number of held-out speakers for trials within a gender: two of each.
MIN_FOR_SAME_GENDER = 4
#: With fewer speakers, a separate test set would leave too few to train on.
MIN_SPEAKERS_FOR_TEST = 8
MIN_SPEAKERS_FOR_VALIDATION = 4


class Row(NamedTuple):
    """One utterance. Each field but the name is empty if unknown."""

    speaker: str
    name: str
    session: str = ""
    gender: str = ""


@dataclass
class Utterances:
    """Utterances in a fixed order. Arrays have one number per utterance, `genders` one per speaker;
    UNKNOWN is -1.
    """

    names: StringTable
    labels: ndarray
    speakers: StringTable
    sessions: ndarray
    genders: ndarray

    @classmethod
    def from_list(cls, training: TrainingList) -> "Utterances":
        """The utterances of a training list; sessions and genders stay unknown."""
        sessions = np.full(len(training), UNKNOWN, dtype=np.int32)
        genders = np.full(len(training.speakers), UNKNOWN, dtype=np.int32)
        return cls(training.paths, training.labels, training.speakers, sessions, genders)

    @classmethod
    def from_rows(cls, rows: Iterable[Row]) -> "Utterances":
        """Collect rows into arrays; a speaker's gender is the first one given."""
        listed = list(rows)
        # Sorted, so that labels are the same on every machine, whatever the order of files on disk.
        speakers, labels = np.unique([row.speaker for row in listed], return_inverse=True)
        sessions = np.full(len(listed), UNKNOWN, dtype=np.int32)
        genders = np.full(len(speakers), UNKNOWN, dtype=np.int32)
        # A session is numbered together with its speaker: two people's "monday" are two sessions.
        numbers: dict[tuple[str, str], int] = {}
        for number, (row, label) in enumerate(zip(listed, labels.tolist(), strict=True)):
            if row.session:
                key = (row.speaker, row.session)
                sessions[number] = numbers.setdefault(key, len(numbers))
            # The first letter is enough: tables have m, M or male.
            initial = row.gender.strip().lower()[:1]
            if initial and genders[label] == UNKNOWN:
                genders[label] = ord(initial)
        return cls(
            StringTable.from_strings(row.name for row in listed),
            labels.astype(np.int32),
            StringTable.from_strings(speakers.tolist()),
            sessions,
            genders,
        )

    def __len__(self) -> int:
        return len(self.labels)

    def counts(self) -> ndarray:
        """Utterances of each speaker, int64 (speakers,)."""
        return np.bincount(self.labels, minlength=len(self.speakers))

    def pairs(self, rows: ndarray | None = None) -> Iterator[tuple[str, str]]:
        """(speaker, name) of the rows (None: all), ready for `write_training_list`."""
        for row in range(len(self)) if rows is None else rows.tolist():
            yield self.speakers[int(self.labels[row])], self.names[row]

    def take(self, rows: ndarray) -> "Utterances":
        """Only these rows, without speakers that have none of them."""
        # Numbered again, because a speaker without utterances would be a class that never trains.
        speakers, labels = np.unique(self.labels[rows], return_inverse=True)
        return Utterances(
            self.names.take(rows),
            labels.astype(np.int32),
            self.speakers.take(speakers),
            self.sessions[rows],
            self.genders[speakers],
        )


def read_table(path: str | Path, session: str = "") -> Iterator[Row]:
    """Rows of a CSV or TSV table with headings `path,speaker[,session,gender]` (in any order;
    others are ignored).

    `session` names a different column to use as the session; no row may leave it empty.
    """
    path = Path(path)
    expected = f"a table in UTF-8 with {EXPECTED_HEADINGS}"
    with reading(path, expected, ListError), open_text(path) as file:
        # Decided by the headings and not by the suffix, because a .csv may have tabs.
        delimiter = "\t" if "\t" in file.readline() else ","
        file.seek(0)
        reader = csv.DictReader(file, delimiter=delimiter)
        columns = _columns(path, reader.fieldnames or ["nothing"], session)
        required = ["path", "speaker"]
        if session:
            required.append("session")
        for row in reader:
            values = {meaning: (row[heading] or "").strip() for meaning, heading in columns.items()}
            for meaning in required:
                if not values[meaning]:
                    raise ListError(
                        f"{path}, line {reader.line_num}: no {columns[meaning]} in this row"
                    )
            values["name"] = values.pop("path")
            yield Row(**values)


def _columns(path: Path, headings: Sequence[str], session: str) -> dict[str, str]:
    """The heading for each meaning that the table has; of several with one meaning, the first."""
    # Reversed, because the last of several equal keys wins in a dictionary, and the first column
    # should.
    by_name = {heading.strip().lower(): heading for heading in reversed(headings)}
    columns = {HEADINGS[name]: by_name[name] for name in by_name if name in HEADINGS}
    missing = [meaning for meaning in ("path", "speaker") if meaning not in columns]
    if session and session.lower() not in by_name:
        missing = [session]
    if missing:
        raise ListError(
            f"{path}, line 1: there is no column {missing[0]!r}; the columns are "
            f"{', '.join(headings)} ({suggestion(missing[0], headings)}); expected "
            f"{EXPECTED_HEADINGS}"
        )
    if session:
        columns["session"] = by_name[session.lower()]
    return columns


def read_genders(path: Path, column: int, separator: str | None = None) -> dict[str, str]:
    """The genders in a corpus's table of speakers, which are in its first column; empty if there is
    no table.
    """
    genders = {}
    if path.is_file():
        # Names in other encodings do not matter, since only ids and genders are used. Lines of
        # comments are not skipped: their first word is not the id of a speaker.
        for line in path.read_text("utf-8", errors="replace").splitlines():
            fields = [field.strip() for field in line.split(separator)]
            if len(fields) > column:
                genders[fields[0]] = fields[column]
    return genders


def distinct_rows(rows: Iterable[Row], source: str | Path) -> list[Row]:
    """The first row of every path: a table may have a row for each label, take or annotator.

    Raises:
        ListError: a path has two speakers.
    """
    first: dict[str, Row] = {}
    for row in rows:
        # `./a.wav` and `a.wav` are one file.
        known = first.setdefault(normal_name(row.name), row)
        if compose_accents(known.speaker) != compose_accents(row.speaker):
            raise ListError(
                f"{source}: {row.name!r} is listed under two speakers, {known.speaker!r} and "
                f"{row.speaker!r}; keep one"
            )
    return list(first.values())


def rows_by_pattern(names: Iterable[str], pattern: str) -> Iterator[Row]:
    """The rows of paths by a regular expression with the group `speaker` and, optionally, `session`
    and `gender`; without a speaker if it does not match.
    """
    try:
        rule = re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"the pattern {pattern!r} is not a regular expression ({error}); correct it"
        ) from error
    if "speaker" not in rule.groupindex:
        raise ValueError(
            f"the pattern {pattern!r} has no group named speaker; write (?P<speaker>...) for the "
            "speaker's name, as in (?P<speaker>[^/]+)/(?P<session>[^/]+)/.*"
        )
    for name in names:
        match = rule.search(name)
        groups = match.groupdict(default="") if match else {}
        yield Row(
            groups.get("speaker", ""), name, groups.get("session", ""), groups.get("gender", "")
        )


def rows_of_corpus(
    root: Path, folder: str, pattern: str, genders: Mapping[str, str] | None = None
) -> Iterator[Row]:
    """The recordings in a corpus's `folder` whose paths match `pattern`, as in `rows_by_pattern`;
    names are relative to `root`.
    """
    for row in rows_by_pattern(walk_files(root / folder, {".flac", ".wav"}), pattern):
        # The pattern leaves out other files, such as those of VCTK's second microphone.
        if row.speaker:
            gender = (genders or {}).get(row.speaker, "")
            yield row._replace(name=f"{folder}/{row.name}", gender=gender)


def row_by_folder(name: str, depth: int = 0) -> Row:
    """The row of `speaker/utterance` or `speaker/session/…/utterance` below `depth` folders;
    without a speaker if it is not that deep.

    >>> row_by_folder("anna/monday/1.wav")
    Row(speaker='anna', name='anna/monday/1.wav', session='monday', gender='')
    """
    folders = name.split("/")[depth:-1]
    if not folders:
        return Row("", name)
    return Row(folders[0], name, "/".join(folders[1:]))


class Split(NamedTuple):
    """Rows of the training, validation and test utterances, int64, ascending; `test` may be
    empty.
    """

    train: ndarray
    validation: ndarray
    test: ndarray


def split_speakers(
    utterances: Utterances,
    seed: int,
    validation_share: float = DEFAULT_SHARE,
    test_share: float = DEFAULT_SHARE,
    min_held_out: int = MIN_HELD_OUT_SPEAKERS,
) -> Split:
    """Speaker-disjoint split with evenly spread genders, determined by the speakers and the seed.

    Speakers with a single utterance cannot give target trials and stay in training. With fewer than
    eight speakers there is no test split; with fewer than four, validation uses held-out utterances
    of the training speakers. `min_held_out` is the minimum number of speakers in a held-out split:
    trials within a gender need two of each.
    """
    num_speakers = len(utterances.speakers)
    if num_speakers < 2:
        raise ValueError(
            f"only {num_speakers} speaker has usable recordings; training needs at least two"
        )
    if min(validation_share, test_share) < 0 or validation_share + test_share >= 1:
        raise ValueError(
            f"--validation_share {validation_share:g} and --test_share {test_share:g} leave no "
            "speakers for training; expected shares from 0 that add up to less than 1"
        )
    # Without at least two speakers to hold out, utterances of training speakers are used, whose
    # error rate is far lower than that of new speakers.
    usable = np.flatnonzero(utterances.counts() >= 2)
    if num_speakers < MIN_SPEAKERS_FOR_VALIDATION or len(usable) < MIN_HELD_OUT_SPEAKERS:
        return _split_utterances(utterances, seed)
    if num_speakers < MIN_SPEAKERS_FOR_TEST and test_share > 0:
        logger.warning(
            "too few speakers (%d) for a test split; the validation trials are used instead",
            num_speakers,
        )
        test_share = 0
    waiting = _interleave_genders(usable, utterances.genders[usable], seed)
    # 0 is training, 1 validation, 2 test. Shares are of speakers, not of utterances, because the
    # precision of an error rate depends on the number of speakers.
    split = np.zeros(num_speakers, dtype=np.int8)
    for number, share in enumerate((validation_share, test_share), start=1):
        if share > 0:
            num_held_out = max(min_held_out, round(num_speakers * share))
            split[waiting[:num_held_out]] = number
            waiting = waiting[num_held_out:]
    num_train = np.count_nonzero(split == 0)
    if num_train < 2:
        raise ValueError(
            f"{num_speakers} speakers leave {num_train} for training; lower --validation_share or "
            "--test_share"
        )
    of_row = split[utterances.labels]
    return Split(*(np.flatnonzero(of_row == number) for number in range(3)))


def split_as_published(utterances: Utterances, split_of: Callable[[str], str]) -> Split | None:
    """The published splits; None (so that a split is drawn) if only one of them is on disk."""
    of_row = np.array([SPLITS.index(split_of(name)) for name in utterances.names])
    train, validation, test = (np.flatnonzero(of_row == number) for number in range(3))
    if not len(train) or not len(validation) + len(test):
        logger.warning("only one of the corpus's splits is on disk: the speakers are split again")
        return None
    if not len(validation):
        # Without a validation split, the test split chooses the best checkpoint, and the report
        # says so.
        validation, test = test, validation
    held_out = utterances.labels[np.concatenate([validation, test])]
    shared = np.intersect1d(utterances.labels[train], held_out)
    if len(shared):
        names = ", ".join(utterances.speakers.take(shared[:MAX_NAMED]))
        raise ValueError(
            f"{len(shared)} speakers are in both the training and a held-out split (first: "
            f"{names}), so error rates say nothing about new speakers. Check that the corpus is "
            "complete; for your own folders, --layout pooled splits the speakers again"
        )
    return Split(train, validation, test)


# A plain draw of ten speakers may well have eight men, and an error rate of eight men is not that
# of the corpus. So every gender is spread evenly over the whole order: whatever stretch is held out
# has its share of each, and those of unknown gender count as one more.
def _interleave_genders(speakers: ndarray, genders: ndarray, seed: int) -> ndarray:
    """Shuffle the speakers so that every stretch has the overall proportion of genders."""
    shuffled = numpy_generator(seed).permutation(len(speakers))
    speakers = speakers[shuffled]
    genders = genders[shuffled]
    position = np.empty(len(speakers))
    for gender in np.unique(genders):
        members = np.flatnonzero(genders == gender)
        # The k-th of n members is placed at (k + 1/2) / n of the way.
        position[members] = (np.arange(len(members)) + 0.5) / len(members)
    return speakers[np.argsort(position, kind="stable")]


def _split_utterances(utterances: Utterances, seed: int) -> Split:
    """A third of each speaker's utterances, at least two, for validation; whole sessions first if
    known.
    """
    num_speakers = len(utterances.speakers)
    logger.warning(
        "too few speakers (%d) for speaker-disjoint validation: utterances of the training "
        "speakers are held out, so the error rate is optimistic for new speakers",
        num_speakers,
    )
    held_out = []
    for speaker in range(num_speakers):
        rows = np.flatnonzero(utterances.labels == speaker)
        # Two are held out, for a target trial, and two are left to train on.
        if len(rows) < 4:
            continue
        # One draw per speaker, so that another speaker's new recording changes nothing here.
        order = numpy_generator(seed, speaker).permutation(rows)
        sessions = utterances.sessions[order]
        # Sorted by session, so that at most one session is in both parts.
        if (sessions != UNKNOWN).all():
            order = order[np.argsort(sessions, kind="stable")]
        held_out.append(order[: max(2, len(order) // 3)])
    if len(held_out) < 2:
        raise ValueError(
            f"too few recordings for validation: {len(held_out)} of {num_speakers} speakers have "
            "four or more utterances; at least two speakers need them"
        )
    validation = np.sort(np.concatenate(held_out))
    train = np.setdiff1d(np.arange(len(utterances)), validation)
    return Split(train, validation, validation[:0])
