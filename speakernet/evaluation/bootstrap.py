"""Confidence intervals and paired comparisons by drawing speakers with replacement.

Trials of one speaker rise and fall together, so drawing trials would give intervals that are too narrow. Each draw
takes as many speakers as there are; a target trial counts as often as its speaker was drawn, a trial between two
speakers the product of their draws. Scores are sorted once; a draw costs a few passes over the trials.

Source: Poh and Bengio, Estimating the confidence interval of expected performance curve in biometric authentication
using joint bootstrap, 2007 (drawing users); percentile intervals.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri

from speakernet.evaluation.metrics import check_trials, crossing, default_cost, group_starts
from speakernet.evaluation.results import GroupResult, Interval
from speakernet.random import numpy_generator
from speakernet.terminal import Bar

MIN_SPEAKERS = 5
"""Below this, an interval over speakers would be a guess."""
ROUGH_SPEAKERS = 20
"""Below this, the interval is called rough."""
MIN_TARGETS = 10
"""Below this, a group's note says so."""
MAX_WORK = 2_000_000_000
"""Product of trials and draws; above it fewer draws are made (and the number is reported)."""
SHOWN_WORK = 100_000_000
"""Product of trials and draws from which a progress bar is shown (seconds)."""
MIN_DRAWS = 100
STREAM = 6101
LEVEL_PERCENT = 95.0
BAND_FALSE_ACCEPTS = ndtr(np.linspace(ndtri(1e-5), ndtri(0.98), 50))
"""False-accept rates at which a DET curve gets its interval: evenly spaced as the curve is drawn."""


@dataclass(frozen=True)
class Measured:
    """Figures of one set of trials, with their intervals over speakers."""

    eer_percent: float
    min_dcf: list[float]
    """At each operating point."""
    eer_interval: Interval
    min_dcf_intervals: list[Interval]
    num_draws: int
    """Draws that had trials of both kinds."""
    note: str
    """Why there is no interval, or why it is rough; else empty."""
    band: np.ndarray | None
    """(3, points): false-accept rates, lowest and highest miss rate of the DET curve; None without draws."""


class SpeakerBootstrap:
    """One score file prepared for drawing: sorted once, each draw evaluated by `figures`."""

    def __init__(
        self,
        scores: np.ndarray,
        labels: np.ndarray,
        enrol_speakers: np.ndarray,
        test_speakers: np.ndarray,
        operating_points: Sequence[tuple[float, float, float]],
        false_accepts: np.ndarray | None = None,
    ) -> None:
        scores, labels = check_trials(scores, labels)
        # Only speakers with a trial are drawn: those of a slice are fewer.
        present, numbers = np.unique(np.concatenate([enrol_speakers, test_speakers]), return_inverse=True)
        enrol, test = numbers[: len(labels)], numbers[len(labels) :]
        # Sorted once for all draws: a draw only changes how often each trial counts.
        order = np.argsort(scores, kind="stable")
        # Equal scores are accepted or rejected together: rates exist at the ends of their groups only.
        self._ends = np.append(group_starts(scores[order])[1:], len(labels)) - 1
        self._labels = labels[order]
        self._first = enrol[order].astype(np.int64)
        # A target trial counts its speaker once: its second side points at a speaker that is drawn exactly once.
        is_within = labels | (enrol == test)
        self._second = np.where(is_within, len(present), test)[order].astype(np.int64)
        self._points = operating_points
        self.false_accepts = np.empty(0) if false_accepts is None else false_accepts
        self.num_trials, self.num_speakers = len(labels), len(present)
        self.num_target_speakers = len(np.unique(self._first[self._labels]))

    def figures(self, counts: np.ndarray | None = None) -> np.ndarray | None:
        """EER in percent, minDCFs and miss rates, (figures,), if speaker s is drawn `counts[s]` times (None: once).

        None without targets or non-targets.
        """
        counts = np.append(np.ones(self.num_speakers, dtype=np.int64) if counts is None else counts, 1)
        weights = counts[self._first] * counts[self._second]
        all_below = np.cumsum(weights)
        targets_below = np.cumsum(weights * self._labels)
        num_targets, num_all = int(targets_below[-1]), int(all_below[-1])
        if num_targets in (0, num_all):
            return None
        miss = np.concatenate([[0.0], targets_below[self._ends] / num_targets])
        rejected = np.concatenate([[0.0], (all_below - targets_below)[self._ends] / (num_all - num_targets)])
        false_accept = 1 - rejected
        costs = [
            float((c_miss * prior * miss + c_fa * (1 - prior) * false_accept).min()) / default_cost(prior, c_miss, c_fa)
            for prior, c_miss, c_fa in self._points
        ]
        # The lowest threshold that accepts no more non-targets than wanted, whatever the rounding of an exact rate.
        rows = np.searchsorted(rejected, 1 - self.false_accepts - 1e-12)
        return np.array([100 * crossing(miss, false_accept)[1], *costs, *miss[rows]])

    def measure(self, wanted: int, seed: int) -> Measured:
        """EER and minDCFs with 95 % intervals from so many draws, or a note that says why there are none."""
        plain, num_costs = self.figures(), len(self._points)
        assert plain is not None, "there are trials of both kinds"
        eers, *others = _drawn([self], wanted, seed)[0].T
        # What never failed never fails in a draw: equal draws make no interval.
        spreads = [interval_of(values) if len(values) and np.ptp(values) > 0 else None for values in (eers, *others)]
        eer_interval, intervals = spreads[0], spreads[1 : 1 + num_costs]
        misses = [interval_of(values) for values in others[num_costs:] if len(values) > 0]
        band = np.array([self.false_accepts, *np.array(misses).T]) if misses else None
        note = speakers_note(self.num_speakers)
        if len(eers) and eer_interval is None:
            note = same_in_all_draws_note(plain[0], self.num_target_speakers)
        costs = plain[1 : 1 + num_costs].tolist()
        return Measured(float(plain[0]), costs, eer_interval, intervals, len(eers), note, band)


def group_result(
    label: str, prepared: SpeakerBootstrap, priors: Sequence[str], num_targets: int | None, num_draws: int, seed: int
) -> GroupResult:
    """The figures of a group of trials as a row of a table; without priors and numbers, the EER alone."""
    found = prepared.measure(num_draws, seed)
    few = f"only {num_targets} targets" if num_targets is not None and num_targets < MIN_TARGETS else ""
    return GroupResult(
        label,
        found.eer_percent,
        found.eer_interval,
        note="; ".join(one for one in (few, found.note) if one),
        num_trials=None if num_targets is None else prepared.num_trials,
        num_targets=num_targets,
        min_dcf=dict(zip(priors, found.min_dcf, strict=True)) or None,
    )


def draw_speakers(num_speakers: int, num_draws: int, seed: int) -> np.ndarray:
    """How often each speaker is drawn, int64 (draws, speakers); draw i does not depend on the number of draws."""
    counts = np.empty((num_draws, num_speakers), dtype=np.int64)
    for draw in range(num_draws):
        # Keyed by the draw, so that two systems meet the same speakers and more draws keep the first ones.
        chosen = numpy_generator(seed, STREAM, draw).integers(0, num_speakers, num_speakers)
        counts[draw] = np.bincount(chosen, minlength=num_speakers)
    return counts


def _drawn(systems: Sequence[SpeakerBootstrap], wanted: int, seed: int) -> np.ndarray:
    """Figures of systems under the same draws, (systems, draws, figures).

    Draws without trials of both kinds are omitted; with too few speakers there are none.
    """
    plain, num_speakers = systems[0].figures(), systems[0].num_speakers
    assert plain is not None, "there are trials of both kinds"
    num_trials = len(systems) * systems[0].num_trials
    num_draws = min(wanted, max(MIN_DRAWS, MAX_WORK // num_trials)) if num_speakers >= MIN_SPEAKERS else 0
    rows = []
    with Bar("intervals", num_draws, "draw", is_shown=num_draws * num_trials > SHOWN_WORK) as bar:
        for counts in bar.over(draw_speakers(num_speakers, num_draws, seed)):
            found = [system.figures(counts) for system in systems]
            if all(one is not None for one in found):
                rows.append(found)
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(systems), len(plain)).transpose(1, 0, 2)


def speakers_note(num_speakers: int) -> str:
    """A note on an interval over so few speakers; empty if there are enough."""
    if num_speakers < MIN_SPEAKERS:
        return f"no interval: too few speakers ({num_speakers}, at least {MIN_SPEAKERS} are needed)"
    return f"rough interval: only {num_speakers} speakers" if num_speakers < ROUGH_SPEAKERS else ""


def same_in_all_draws_note(eer_percent: float, num_target_speakers: int) -> str:
    """Why draws that all give the same EER make no interval.

    Source: Hanley and Lippman-Hand, If nothing goes wrong, is everything all right?, 1983 (rule of three).

    >>> same_in_all_draws_note(0.0, 40)
    'no interval: no draw has an error; by the rule of three, up to 3 in the next 40 speakers may still have one'
    """
    if eer_percent > 0:
        return "no interval: every draw of speakers gives the same error rate"
    # A speaker without a target trial cannot be missed.
    if num_target_speakers < MIN_SPEAKERS:
        return f"no interval: too few speakers with targets ({num_target_speakers}, at least {MIN_SPEAKERS} are needed)"
    others = f"up to 3 in the next {num_target_speakers} speakers may still have one"
    return f"no interval: no draw has an error; by the rule of three, {others}"


def interval_of(values: np.ndarray) -> Interval:
    """The middle 95 % of the draws; None without draws."""
    if not len(values):
        return None
    tail = (100 - LEVEL_PERCENT) / 2
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)


@dataclass(frozen=True)
class Difference:
    """The difference of two systems in one figure: B minus A, so that positive means that A is better."""

    value: float
    interval: Interval
    """95 % interval of the difference under the same draws of speakers."""
    note: str = ""

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes zero."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]

    def sentence(self, figure: str, first: str = "A", second: str = "B") -> str:
        """The result in words."""
        better, other = (first, second) if self.value >= 0 else (second, first)
        if self.value == 0:
            text = f"{figure}: {first} and {second} are equal"
        else:
            text = f"{figure}: {better} is better than {other} by {abs(self.value):.3f}"
        if self.interval is None:
            return f"{text}; {self.note}"
        low, high = self.interval if self.value >= 0 else (-self.interval[1], -self.interval[0])
        verdict = "significant" if self.is_significant else "not significant"
        note = f" ({self.note})" if self.note else ""
        return f"{text}, interval {low:.3f} … {high:.3f}: {verdict}{note}"


def mean_differences(
    first: Sequence[SpeakerBootstrap], second: Sequence[SpeakerBootstrap], wanted: int, seed: int
) -> list[Difference]:
    """Paired comparison under the same draws: EER in percent first, then every minDCF.

    Figures are means over several trainings of each system, all scored on the same trials. The draws are of speakers:
    how far trainings of one system differ is not in the interval.
    """
    figures = np.array([one.figures() for one in (*first, *second)])
    whole = figures[len(first) :].mean(axis=0) - figures[: len(first)].mean(axis=0)
    drawn = _drawn([*first, *second], wanted, seed)
    moved = drawn[len(first) :].mean(axis=0) - drawn[: len(first)].mean(axis=0)
    note = speakers_note(first[0].num_speakers)
    return [Difference(float(value), interval_of(values), note) for value, values in zip(whole, moved.T, strict=True)]
