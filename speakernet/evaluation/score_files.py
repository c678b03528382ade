"""Score files: `enrol test score` a line, in any order; our own, in that of the trial list, and those of other tools.

Reading gives the pairs as a `TrialList` and the scores beside it; matching them with a list goes by the pairs, and
names the first line that only one of the two has.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speakernet.data.lists import ListError, ListFile, Numbers, StringTable, TrialList
from speakernet.files import atomic_write
from speakernet.run_folder import EVALUATIONS, SCORES, evaluation_folder
from speakernet.terminal import MAX_NAMED

FORM = "'enrol test score', and as you like a fourth column target|nontarget"
KINDS = {b"target": 1, b"nontarget": 0}
LARGEST_SCORE = 1e30
"""Larger ones overflow where scores are squared; no scoring gives any."""


@dataclass(frozen=True)
class ScoreFile:
    """What a score file holds.

    Attributes:
        trials: the pairs; labels where every line has the fourth column, 1 target, 0 nontarget.
        scores: (trials,) float64; higher means more alike.
    """

    trials: TrialList
    scores: np.ndarray


def find_scores(path: Path, trials: TrialList) -> tuple[Path, np.ndarray]:
    """The score file of a list in a folder of a run or an evaluation (a file is itself), and its scores.

    Args:
        path: a score file or a folder; a run keeps the scores of its test list itself, others under `eval/`.
        trials: the list that the scores are of: its name tells evaluations of one run apart.

    Raises:
        ListError: no scores in the folder, or those of other lists.
        ValueError: NaN scores.
    """
    if not path.is_dir():
        return path, scores_for(trials, read_scores(path))
    found = sorted((path / EVALUATIONS).glob(f"*/{SCORES}"))
    own, named = path / SCORES, evaluation_folder(path, trials.source) / SCORES
    refused: ListError | None = None
    for candidate in (own, named, *(found if len(found) == 1 else ())):
        if not candidate.is_file():
            continue
        try:
            return candidate, scores_for(trials, read_scores(candidate))
        except ListError as error:
            # The run's own scores may be those of its test list, and the list's own lie under eval/.
            refused = refused or error
    if refused:
        raise refused
    if not found:
        raise ListError(f"{path}: no {SCORES}, nor one in {path}/{EVALUATIONS}/*/; score the list first, with --eval")
    names, other = ", ".join(one.parent.name for one in found), Path(trials.source).stem
    raise ListError(f"{path}/{EVALUATIONS} holds scores of {names}, none of {other}; name the folder of one of them")


def read_scores(path: str | Path) -> ScoreFile:
    """Read `enrol test score` lines, split as a trial list is; blank lines are skipped.

    Raises:
        ListError: missing, empty, not UTF-8, or a malformed line (named with its number).
    """
    file, rows = ListFile(path, None), Numbers()
    pairs: list[int] = []
    scores: list[float] = []
    kinds: list[int] = []
    for lines in file.blocks(tabs_only_where_present=True):
        words = lines.words()
        for line, (first, count) in enumerate(zip(lines.first.tolist(), lines.count.tolist(), strict=True)):
            if not count:
                continue
            fields = words[first : first + count]
            try:
                if count not in (3, 4) or not all(fields):
                    raise ValueError(count)
                scores.append(float(fields[2]))
                kinds.extend(KINDS[kind] for kind in fields[3:])
            except (ValueError, KeyError):
                file.refuse(lines.number(line), f"expected {FORM}, found {lines.text(line)!r}")
            pairs += rows[fields[0]], rows[fields[1]]
    if not pairs:
        raise ListError(f"{path}: no scores; expected lines {FORM}")
    both = np.array(pairs, dtype=np.int32).reshape(-1, 2)
    labels = np.array(kinds, dtype=np.int8) if len(kinds) == len(both) else None
    names = StringTable.from_strings(name.decode("utf-8") for name in rows)
    trials = TrialList(names, both[:, 0].copy(), both[:, 1].copy(), labels, str(path), file.sha256)
    return ScoreFile(trials, np.array(scores, dtype=np.float64))


def write_scores(path: str | Path, trials: TrialList, scores: np.ndarray) -> None:
    """Write one line a trial in the order of the list, atomically; names with spaces make a line tab-separated."""
    names = list(trials.names)
    with atomic_write(path) as file:
        for enrol, test, score in zip(trials.enrol.tolist(), trials.test.tolist(), scores.tolist(), strict=True):
            # A name with a space would otherwise be read as two.
            gap = "\t" if " " in names[enrol] or " " in names[test] else " "
            file.write(f"{names[enrol]}{gap}{names[test]}{gap}{score:.6f}\n")


def scores_for(trials: TrialList, found: ScoreFile) -> np.ndarray:
    """The score of each of these trials, (trials,) float64; the file may have them in any order.

    Raises:
        ListError: trials without a score, scores of no trial, or labels that contradict the list (the first of each).
        ValueError: scores that are NaN or infinite (the first ten lines are named).
    """
    rows = _rows_of(trials, found.trials)
    scores, source = found.scores[rows], found.trials.source
    # Not `>`: NaN compares as false.
    bad = np.sort(rows[~(np.abs(scores) <= LARGEST_SCORE)])
    if len(bad):
        lines = ", ".join(str(_line_of(source, int(row))) for row in bad[:MAX_NAMED])
        more = " …" if len(bad) > MAX_NAMED else ""
        raise ValueError(
            f"{source}: {len(bad)} of {len(scores)} scores are NaN, infinite or beyond {LARGEST_SCORE:g}: lines "
            f"{lines}{more}"
        )
    if trials.labels is not None and found.trials.labels is not None:
        other = np.flatnonzero(trials.labels != found.trials.labels[rows])
        if len(other):
            first = int(other[0])
            raise ListError(
                f"{source}: {len(other):,} of {len(scores):,} lines have another label than {trials.source}, first "
                f"line {_line_of(source, int(rows[first]))}: {_pair(trials, first)!r}; one of the two is wrong"
            )
    return scores


def _rows_of(ours: TrialList, theirs: TrialList) -> np.ndarray:
    """The row in `theirs` of each trial of `ours`, int64.

    Raises:
        ListError: they are not the same pairs, each as often.
    """
    # Rows of names count by first mention in both, so lists in one order have equal tables and equal rows.
    is_same = len(ours) == len(theirs) and ours.names == theirs.names
    if is_same and np.array_equal(ours.enrol, theirs.enrol) and np.array_equal(ours.test, theirs.test):
        return np.arange(len(ours))
    row_of = {name: row for row, name in enumerate(ours.names)}
    known = np.array([row_of.get(name, -1) for name in theirs.names], dtype=np.int64)
    enrol, test = known[theirs.enrol], known[theirs.test]
    wanted = ours.enrol.astype(np.int64) * len(row_of) + ours.test
    there = np.where((enrol >= 0) & (test >= 0), enrol * len(row_of) + test, -1)
    order, their_order = np.argsort(wanted, kind="stable"), np.argsort(there, kind="stable")
    if not np.array_equal(wanted[order], there[their_order]):
        again = np.setdiff1d(np.arange(len(there)), np.unique(there, return_index=True)[1])
        exchanged = np.where((enrol >= 0) & (test >= 0), test * len(row_of) + enrol, -1)
        if np.array_equal(wanted[order], np.sort(exchanged)):
            raise ListError(
                f"{theirs.source} has the trials of {ours.source} with enrol and test exchanged; write the enrolment "
                "first, as in the list"
            )
        raise ListError(_difference(ours, theirs, ~np.isin(wanted, there), ~np.isin(there, wanted), again))
    rows = np.empty(len(ours), dtype=np.int64)
    rows[order] = their_order
    return rows


def _difference(
    ours: TrialList, theirs: TrialList, is_missing: np.ndarray, is_extra: np.ndarray, again: np.ndarray
) -> str:
    found = [f"{theirs.source} has {len(theirs):,} scores, {ours.source} has {len(ours):,} trials"]
    for trials, is_alone, what in (
        (ours, is_missing, "trials have no score"),
        (theirs, is_extra, "scores have no trial"),
    ):
        if is_alone.any():
            row = int(np.argmax(is_alone))
            line = f"line {_line_of(trials.source, row)} of {trials.source}: {_pair(trials, row)!r}"
            found.append(f"{int(is_alone.sum()):,} {what}, first {line}")
    if len(found) == 1:
        line = (
            f", first line {_line_of(theirs.source, int(again[0]))}: {_pair(theirs, int(again[0]))!r}"
            if len(again)
            else ""
        )
        found.append(f"the same pairs, but not each as often{line}")
    return "; ".join(found) + "; give the scores of this very list"


def _pair(trials: TrialList, row: int) -> str:
    return f"{trials.names[int(trials.enrol[row])]} {trials.names[int(trials.test[row])]}"


def _line_of(path: str, row: int) -> int:
    """The line number of entry `row` (blank lines do not count); its own number if the file is gone."""
    if not Path(path).is_file():
        return row + 1
    with Path(path).open("rb") as file:
        filled = (number for number, line in enumerate(file, start=1) if line.split())
        return next(itertools.islice(filled, row, None), row + 1)
