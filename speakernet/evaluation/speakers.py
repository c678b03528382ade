"""Who speaks in each utterance of a trial list: needed for intervals over speakers, and said in every report.

Sources, in this order: a CSV, the first part of the names that agrees with every trial (VoxCeleb's `id10270/…`, or the
second part of `dev/so0122/…`), the groups that target trials tie together. Which one was used is part of the answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from speakernet.data.lists import TrialList
from speakernet.evaluation.csv_tables import read_csv
from speakernet.terminal import MAX_NAMED


@dataclass(frozen=True)
class Speakers:
    """Speaker of every utterance.

    Attributes:
        ids: number of the speaker of each row of the list's names, int32 (utterances,).
        count: how many speakers there are.
        rule: how they were found, as a sentence for the report.
        names: of the speakers by number; empty where the rule gives none.
    """

    ids: np.ndarray
    count: int
    rule: str
    names: Sequence[str] = ()


def read_speaker_table(path: str | Path) -> dict[str, str]:
    """Path -> speaker of a CSV with the columns `path` and `speaker`.

    Raises:
        ValueError: not such a file, or one of the two columns is missing.
    """
    return {row["path"]: row["speaker"] for row in read_csv(path, ("path", "speaker"))[1]}


def speakers_of(trials: TrialList, table: Mapping[str, str] | None = None) -> Speakers:
    """The speaker of every utterance of a trial list, and the rule that told it.

    Args:
        trials: with or without labels.
        table: path -> speaker; then it is the only source.

    Raises:
        ValueError: the table lacks utterances of the list (the first ten are named).
    """
    names = list(trials.names)
    if table is not None:
        unknown = [name for name in names if name not in table]
        if unknown:
            named = ", ".join(unknown[:MAX_NAMED])
            raise ValueError(
                f"{trials.source}: the speaker table lacks {len(unknown)} of its {len(names)} utterances: {named}"
            )
        return _numbered([table[name] for name in names], "column 'speaker' of the CSV")
    parts = [name.replace("\\", "/").split("/") for name in names]
    if trials.labels is None:
        return _numbered([part[0] for part in parts], "first part of the name (the list has no labels to check it by)")
    depth = min(len(part) for part in parts)
    # The last part is the file: it never names a speaker.
    for position in range(depth - 1):
        candidate = _numbered([part[position] for part in parts], _rule_of_part(position))
        if _agrees(candidate.ids, trials):
            return candidate
    return _groups(trials, len(names))


def _rule_of_part(position: int) -> str:
    ordinal = {0: "first", 1: "second", 2: "third"}.get(position, f"{position + 1}th")
    return f"{ordinal} part of the name (equal in all target trials, different in all others)"


def _numbered(keys: list[str], rule: str) -> Speakers:
    known: dict[str, int] = {}
    ids = np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int32)
    return Speakers(ids, len(known), rule, list(known))


def _agrees(ids: np.ndarray, trials: TrialList) -> bool:
    assert trials.labels is not None
    return bool(np.all((ids[trials.enrol] == ids[trials.test]) == (trials.labels == 1)))


def _groups(trials: TrialList, num_names: int) -> Speakers:
    """Connected components of the target trials; an utterance without a target trial is a speaker of its own."""
    assert trials.labels is not None
    is_target = trials.labels == 1
    edges = (trials.enrol[is_target], trials.test[is_target])
    graph = coo_matrix((np.ones(len(edges[0]), dtype=np.int8), edges), shape=(num_names, num_names))
    count, ids = connected_components(graph, directed=False)
    # A non-target pair within a group means that labels contradict each other; it is said, not mended.
    inside = int(np.count_nonzero((ids[trials.enrol] == ids[trials.test]) & ~is_target))
    rule = "groups that target trials tie together"
    if inside:
        rule += f" ({inside} non-target trials lie inside a group: the labels contradict each other)"
    return Speakers(ids.astype(np.int32), int(count), rule)
