"""Who speaks in each utterance of a trial list: needed for intervals over speakers, and reported with them.

Sources, in this order: a CSV, the first folder of the names that agrees with every trial (VoxCeleb's `id10270/…`, or
the second one of `dev/so0122/…`), the groups that target trials connect. Which one was used is part of the result.
"""

import csv
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from speakernet.data.lists import TrialList
from speakernet.files import FileError, open_text, reading
from speakernet.terminal import MAX_NAMED


@dataclass(frozen=True)
class Speakers:
    """Speaker of every utterance."""

    ids: np.ndarray
    """Number of the speaker of each row of the list's names, int32 (utterances,)."""
    count: int
    rule: str
    """How they were found, for the report."""
    names: Sequence[str] = ()
    """Of the speakers by number; empty if the rule gives none."""
    sessions: np.ndarray | None = None
    """Number of the session of each row of the list's names, int32 (utterances,); None if sessions are not known."""


def read_csv(path: str | Path, needed: Sequence[str]) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of a CSV file with a line of headings; FileError if it lacks a column or a row does not fit."""
    expected = f"a CSV table in UTF-8 with the columns {', '.join(needed)}"
    with reading(path, expected), open_text(path) as file:
        reader = csv.DictReader(file)
        columns = list(reader.fieldnames or [])
        if missing := [name for name in needed if name not in columns]:
            raise FileError(f"{path}: no column {missing[0]!r}; its columns are {', '.join(columns)[:500] or 'none'}")
        rows = []
        for row in reader:
            # DictReader puts excess values under None, and None in place of missing ones.
            if None in row or None in row.values():
                raise FileError(f"{path}, line {reader.line_num}: expected {len(columns)} values, one for each column")
            rows.append(row)
    return columns, rows


def check_known(names: Iterable[str], known: Container[str], table: object) -> None:
    """Refuse a table that lacks some of the utterances."""
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{table}: lacks {len(unknown)} utterances of the list: {', '.join(unknown[:MAX_NAMED])}")


def speakers_of(trials: TrialList, table: str | Path | None = None) -> Speakers:
    """The speaker of every utterance of a trial list, by a CSV or by the names, and the rule that found it."""
    names = list(trials.names)
    if table:
        columns, rows = read_csv(table, ("path", "speaker"))
        by_path = {row["path"]: row for row in rows}
        check_known(names, by_path, table)
        found = _numbered([by_path[name]["speaker"] for name in names], "column 'speaker' of the CSV")
        if "session" not in columns:
            return found
        return replace(found, sessions=_numbered([by_path[name]["session"] for name in names], "").ids)
    folders = [name.replace("\\", "/").split("/") for name in names]
    if trials.labels is None:
        rule = "first part of the name (the list has no labels to check it by)"
        return _numbered([one[0] for one in folders], rule)
    # The last part is the file, which never names a speaker.
    for position in range(min(map(len, folders)) - 1):
        ordinal = {0: "first", 1: "second", 2: "third"}.get(position, f"{position + 1}th")
        rule = f"{ordinal} part of the name (equal in all target trials, different in all others)"
        found = _numbered([one[position] for one in folders], rule)
        if np.array_equal(found.ids[trials.enrol] == found.ids[trials.test], trials.labels == 1):
            if min(map(len, folders)) < position + 3:
                return found
            # Folders between the speaker's and the file, such as VoxCeleb's videos.
            return replace(found, sessions=_numbered(["/".join(one[:-1]) for one in folders], "").ids)
    # Connected components of the target trials; an utterance without one is a speaker of its own.
    is_target = trials.labels == 1
    edges = (trials.enrol[is_target], trials.test[is_target])
    graph = coo_matrix((np.ones(len(edges[0]), dtype=np.int8), edges), shape=(len(names), len(names)))
    count, ids = connected_components(graph, directed=False)
    inside = int(np.count_nonzero((ids[trials.enrol] == ids[trials.test]) & ~is_target))
    odd = f" ({inside} non-target trials lie inside a group: the labels contradict each other)" if inside else ""
    return Speakers(ids.astype(np.int32), int(count), f"groups that target trials connect{odd}")


def _numbered(keys: list[str], rule: str) -> Speakers:
    known: dict[str, int] = {}
    ids = np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int32)
    return Speakers(ids, len(known), rule, list(known))
