"""Trials without labels: what can be said of each one where there is no error rate, and the file that says it.

A score, a log-likelihood ratio where there is a calibration, and accept or refuse at each threshold that was fitted for
this way of scoring. Accepted is a trial whose score reaches the threshold.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speakernet.data.lists import TrialList
from speakernet.evaluation.calibration import threshold_label
from speakernet.files import atomic_write

ACCEPT, REFUSE = "accept", "refuse"
LLR_COLUMN = "llr"
NUM_IN_TERMINAL = 10


@dataclass(frozen=True)
class Decisions:
    """Scores of a list and what follows from them.

    Attributes:
        trials: the list.
        scores: (trials,).
        llrs: log-likelihood ratios (natural), (trials,); None without a calibration.
        thresholds: of this way of scoring, as a model file keeps them.
    """

    trials: TrialList
    scores: np.ndarray
    llrs: np.ndarray | None = None
    thresholds: Sequence[Mapping[str, Any]] = ()

    @property
    def says_more_than_scores(self) -> bool:
        """Whether there is anything beyond what `scores.txt` holds."""
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

    def num_accepted(self, threshold: Mapping[str, Any]) -> int:
        """Trials whose score reaches a threshold."""
        return int(np.count_nonzero(self.scores >= threshold["threshold"]))

    def sentences(self) -> list[str]:
        """How many trials each threshold accepts, and what cannot be said for want of a fit."""
        found = [
            f"{self.num_accepted(one):,} of {len(self.trials):,} pairs accepted at threshold {one['threshold']:.4f} "
            f"({described(one)})"
            for one in self.thresholds
        ]
        if not self.thresholds:
            found.append("no decisions: there is no threshold for this way of scoring")
        if self.llrs is None:
            found.append("no log-likelihood ratios: there is no calibration for this way of scoring")
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
    """The log-likelihood ratios that `Decisions.write` wrote, (trials,); None where the file has none.

    Raises:
        ValueError: the file is broken.
    """
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        if LLR_COLUMN not in header:
            return None
        column = header.index(LLR_COLUMN)
        try:
            return np.array([float(row[column]) for row in reader])
        except (IndexError, ValueError) as error:
            raise ValueError(
                f"{path}, line {reader.line_num}: no log-likelihood ratio; score the list again"
            ) from error
