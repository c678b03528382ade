"""The figures that come first, in words and numbers: the one place that says how an error rate is written.

Used by the last lines of a training, by `evaluate` and `compare`, and by the tiles of the report.
"""

import math
from dataclasses import dataclass

import numpy as np

from speakernet.evaluation.results import Interval, Results


@dataclass(frozen=True)
class HeadlineFigure:
    """One figure as it is shown.

    Attributes:
        name: such as `EER` or `minDCF(0.01)`.
        unit: behind the number; empty where it has none.
        value: the number.
        digits: behind the point.
        interval: of 95 % over speakers.
    """

    name: str
    unit: str
    value: float
    digits: int
    interval: Interval = None

    @property
    def label(self) -> str:
        """Name with the unit, for tables of bare numbers."""
        return f"{self.name} ({self.unit})" if self.unit else self.name

    @property
    def number(self) -> str:
        """The value without its unit."""
        return f"{self.value:.{self.digits}f}"

    @property
    def text(self) -> str:
        """The value with its unit."""
        return f"{self.number} {self.unit}".rstrip()

    @property
    def interval_text(self) -> str:
        """The interval with its unit; empty where there is none."""
        if self.interval is None:
            return ""
        low, high = self.interval
        return f"{low:.{self.digits}f} to {high:.{self.digits}f} {self.unit}".rstrip()


def headline(results: Results, digits: int = 2) -> list[HeadlineFigure]:
    """EER, the minDCFs, and where scores are calibrated the actual costs and Cllr; empty without error rates.

    Args:
        results: of one list.
        digits: of the EER in percent; costs have one more.

    >>> [one.text for one in headline(Results(eer_percent=5.21, min_dcf={"0.01": 0.4}, min_cllr=0.2))]
    ['5.21 %', '0.400', '0.200 bits']
    """
    if results.eer_percent is None:
        return []
    shown = [HeadlineFigure("EER", "%", results.eer_percent, digits, results.eer_interval_percent)]
    intervals = results.min_dcf_interval or {}
    # A cost of 0.4 has the weight of an EER of several percent: one digit more tells two systems apart.
    for prior, cost in results.min_dcf.items():
        shown.append(HeadlineFigure(f"minDCF({prior})", "", cost, digits + 1, intervals.get(prior)))
    for prior, cost in (results.act_dcf or {}).items():
        shown.append(HeadlineFigure(f"actual DCF({prior})", "", cost, digits + 1))
    for name, value in (("Cllr", results.cllr), ("min Cllr", results.min_cllr)):
        if value is not None:
            shown.append(HeadlineFigure(name, "bits", value, digits + 1))
    return shown


def threshold_text(threshold: float, scores: np.ndarray) -> str:
    """A threshold with the digits that tell it from other scores: a young network's lie between 0.99 and 1.

    >>> threshold_text(0.5612, np.array([0.1, 0.4, 0.8])), threshold_text(0.99964, np.array([0.998, 0.999, 1.0]))
    ('0.56', '0.99964')
    """
    spread = float(np.std(scores)) if len(scores) else 0.0
    digits = max(2, 1 - math.floor(math.log10(spread))) if spread > 0 else 4
    return f"{threshold:.{min(digits, 8)}f}"


def headline_sentence(results: Results, digits: int = 2) -> str:
    """EER with its interval, minDCFs and numbers of trials; or why there is no error rate."""
    trials = f"{results.num_trials:,} trials"
    if results.eer_percent is None:
        return f"{trials} scored; {results.why_no_eer or 'they are unlabelled, so there is no error rate'}"
    eer, *others = headline(results, digits)
    interval = (
        f" (95 % interval {eer.interval_text.removesuffix(' %')}, bootstrap over speakers)" if eer.interval else ""
    )
    costs = "".join(f", {one.name} {one.text}" for one in others if one.name.startswith("minDCF"))
    return f"{eer.name} {eer.text}{interval}{costs}; {trials}, {results.num_targets or 0:,} of them targets"
