"""Score files, of this toolkit or another: lines `enrol test score`, matched with a list by
pair.
"""

from pathlib import Path

import numpy as np

from speakernet.data.lists import (
    ListError,
    ListFile,
    NameIndex,
    StringTable,
    TrialList,
    numbers,
    split_row,
)
from speakernet.files import atomic_write, sha256_of

FORM = "'enrol test score' with a finite score, optionally with a fourth column target|nontarget"
KINDS = {b"target": 1, b"nontarget": 0}
LARGEST_SCORE = 1e30
"""Larger scores overflow when squared; no scoring method produces them."""
SCORE_FORMAT = ".9g"
"""Of scores and ratios in files: nine significant digits give back the same float32."""


def read_scores(path: str | Path) -> tuple[TrialList, np.ndarray]:
    """Read lines `enrol test score`, split like those of a trial list; blank lines are skipped.

    Returns:
        The pairs, with labels if every line has the fourth column, and the scores (trials,)
        float64; higher means more alike.
    """
    file = ListFile(path, kind=f"a score file with lines {FORM}, or the folder of a run")
    # Names become numbers at once, because two strings for each of ten million lines would take
    # gigabytes.
    name_numbers = numbers()
    pairs: list[int] = []
    scores: list[float] = []
    kinds: list[int] = []
    for number, line in file:
        fields = split_row(line)
        if len(fields) not in (3, 4) or not all(fields):
            file.expected(number, FORM, line)
        try:
            score = float(fields[2])
            kinds.extend(KINDS[kind] for kind in fields[3:])
        except (ValueError, KeyError):
            file.expected(number, FORM, line)
        # Not `>`, since NaN compares as false.
        if not abs(score) <= LARGEST_SCORE:
            file.expected(number, FORM, line)
        scores.append(score)
        pairs += name_numbers[fields[0]], name_numbers[fields[1]]
    # Otherwise an empty file would be reported as one that lacks every pair of the list.
    if not pairs:
        raise ListError(f"{path}: no scores; expected lines {FORM}")
    # Copied, because columns of a table are not contiguous in memory.
    enrol, test = np.array(pairs, dtype=np.int32).reshape(-1, 2).T.copy()
    labels = np.array(kinds, dtype=np.int8) if len(kinds) == len(enrol) else None
    names = StringTable.from_bytes(name_numbers)
    trials = TrialList(names, enrol, test, labels, str(path), sha256_of(path))
    return trials, np.array(scores, dtype=np.float64)


def write_scores(path: str | Path, trials: TrialList, scores: np.ndarray) -> None:
    """Write one line per trial in list order, atomically; a line is tab-separated if a name
    contains a space.

    Nine digits keep float32 scores apart: early in training all lie within a thousandth of 1.
    """
    names = list(trials.names)
    with atomic_write(path) as file:
        for enrol, test, score in zip(
            trials.enrol.tolist(), trials.test.tolist(), scores.tolist(), strict=True
        ):
            gap = "\t" if " " in names[enrol] or " " in names[test] else " "
            file.write(f"{names[enrol]}{gap}{names[test]}{gap}{score:{SCORE_FORMAT}}\n")


def scores_for(trials: TrialList, path: str | Path) -> np.ndarray:
    """The scores of these trials, (trials,) float64, from a file that may list them in any
    order.
    """
    theirs, all_scores = read_scores(path)
    rows = _rows_of(trials, theirs)
    scores = all_scores[rows]
    if trials.labels is not None and theirs.labels is not None:
        different = np.flatnonzero(trials.labels != theirs.labels[rows])
        if len(different):
            enrol, test = trials.pair(int(different[0]))
            raise ListError(
                f"{path}: {len(different):,} of {len(scores):,} labels differ from "
                f"{trials.source}, first of '{enrol} {test}'; correct the wrong file"
            )
    return scores


def _rows_of(ours: TrialList, theirs: TrialList) -> np.ndarray:
    """The row in `theirs` of each trial of `ours`, int64; ListError unless both have the same pairs
    equally often.
    """
    # Both number names by first mention, so lists in the same order have equal tables and equal
    # rows.
    if (
        ours.names.equals(theirs.names)
        and np.array_equal(ours.enrol, theirs.enrol)
        and np.array_equal(ours.test, theirs.test)
    ):
        return np.arange(len(ours))
    # Another tool may write its scores in any order. Each pair gets a number, and both lists are
    # sorted by it: if they have the same pairs equally often, the sorted numbers are equal. A score
    # of b against a is not used for a against b, because some methods are not symmetric.
    known = NameIndex(ours.names).find(theirs.names)
    enrol = known[theirs.enrol]
    test = known[theirs.test]
    # One number for each pair, -1 for a pair of names that we do not have.
    pairs = ours.enrol.astype(np.int64) * len(ours.names) + ours.test
    their_pairs = np.where((enrol >= 0) & (test >= 0), enrol * len(ours.names) + test, -1)
    order = np.argsort(pairs, kind="stable")
    their_order = np.argsort(their_pairs, kind="stable")
    if not np.array_equal(pairs[order], their_pairs[their_order]):
        lacking = _describe_lacking(ours, ~np.isin(pairs, their_pairs), theirs)
        lacking += _describe_lacking(theirs, ~np.isin(their_pairs, pairs), ours)
        problems = "; ".join(lacking) or "some pairs are repeated more often in one than the other"
        raise ListError(
            f"{theirs.source} has {len(theirs):,} scores for the {len(ours):,} trials of "
            f"{ours.source}; expected each pair of the list equally often; {problems}"
        )
    rows = np.empty(len(ours), dtype=np.int64)
    rows[order] = their_order
    return rows


def _describe_lacking(trials: TrialList, is_lacking: np.ndarray, other: TrialList) -> list[str]:
    """A sentence about the trials that another list lacks; no sentence without any."""
    rows = np.flatnonzero(is_lacking)
    if not len(rows):
        return []
    enrol, test = trials.pair(int(rows[0]))
    return [
        f"{len(rows):,} pairs of {trials.source} are not in {other.source}, the first is '{enrol} "
        f"{test}'"
    ]
