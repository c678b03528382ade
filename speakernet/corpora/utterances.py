"""The utterances of a corpus as compact arrays: name, speaker, session, gender; what splits and trials are made from.

Built from list files, tables or folder walks; knows nothing of audio.
"""

import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from speakernet.data.lists import ListError, StringTable, read_training_list
from speakernet.files import open_text, reading
from speakernet.options import suggestion

UNKNOWN = -1
NUM_EXAMPLES = 5
"""So many of the names that are meant stand in a sentence about a list."""
#: Headings that a table may use -> what they mean here.
HEADINGS = {
    "path": "path", "file": "path", "filename": "path", "audio": "path", "wav": "path",
    "speaker": "speaker", "speaker_id": "speaker", "client_id": "speaker", "spk": "speaker",
    "session": "session", "session_id": "session",
    "gender": "gender", "sex": "gender",
}  # fmt: skip


class Row(NamedTuple):
    """One utterance. Session and gender are empty where unknown."""

    speaker: str
    name: str
    session: str = ""
    gender: str = ""


@dataclass
class Utterances:
    """Utterances in a fixed order.

    Attributes:
        names: path of each utterance.
        labels: row of `speakers` of each utterance, int32 (utterances,).
        speakers: names of the speakers, sorted.
        sessions: number of each utterance's session, unique over speakers, -1 where unknown, int32 (utterances,).
        genders: number of each speaker's gender, -1 where unknown, int32 (speakers,).
    """

    names: StringTable
    labels: np.ndarray
    speakers: StringTable
    sessions: np.ndarray
    genders: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def counts(self) -> np.ndarray:
        """Utterances of each speaker, int64 (speakers,)."""
        return np.bincount(self.labels, minlength=len(self.speakers))

    def of_speakers(self, speakers: np.ndarray) -> np.ndarray:
        """Rows of the utterances of these speakers, ascending."""
        is_wanted = np.zeros(len(self.speakers), dtype=bool)
        is_wanted[speakers] = True
        return np.flatnonzero(is_wanted[self.labels])

    def pairs(self, rows: np.ndarray) -> Iterator[tuple[str, str]]:
        """(speaker, name) of the rows, ready for `write_training_list`."""
        for row in rows.tolist():
            yield self.speakers[int(self.labels[row])], self.names[row]


def utterances_from_rows(rows: Iterable[Row]) -> Utterances:
    """Collect rows into arrays; a speaker's gender is the first one said."""
    content = bytearray()
    ends = [0]
    speakers: dict[str, int] = {}
    labels: list[int] = []
    sessions: dict[tuple[int, str], int] = {}
    session_of: list[int] = []
    genders: dict[str, int] = {}
    gender_of: list[int] = []
    for row in rows:
        content += row.name.encode("utf-8")
        ends.append(len(content))
        label = speakers.setdefault(row.speaker, len(speakers))
        if label == len(gender_of):
            gender_of.append(UNKNOWN)
        if row.gender and gender_of[label] == UNKNOWN:
            gender_of[label] = genders.setdefault(row.gender.strip().lower()[:1], len(genders))
        labels.append(label)
        session_of.append(sessions.setdefault((label, row.session), len(sessions)) if row.session else UNKNOWN)
    # One buffer, never a Python string a row, as in lists.
    names = StringTable(np.frombuffer(bytes(content), dtype=np.uint8), np.array(ends, dtype=np.int64))
    # Sorted, so that a label means the same on every machine whatever order the disk gives.
    by_name = sorted(speakers)
    new_label = np.empty(len(by_name), dtype=np.int32)
    new_genders = np.empty(len(by_name), dtype=np.int32)
    for label, speaker in enumerate(by_name):
        new_label[speakers[speaker]] = label
        new_genders[label] = gender_of[speakers[speaker]]
    old_labels = np.array(labels, dtype=np.int32)
    return Utterances(
        names=names,
        labels=new_label[old_labels] if len(old_labels) else old_labels,
        speakers=StringTable.from_strings(by_name),
        sessions=np.array(session_of, dtype=np.int32),
        genders=new_genders,
    )


def utterances_from_list(path: str | Path) -> Utterances:
    """A training list as utterances; sessions and genders stay unknown.

    Raises:
        ListError: the list is malformed.
    """
    training = read_training_list(path)
    return Utterances(
        names=training.paths,
        labels=training.labels,
        speakers=training.speakers,
        sessions=np.full(len(training), UNKNOWN, dtype=np.int32),
        genders=np.full(len(training.speakers), UNKNOWN, dtype=np.int32),
    )


def take(utterances: Utterances, rows: np.ndarray) -> Utterances:
    """Only these rows; speakers that lost all of theirs are gone too."""
    labels = utterances.labels[rows]
    speakers, new_labels = np.unique(labels, return_inverse=True)
    return Utterances(
        names=utterances.names.take(rows),
        labels=new_labels.astype(np.int32),
        speakers=utterances.speakers.take(speakers) if len(speakers) else StringTable.from_strings([]),
        sessions=utterances.sessions[rows],
        genders=utterances.genders[speakers],
    )


def read_table(path: str | Path) -> Iterator[Row]:
    """Rows of a CSV or TSV table with headings `path,speaker[,session,gender]` (in any order, more are fine).

    Raises:
        ListError: no such headings, or a row without path or speaker (named with its line).
    """
    path = Path(path)
    # Excel writes a byte-order mark, which would become part of the first heading.
    expected = "a table in UTF-8 with the headings path,speaker[,session,gender]"
    with reading(path, expected, ListError), open_text(path) as file:
        first = file.readline()
        file.seek(0)
        reader = csv.DictReader(file, delimiter="\t" if "\t" in first else ",")
        columns: dict[str, str] = {}
        for heading in reader.fieldnames or ():
            meaning = HEADINGS.get(heading.strip().lower())
            if meaning is not None:
                columns.setdefault(meaning, heading)
        for needed in ("path", "speaker"):
            if needed not in columns:
                found = ", ".join(reader.fieldnames or ["nothing"])
                near = suggestion(needed, reader.fieldnames or ())
                raise ListError(
                    f"{path}, line 1: no column {needed!r} among {found} ({near}); "
                    "expected the headings path,speaker[,session,gender]"
                )
        for row in reader:
            values = {meaning: (row[heading] or "").strip() for meaning, heading in columns.items()}
            if not values["path"] or not values["speaker"]:
                raise ListError(f"{path}, line {reader.line_num}: the row has no path or no speaker")
            yield Row(values["speaker"], values["path"], values.get("session", ""), values.get("gender", ""))


def pattern_rule(pattern: str) -> "re.Pattern[str]":
    """A regular expression over relative paths with the named group `speaker` (and, optionally, `session`, `gender`).

    Raises:
        ValueError: it is malformed or has no group `speaker`.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"the pattern {pattern!r} is no regular expression: {error}") from error
    if "speaker" not in compiled.groupindex:
        raise ValueError(
            f"the pattern {pattern!r} has no group named speaker; write (?P<speaker>...) around the speaker's name, "
            r"as in (?P<speaker>[^/]+)/(?P<session>[^/]+)/.*"
        )
    return compiled


def row_by_pattern(rule: "re.Pattern[str]", name: str) -> Row | None:
    """The row of a path by `pattern_rule`, or None where the pattern does not match."""
    match = rule.search(name)
    if match is None or not match.group("speaker"):
        return None
    groups = match.groupdict(default="")
    return Row(groups["speaker"], name, groups.get("session", ""), groups.get("gender", ""))


def row_by_folder(name: str, depth: int = 0) -> Row | None:
    """The row of `speaker/utterance` or `speaker/session/…/utterance` below `depth` other folders; None if not as deep.

    >>> row_by_folder("anna/monday/1.wav")
    Row(speaker='anna', name='anna/monday/1.wav', session='monday', gender='')
    """
    parts = name.split("/")
    if len(parts) < depth + 2:
        return None
    return Row(parts[depth], name, "/".join(parts[depth + 1 : -1]))
