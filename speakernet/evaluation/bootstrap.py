"""Confidence intervals and paired comparisons by drawing speakers with replacement.

Trials of one speaker rise and fall together, so drawing trials would promise too much. Each draw takes as many
speakers as there are; a target trial counts as often as its speaker was drawn, a trial between two speakers the product
of their draws. Scores are sorted once; a draw costs a few passes over the trials.

Source: Poh and Bengio, Estimating the confidence interval of expected performance curve in biometric authentication
using joint bootstrap, 2007 (drawing users); percentile intervals.
"""

from dataclasses import dataclass

import numpy as np

from speakernet.evaluation.metrics import check_trials, default_cost, group_starts
from speakernet.seeding import numpy_generator

MIN_SPEAKERS = 5
"""Below this, an interval over speakers would be a guess."""
ROUGH_SPEAKERS = 20
"""Below this, the interval is called rough."""
MAX_WORK = 2_000_000_000
"""Trials x draws; above it fewer draws are made (and the number is reported)."""
MIN_DRAWS = 100
STREAM = 6101
LEVEL_PERCENT = 95.0


@dataclass(frozen=True)
class Interval:
    """A percentile interval; `low` and `high` are None where there are too few speakers, and `note` says so."""

    low: float | None
    high: float | None
    num_draws: int
    note: str = ""

    def as_list(self) -> list[float | None]:
        """[low, high]."""
        return [self.low, self.high]


@dataclass(frozen=True)
class Draws:
    """What each draw of speakers gave.

    Attributes:
        eer_percent: (draws,).
        min_dcf: (draws, operating points).
        note: why there are none or why they are rough; empty when all is well.
    """

    eer_percent: np.ndarray
    min_dcf: np.ndarray
    note: str


class SpeakerBootstrap:
    """One score file prepared for drawing: sorted once, each draw evaluated by `figures`.

    Args:
        scores: (trials,).
        labels: (trials,), 1 for targets.
        enrol_speakers: (trials,) number of the enrolment speaker.
        test_speakers: (trials,).
        operating_points: (target prior, c_miss, c_fa) of each minDCF.
    """

    def __init__(
        self,
        scores: np.ndarray,
        labels: np.ndarray,
        enrol_speakers: np.ndarray,
        test_speakers: np.ndarray,
        operating_points: list[tuple[float, float, float]],
    ) -> None:
        scores, labels = check_trials(scores, labels)
        order = np.argsort(scores, kind="stable")
        self._group_starts = group_starts(scores[order])
        self._labels = labels[order]
        self._first = enrol_speakers[order].astype(np.int64)
        # A target trial counts its speaker once: its second side points at a speaker that is drawn exactly once.
        num_speakers = int(max(enrol_speakers.max(), test_speakers.max())) + 1
        is_within = labels | (enrol_speakers == test_speakers)
        self._second = np.where(is_within, num_speakers, test_speakers)[order].astype(np.int64)
        self._num_speakers = num_speakers
        self._points = operating_points

    @property
    def num_speakers(self) -> int:
        """Speakers, by the highest number."""
        return self._num_speakers

    def figures(self, counts: np.ndarray) -> tuple[float, list[float]] | None:
        """EER in percent and minDCFs when speaker s is drawn `counts[s]` times; None without targets or non-targets."""
        counts = np.append(counts, 1)
        weights = counts[self._first] * counts[self._second]
        all_below = np.cumsum(weights)
        targets_below = np.cumsum(weights * self._labels)
        num_targets, num_all = int(targets_below[-1]), int(all_below[-1])
        if num_targets in (0, num_all):
            return None
        ends = np.append(self._group_starts[1:], len(weights)) - 1
        miss = np.concatenate([[0.0], targets_below[ends] / num_targets])
        rejected = np.concatenate([[0.0], (all_below - targets_below)[ends] / (num_all - num_targets)])
        false_accept = 1 - rejected
        after = int(np.searchsorted(miss - false_accept, 0.0))
        gap_after = miss[after] - false_accept[after]
        gap_before = miss[after - 1] - false_accept[after - 1]
        share = -gap_before / (gap_after - gap_before)
        eer = miss[after - 1] + share * (miss[after] - miss[after - 1])
        costs = [
            float((c_miss * prior * miss + c_fa * (1 - prior) * false_accept).min()) / default_cost(prior, c_miss, c_fa)
            for prior, c_miss, c_fa in self._points
        ]
        return 100 * float(eer), costs


def draw_speakers(num_speakers: int, num_draws: int, seed: int) -> np.ndarray:
    """How often each speaker is drawn, int64 (draws, speakers); draw i does not depend on the number of draws."""
    counts = np.empty((num_draws, num_speakers), dtype=np.int64)
    for draw in range(num_draws):
        chosen = numpy_generator(seed, STREAM, draw).integers(0, num_speakers, num_speakers)
        counts[draw] = np.bincount(chosen, minlength=num_speakers)
    return counts


def num_draws_for(num_trials: int, wanted: int) -> int:
    """The number of draws that is affordable on so many trials."""
    return min(wanted, max(MIN_DRAWS, MAX_WORK // max(num_trials, 1)))


def bootstrap(prepared: SpeakerBootstrap, num_trials: int, num_speakers: int, wanted: int, seed: int) -> Draws:
    """Draw speakers and evaluate each draw; no draws, and a note, where there are too few speakers."""
    note = speakers_note(num_speakers)
    empty = Draws(np.empty(0), np.empty((0, 0)), note)
    if num_speakers < MIN_SPEAKERS or wanted == 0:
        return empty
    counts = draw_speakers(num_speakers, num_draws_for(num_trials, wanted), seed)
    results = [figures for one in counts if (figures := prepared.figures(one)) is not None]
    if not results:
        return empty
    return Draws(np.array([one[0] for one in results]), np.array([one[1] for one in results]), note)


def speakers_note(num_speakers: int) -> str:
    """What has to be said about an interval over so few speakers; empty when there are enough."""
    if num_speakers < MIN_SPEAKERS:
        return f"no interval: {num_speakers} speakers are too few (at least {MIN_SPEAKERS})"
    if num_speakers < ROUGH_SPEAKERS:
        return f"rough interval: only {num_speakers} speakers"
    return ""


def interval_of(values: np.ndarray, note: str = "") -> Interval:
    """The middle 95 % of the draws."""
    if not len(values):
        return Interval(None, None, 0, note)
    tail = (100 - LEVEL_PERCENT) / 2
    low, high = np.percentile(values, [tail, 100 - tail])
    return Interval(float(low), float(high), len(values), note)


@dataclass(frozen=True)
class Comparison:
    """Two systems on one list. Differences are B minus A: positive means that A is better.

    Attributes:
        difference: of the figures on the list itself.
        interval: 95 % interval of the difference under the same draws of speakers.
        is_significant: whether the interval leaves out zero.
    """

    difference: float
    interval: Interval
    is_significant: bool

    def sentence(self, figure: str, first: str = "A", second: str = "B") -> str:
        """The result in words."""
        better, other = (first, second) if self.difference >= 0 else (second, first)
        if self.difference == 0:
            text = f"{figure}: {first} and {second} are equal"
        else:
            text = f"{figure}: {better} is better than {other} by {abs(self.difference):.3f}"
        low, high = self.interval.low, self.interval.high
        if low is None or high is None:
            return f"{text}; {self.interval.note}"
        if self.difference < 0:
            low, high = -high, -low
        verdict = "significant" if self.is_significant else "not significant"
        note = f" ({self.interval.note})" if self.interval.note else ""
        return f"{text}, interval {low:.3f} … {high:.3f}: {verdict}{note}"


def compare_systems(
    first: SpeakerBootstrap, second: SpeakerBootstrap, num_trials: int, num_speakers: int, wanted: int, seed: int
) -> list[Comparison]:
    """Paired comparison under the same draws: EER in percent first, then every minDCF."""
    ones = np.ones(num_speakers, dtype=np.int64)
    base_first, base_second = first.figures(ones), second.figures(ones)
    assert base_first is not None and base_second is not None
    whole = np.array([base_second[0], *base_second[1]]) - np.array([base_first[0], *base_first[1]])
    note = speakers_note(num_speakers)
    rows: list[np.ndarray] = []
    if num_speakers >= MIN_SPEAKERS:
        for counts in draw_speakers(num_speakers, num_draws_for(2 * num_trials, wanted), seed):
            figures_first, figures_second = first.figures(counts), second.figures(counts)
            if figures_first is not None and figures_second is not None:
                a, b = [figures_first[0], *figures_first[1]], [figures_second[0], *figures_second[1]]
                rows.append(np.array(b) - np.array(a))
    draws = np.array(rows).reshape(len(rows), len(whole))
    comparisons = []
    for column, difference in enumerate(whole):
        interval = interval_of(draws[:, column], note)
        is_significant = interval.low is not None and interval.high is not None
        is_significant = is_significant and not (interval.low <= 0 <= interval.high)  # type: ignore[operator]
        comparisons.append(Comparison(float(difference), interval, is_significant))
    return comparisons
