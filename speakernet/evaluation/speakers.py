"""Find the speaker of each utterance in a trial list, as needed for intervals over speakers.

Speakers come from a CSV; otherwise from the first folder level of the names that agrees with every
trial (the first of VoxCeleb's `id10270/…`, the second of `dev/so0122/…`); otherwise from the groups
that target trials connect. Without labels, the first level is used unchecked. The rule used is part
of the result.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from speakernet.data.lists import NameIndex, TrainingList, TrialList
from speakernet.data.names import one_word, original_name
from speakernet.files import FileError, open_text, reading
from speakernet.terminal import MAX_NAMED


@dataclass(frozen=True)
class Speakers:
    """The speaker of every utterance."""

    ids: np.ndarray
    """Speaker number of each utterance in the list's table of names, int32 (utterances,)."""
    count: int
    rule: str
    """How the speakers were found, for the report."""
    names: Sequence[str] = ()
    """Names of the speakers by number; empty if the rule gives none."""
    sessions: np.ndarray | None = None
    """Session number of each utterance in the list's table of names, int32 (utterances,); None if
    unknown."""


def read_csv(path: str | Path, needed: Sequence[str]) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of a CSV file with a header; FileError if a column is missing or a row has
    too few values.
    """
    expected = f"a CSV table in UTF-8 with the columns {', '.join(needed)}"
    with reading(path, expected), open_text(path) as file:
        reader = csv.DictReader(file)
        columns = list(reader.fieldnames or [])
        if missing := [name for name in needed if name not in columns]:
            raise FileError(
                f"{path}: no column {missing[0]!r}; its columns are "
                f"{', '.join(columns)[:500] or 'none'}"
            )
        rows = []
        for row in reader:
            # DictReader puts excess values under the key None, and None for missing values.
            if None in row or None in row.values():
                raise FileError(
                    f"{path}, line {reader.line_num}: expected {len(columns)} values, one per "
                    "column"
                )
            rows.append(row)
    return columns, rows


def read_rows(
    path: str | Path, needed: Sequence[str], names: Sequence[str]
) -> tuple[list[str], list[dict[str, str]]]:
    """Columns of a CSV file with a column `path`, and the row of each named utterance; ValueError
    if one is missing.
    """
    columns, rows = read_csv(path, ("path", *needed))
    by_path = {row["path"]: row for row in rows}
    if unknown := [name for name in names if name not in by_path]:
        raise ValueError(
            f"{path}: no row for {len(unknown)} of the utterances: {', '.join(unknown[:MAX_NAMED])}"
        )
    return columns, [by_path[name] for name in names]


def speakers_of(trials: TrialList, table: str | Path | None = None) -> Speakers:
    """The speaker of every utterance in a trial list, from a CSV or from the names, and the rule
    that found it; a model's speaker is that of its first recording, its session unknown if they
    differ.
    """
    if trials.models is None:
        return _speakers_of_recordings(trials, table)
    pairs, _ = trials.by_recording()
    models = trials.models
    speakers = _speakers_of_recordings(pairs, table)
    sessions = speakers.sessions
    if sessions is not None:
        lowest = np.minimum.reduceat(sessions[models.rows], models.starts)
        highest = np.maximum.reduceat(sessions[models.rows], models.starts)
        # A number that no test has.
        sessions = np.where(lowest == highest, lowest, -1).astype(np.int32)
    first = models.rows[models.starts]
    return replace(speakers, ids=speakers.ids[first], sessions=sessions)


def _speakers_of_recordings(trials: TrialList, table: str | Path | None) -> Speakers:
    names = list(trials.names)
    if table:
        columns, rows = read_rows(table, ("speaker",), names)
        speakers = _number_speakers([row["speaker"] for row in rows], "column 'speaker' of the CSV")
        if "session" not in columns:
            return speakers
        return replace(
            speakers, sessions=_number_speakers([row["session"] for row in rows], "").ids
        )
    # No list says who speaks, but nearly every corpus has a folder per speaker somewhere in its
    # paths, and the labels show which level it is: on that level, the two sides of a trial are
    # equal in all targets and different in all others. A level that fails a single trial is
    # rejected; a wrong label then costs the names, and the groups that targets connect take their
    # place.
    folders = [original_name(name).replace("\\", "/").split("/") for name in names]
    if trials.labels is None:
        rule = "first part of each path (unchecked: the list has no labels)"
        return _number_speakers([parts[0] for parts in folders], rule)
    is_target = trials.labels == 1
    # The last part is the file name, which is never the speaker.
    depth = min(map(len, folders)) - 1
    for position in range(depth):
        rule = (
            f"part {position + 1} of each path (it is equal in all target trials and different in "
            "all others)"
        )
        speakers = _number_speakers([parts[position] for parts in folders], rule)
        if np.array_equal(speakers.ids[trials.enrol] == speakers.ids[trials.test], is_target):
            if position + 2 < max(map(len, folders)):
                # There are folders between speaker and file, such as VoxCeleb's videos: these are
                # sessions.
                sessions = _number_speakers(["/".join(parts[:-1]) for parts in folders], "").ids
                speakers = replace(speakers, sessions=sessions)
            return speakers
    # Connected components of the target trials; an utterance in none of them counts as its own
    # speaker.
    edges = (trials.enrol[is_target], trials.test[is_target])
    weights = np.ones(len(edges[0]), dtype=np.int8)
    graph = coo_matrix((weights, edges), shape=(len(names), len(names)))
    count, ids = connected_components(graph, directed=False)
    return Speakers(ids.astype(np.int32), int(count), "groups that target trials connect")


def some_of_each(labels: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    """Rows of a random `count` utterances of each speaker (all if 0), in list order."""
    rows = np.arange(len(labels))
    if not count:
        return rows
    order = generator.permutation(len(labels))
    # A stable sort keeps the random order within a speaker, so the first rows are a random sample.
    order = order[np.argsort(labels[order], kind="stable")]
    first = np.searchsorted(labels[order], labels[order])
    return np.sort(order[rows - first < count])


def shared_speakers(members: TrainingList, trials: TrialList) -> np.ndarray:
    """The speakers of a training list who are also in a trial list, as rows (speakers,).

    They have a recording or their name in common.
    """
    by_path = members.labels[NameIndex(trials.recordings).find(members.paths) >= 0]
    # Speakers of several corpora are prefixed with the corpus's name.
    named = set(map(one_word, speakers_of(trials).names))
    speakers = (speaker.rpartition("/")[2] for speaker in members.speakers)
    by_name = [row for row, speaker in enumerate(speakers) if speaker in named]
    return np.union1d(by_path, np.array(by_name, dtype=np.int64))


def _number_speakers(keys: list[str], rule: str) -> Speakers:
    known: dict[str, int] = {}
    ids = np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int32)
    return Speakers(ids, len(known), rule, list(known))
