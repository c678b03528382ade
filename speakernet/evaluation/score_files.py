"""Files of scores: `enrol test score` a line, our own and those of other tools; and decisions on unlabelled trials.

Reading gives the pairs as a `TrialList` and the scores beside it, in the order of the file; matching them with a list
goes by the pairs, and names the first line that only one of the two has.
"""

import csv
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speakernet.data.lists import ListError, ListFile, StringTable, TrialList, numbers, split_row
from speakernet.evaluation.calibration import threshold_label
from speakernet.files import FileError, atomic_write, open_text, reading, sha256_of
from speakernet.run_folder import EVALUATIONS, SCORES, evaluation_folder
from speakernet.terminal import MAX_NAMED, counted

FORM = "'enrol test score', optionally with a fourth column target|nontarget"
KINDS = {b"target": 1, b"nontarget": 0}
LARGEST_SCORE = 1e30
"""Larger ones overflow when scores are squared; no scoring gives any."""
ACCEPT, REFUSE = "accept", "refuse"
LLR_COLUMN = "llr"
NUM_IN_TERMINAL = 10


@dataclass(frozen=True)
class ScoreFile:
    """What a score file holds."""

    trials: TrialList
    """The pairs; with labels if every line has the fourth column."""
    scores: np.ndarray
    """(trials,) float64; higher means more alike."""


def find_scores(path: Path, trials: TrialList) -> tuple[Path, np.ndarray]:
    """The score file of a list in the folder of a run or an evaluation (or the file itself), and its scores."""
    if not path.is_dir():
        return path, scores_for(trials, read_scores(path))
    found = sorted((path / EVALUATIONS).glob(f"*/{SCORES}"))
    own, named = path / SCORES, evaluation_folder(path, trials.source) / SCORES
    refused: ListError | None = None
    for candidate in (own, named, *(found if len(found) == 1 else ())):
        if candidate.is_file():
            try:
                return candidate, scores_for(trials, read_scores(candidate))
            except ListError as error:
                # The run's own scores may be those of another list, with the wanted ones under eval/.
                refused = refused or error
    if refused:
        raise refused
    if not found:
        raise ListError(f"{path}: no {SCORES}, nor one in {path}/{EVALUATIONS}/*/; score the list first, with --eval")
    names, other = ", ".join(one.parent.name for one in found), Path(trials.source).stem
    raise ListError(f"{path}/{EVALUATIONS} holds scores of {names}, none of {other}; name the folder of one of them")


def read_scores(path: str | Path) -> ScoreFile:
    """Read `enrol test score` lines, split as a trial list is; blank lines are skipped."""
    file, rows = ListFile(path), numbers()
    pairs: list[int] = []
    scores: list[float] = []
    kinds: list[int] = []
    for number, line in file:
        fields = split_row(line)
        try:
            if len(fields) not in (3, 4) or not all(fields):
                raise ValueError(len(fields))
            scores.append(float(fields[2]))
            kinds.extend(KINDS[kind] for kind in fields[3:])
        except (ValueError, KeyError):
            file.expected(number, FORM, line)
        pairs += rows[fields[0]], rows[fields[1]]
    if not pairs:
        raise ListError(f"{path}: no scores; expected lines {FORM}")
    both = np.array(pairs, dtype=np.int32).reshape(-1, 2)
    labels = np.array(kinds, dtype=np.int8) if len(kinds) == len(both) else None
    names = StringTable.from_bytes(rows)
    trials = TrialList(names, both[:, 0].copy(), both[:, 1].copy(), labels, str(path), sha256_of(path))
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
    """The score of each of these trials, (trials,) float64; the file may have them in any order."""
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
            raise ListError(
                f"{source}: {len(other):,} of {len(scores):,} lines have another label than {trials.source}, first "
                f"{_entry(found.trials, int(rows[other[0]]))}; one of the two is wrong"
            )
    return scores


def _rows_of(ours: TrialList, theirs: TrialList) -> np.ndarray:
    """The row in `theirs` of each trial of `ours`, int64; ListError if they are not the same pairs, each as often."""
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
        found = [f"{theirs.source} has {len(theirs):,} scores, {ours.source} has {len(ours):,} trials"]
        for trials, keys, others in ((ours, wanted, there), (theirs, there, wanted)):
            alone = np.flatnonzero(~np.isin(keys, others))
            if len(alone):
                found.append(f"{len(alone):,} are in {trials.source} only, first {_entry(trials, int(alone[0]))}")
        again = np.setdiff1d(np.arange(len(there)), np.unique(there, return_index=True)[1])
        if len(found) == 1 and len(again):
            found.append(f"not each pair as often, first {_entry(theirs, int(again[0]))}")
        if np.array_equal(wanted[order], np.sort(np.where(there >= 0, test * len(row_of) + enrol, -1))):
            found.append("the same pairs with enrol and test exchanged")
        raise ListError("; ".join(found) + "; expected the scores of this very list")
    rows = np.empty(len(ours), dtype=np.int64)
    rows[order] = their_order
    return rows


def _entry(trials: TrialList, row: int) -> str:
    names, line = trials.names, _line_of(trials.source, row)
    return f"line {line}: '{names[int(trials.enrol[row])]} {names[int(trials.test[row])]}'"


def _line_of(path: str, row: int) -> int:
    """The line number of entry `row` (blank lines do not count); its own number if the file is gone."""
    if not Path(path).is_file():
        return row + 1
    with Path(path).open("rb") as file:
        filled = (number for number, line in enumerate(file, start=1) if line.split())
        return next(itertools.islice(filled, row, None), row + 1)


@dataclass(frozen=True)
class Decisions:
    """Unlabelled trials: their scores, log-likelihood ratios if there is a calibration, and a decision per threshold.

    A trial is accepted if its score reaches the threshold.
    """

    trials: TrialList
    scores: np.ndarray
    """(trials,)."""
    llrs: np.ndarray | None = None
    """Natural, (trials,)."""
    thresholds: Sequence[Mapping[str, Any]] = ()
    """Of this way of scoring, as a model file keeps them."""

    @property
    def says_more_than_scores(self) -> bool:
        """Whether there is anything that `scores.txt` does not hold."""
        return self.llrs is not None or bool(self.thresholds)

    @property
    def header(self) -> list[str]:
        """Names of the columns, for scripts."""
        llr = [] if self.llrs is None else [LLR_COLUMN]
        return ["enrol", "test", "score", *llr, *(str(one["name"]) for one in self.thresholds)]

    def row(self, number: int) -> list[str]:
        """The columns of one trial."""
        names, score = self.trials.names, float(self.scores[number])
        llr = [] if self.llrs is None else [f"{self.llrs[number]:.4f}"]
        verdicts = [ACCEPT if score >= one["threshold"] else REFUSE for one in self.thresholds]
        enrol, test = names[int(self.trials.enrol[number])], names[int(self.trials.test[number])]
        return [enrol, test, f"{score:.6f}", *llr, *verdicts]

    def sentences(self) -> list[str]:
        """How many trials each threshold accepts, and what is missing for decisions."""
        total = len(self.trials)
        found = [
            f"{int(np.count_nonzero(self.scores >= one['threshold'])):,} of {counted(total, 'pair')} accepted at "
            f"threshold {one['threshold']:.4f} ({described(one)})"
            for one in self.thresholds
        ]
        if not self.thresholds:
            found.append("no decisions: there is no threshold for this scoring method")
        if self.llrs is None:
            found.append("no log-likelihood ratios: there is no calibration for this scoring method")
        if not self.thresholds or self.llrs is None:
            found.append(
                "to fit them on labelled trials: --evaluation.calibration_list LIST with --eval, or `speakernet "
                "calibrate` for the model file; for score files --fusion_scores and --fusion_trials"
            )
        return found

    def lines(self) -> list[str]:
        """The first trials as a table of text, then the sentences; for a terminal."""
        count = min(len(self.trials), NUM_IN_TERMINAL)
        rows = [self.header, *(self.row(number) for number in range(count))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        more = [f"… and {len(self.trials) - count:,} more"] if count < len(self.trials) else []
        return [*table, *more, *self.sentences()]

    def write(self, path: Path) -> None:
        """Write a CSV: header, then a trial a line in the order of the list."""
        with atomic_write(path) as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self.header)
            writer.writerows(self.row(number) for number in range(len(self.trials)))


def described(threshold: Mapping[str, Any]) -> str:
    """What a threshold was chosen for, and on which list."""
    fitted_on = f" on {threshold['list']}" if threshold.get("list") else ""
    return f"{threshold_label(str(threshold['name']))}{fitted_on}"


def read_llrs(path: Path) -> np.ndarray | None:
    """The log-likelihood ratios that `Decisions.write` wrote, (trials,); None if the file has none."""
    with reading(path, "decisions; score the list again"), open_text(path) as file:
        reader = csv.reader(file)
        header = next(reader, [])
        if LLR_COLUMN not in header:
            return None
        column = header.index(LLR_COLUMN)
        try:
            return np.array([float(row[column]) for row in reader])
        except (IndexError, ValueError) as error:
            raise FileError(f"{path}, line {reader.line_num}: no log-likelihood ratio; score the list again") from error
