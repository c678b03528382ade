"""Error rates and detection costs from scores and labels: pure functions of arrays that share a
single sort.

`ErrorRates` holds the numbers of missed targets and accepted non-targets at every distinct
threshold; each metric is a short function of it. The convex hull of these points (the ROC convex
hull) gives min Cllr and one definition of the EER. Files, lists and embeddings are not needed here.

A trial is accepted if `score >= threshold`; equal scores are accepted or rejected together.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from speakernet.evaluation.options import UNIT_COST
from speakernet.terminal import MAX_NAMED

Rates = TypeVar("Rates", float, np.ndarray)

MAX_DET_POINTS = 2000


@dataclass(frozen=True)
class OperatingPoint:
    """A threshold and its error rates, as shares between 0 and 1."""

    threshold: float
    miss: float
    false_accept: float


@dataclass(frozen=True)
class ErrorRates:
    """Errors at every distinct threshold, in ascending order and ending with +infinity (all
    rejected).
    """

    thresholds: np.ndarray
    misses: np.ndarray
    """Targets below each threshold, (points,)."""
    false_accepts: np.ndarray
    """Non-targets at or above each threshold, (points,)."""
    num_targets: int
    num_nontargets: int
    miss_rates: np.ndarray
    """Share of targets missed at each threshold."""
    false_accept_rates: np.ndarray
    """Share of non-targets accepted at each threshold."""

    @cached_property
    def hull(self) -> np.ndarray:
        """Rows of the points on the lower convex hull of (false accepts, misses), by ascending
        threshold.
        """
        # Only corners of the hull can be the best operating point for some prior and costs, and
        # each of its edges is a pool of scores that no monotonic calibration should tell apart. So
        # this one curve gives ROCCH-EER, min Cllr and the best calibration of a list.
        #
        # A point on or above the line between its two neighbours cannot be a corner. Each pass
        # drops all such points at once, about half of what is left, until none is found; a loop
        # over the points with a stack, as in textbooks, takes seconds for ten million trials.
        # Integers keep the comparison of slopes exact.
        false_accepts = self.false_accepts.astype(np.int64)
        misses = self.misses.astype(np.int64)
        rows = np.arange(len(misses))
        is_above = np.ones(1, dtype=bool)
        while is_above.any():
            step_x = -np.diff(false_accepts[rows])
            step_y = np.diff(misses[rows])
            is_above = np.zeros(len(rows), dtype=bool)
            # Along a lower hull, from many false accepts to none, slopes increase.
            is_above[1:-1] = step_y[:-1] * step_x[1:] >= step_y[1:] * step_x[:-1]
            rows = rows[~is_above]
        return rows


def missing_kind(labels: np.ndarray) -> str:
    """The kind of trial that is missing from labels (trials,), so that there is no error rate;
    empty if both kinds are present.
    """
    num_targets = int(np.count_nonzero(labels))
    if num_targets == 0:
        return "target"
    return "non-target" if num_targets == len(labels) else ""


def check_trials(scores: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scores as float64 and labels as bool, both (trials,); ValueError if they allow no error
    rate.
    """
    scores = np.asarray(scores, dtype=np.float64)
    labels = np.asarray(labels).astype(bool)
    if scores.shape != labels.shape or scores.ndim != 1:
        raise ValueError(
            f"scores of shape {scores.shape} with labels of shape {labels.shape}; expected one "
            "label per score"
        )
    refuse_rows(np.isnan(scores), "NaN")
    if missing := missing_kind(labels):
        raise ValueError(
            f"none of the {len(labels)} trials is a {missing} trial; error rates need both kinds"
        )
    return scores, labels


def refuse_rows(is_bad: np.ndarray, what: str) -> None:
    """Refuse bad scores; the message names the first ten rows, counted from 1."""
    if is_bad.any():
        rows = (np.flatnonzero(is_bad) + 1).tolist()
        named = ", ".join(map(str, rows[:MAX_NAMED]))
        if len(rows) > MAX_NAMED:
            named += " …"
        raise ValueError(
            f"{len(rows):,} of {len(is_bad):,} scores are {what} (trials {named}); expected finite "
            "numbers"
        )


def error_rates(scores: np.ndarray, labels: np.ndarray) -> ErrorRates:
    """Errors at every distinct threshold, from one sort.

    Args:
        scores: (trials,), higher means more alike.
        labels: (trials,), 1 or true for targets.

    Raises:
        ValueError: NaN scores, no targets or no non-targets.

    >>> rates = error_rates(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1]))
    >>> rates.misses.tolist(), rates.false_accepts.tolist()
    ([0, 0, 1, 1, 2], [2, 1, 1, 0, 0])
    """
    scores, labels = check_trials(scores, labels)
    # Sorting each kind and merging takes half the time of sorting row numbers, which reads memory
    # at random.
    targets = np.sort(scores[labels])
    nontargets = np.sort(scores[~labels])
    is_target = np.zeros(len(scores), dtype=bool)
    # The number of non-targets below each target gives its place in the merged order.
    is_target[np.arange(len(targets)) + np.searchsorted(nontargets, targets)] = True
    ascending = np.empty(len(scores))
    ascending[is_target] = targets
    ascending[~is_target] = nontargets
    starts = group_starts(ascending)
    thresholds = np.append(ascending[starts], np.inf)
    # The trials below each threshold: targets are missed, non-targets rightly rejected.
    num_below = np.append(starts, len(scores))
    misses = np.concatenate([[0], np.cumsum(is_target)])[num_below]
    false_accepts = len(nontargets) - (num_below - misses)
    return ErrorRates(
        thresholds,
        misses,
        false_accepts,
        num_targets=len(targets),
        num_nontargets=len(nontargets),
        miss_rates=misses / len(targets),
        false_accept_rates=false_accepts / len(nontargets),
    )


def group_starts(ascending: np.ndarray) -> np.ndarray:
    """The start of each run of equal values in a sorted array."""
    is_start = np.ones(len(ascending), dtype=bool)
    is_start[1:] = ascending[1:] != ascending[:-1]
    return np.flatnonzero(is_start)


def eer(scores: np.ndarray, labels: np.ndarray) -> float:
    """Equal error rate in percent, where the miss rate and the false-accept rate cross.

    Both rates are step functions of the threshold. They are interpolated linearly between the two
    neighbouring thresholds at which the sign of their difference changes.

    >>> eer(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1]))
    50.0
    """
    return 100 * equal_error_point(error_rates(scores, labels)).miss


def equal_error_point(rates: ErrorRates) -> OperatingPoint:
    """The crossing of the two rates, with the nearest threshold at or above it."""
    after, rate = crossing(rates.miss_rates, rates.false_accept_rates)
    threshold = rates.thresholds[after]
    # A model file cannot keep the infinite threshold above the highest score.
    if not np.isfinite(threshold):
        threshold = rates.thresholds[after - 1]
    return OperatingPoint(float(threshold), rate, rate)


def crossing(miss: np.ndarray, false_accept: np.ndarray) -> tuple[int, float]:
    """The row after the crossing of the rates over ascending thresholds, and the linearly
    interpolated rate there.
    """
    # The difference never decreases with the threshold: it starts at -1 (all accepted) and ends at
    # 1 (all rejected), so its sign changes between two rows.
    gaps = miss - false_accept
    after = int(np.searchsorted(gaps, 0.0))
    before = after - 1
    share = -gaps[before] / (gaps[after] - gaps[before])
    return after, float(miss[before] + share * (miss[after] - miss[before]))


def hull_eer_percent(rates: ErrorRates) -> float:
    """Equal error rate in percent on the convex hull of the ROC (ROCCH-EER), never above the `eer`
    of the raw curve.

    Source: Brümmer and de Villiers, The BOSARIS Toolkit user guide, 2011, section 3.

    >>> hull_eer_percent(error_rates(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1])))
    25.0
    """
    return 100 * crossing(rates.miss_rates[rates.hull], rates.false_accept_rates[rates.hull])[1]


def voxceleb_trainer_eer_percent(rates: ErrorRates) -> float:
    """The figure that voxceleb_trainer prints as EER, in percent: the larger rate where the two are
    closest.

    It considers only the corners of the ROC (its scikit-learn call drops points between two equal
    steps), from the highest threshold down, and takes the first of equally close points.

    >>> rates = error_rates(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1]))
    >>> voxceleb_trainer_eer_percent(rates)
    50.0
    """
    # Descending thresholds without the all-rejected point, as in that tool.
    accepted_targets = (rates.num_targets - rates.misses)[-2::-1]
    accepted_nontargets = rates.false_accepts[-2::-1]
    is_corner = np.ones(len(accepted_targets), dtype=bool)
    is_corner[1:-1] = (np.diff(accepted_targets, 2) != 0) | (np.diff(accepted_nontargets, 2) != 0)
    accepted_targets = accepted_targets[is_corner]
    accepted_nontargets = accepted_nontargets[is_corner]
    miss = 1 - np.concatenate([[0], accepted_targets]) / accepted_targets[-1]
    false_accept = np.concatenate([[0], accepted_nontargets]) / accepted_nontargets[-1]
    # argmin takes the first of equally close points, as in that tool.
    nearest = int(np.argmin(np.abs(miss - false_accept)))
    return 100 * float(max(miss[nearest], false_accept[nearest]))


def min_dcf_point(
    rates: ErrorRates, target_prior: float, c_miss: float = UNIT_COST, c_fa: float = UNIT_COST
) -> tuple[float, OperatingPoint]:
    """Minimum detection cost over all thresholds relative to the better blind decision, and the
    point that reaches it.

    Source: NIST 2016 speaker recognition evaluation plan, equations 2 to 4.

    >>> min_dcf_point(error_rates(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1])), 0.5)[0]
    0.5
    """
    # The minimum is taken on the list that is reported, so it is what the system could do if
    # the best threshold were known; `act_dcf` is what it does with the threshold of its
    # calibration.
    costs = detection_cost(rates.miss_rates, rates.false_accept_rates, target_prior, c_miss, c_fa)
    best = int(np.argmin(costs))
    # The better blind decision: accept all (first threshold) or none (last).
    cost = float(costs[best] / min(costs[0], costs[-1]))
    miss = float(rates.miss_rates[best])
    false_accept = float(rates.false_accept_rates[best])
    return cost, OperatingPoint(float(rates.thresholds[best]), miss, false_accept)


def detection_cost(
    miss: Rates,
    false_accept: Rates,
    target_prior: float,
    c_miss: float = UNIT_COST,
    c_fa: float = UNIT_COST,
) -> Rates:
    """Expected cost of decisions with these error rates."""
    return c_miss * target_prior * miss + c_fa * (1 - target_prior) * false_accept


def point_at_threshold(rates: ErrorRates, threshold: float) -> OperatingPoint:
    """The error rates at a given threshold on these scores."""
    # The last threshold is infinite, so there is always one at or above it.
    row = int(np.searchsorted(rates.thresholds, threshold))
    return OperatingPoint(
        threshold, float(rates.miss_rates[row]), float(rates.false_accept_rates[row])
    )


def point_at_false_accept_rate(rates: ErrorRates, rate: float) -> OperatingPoint:
    """The lowest threshold whose false-accept rate does not exceed `rate`."""
    # False accepts decrease with the threshold, so the negated array is sorted.
    row = int(np.searchsorted(-rates.false_accept_rates, -rate))
    return point_at_threshold(rates, float(rates.thresholds[row]))


def act_dcf(
    rates: ErrorRates, target_prior: float, c_miss: float = UNIT_COST, c_fa: float = UNIT_COST
) -> float:
    """Normalised detection cost at the Bayes threshold for log-likelihood ratios (natural log).

    >>> act_dcf(error_rates(np.array([-2.0, 1.0, -1.0, 3.0]), np.array([0, 0, 1, 1])), 0.5)
    1.0
    """
    point = point_at_threshold(rates, bayes_threshold(target_prior, c_miss, c_fa))
    cost = detection_cost(point.miss, point.false_accept, target_prior, c_miss, c_fa)
    # Relative to the better decision without scores, so that 1 means that the scores are of no use.
    return cost / min(c_miss * target_prior, c_fa * (1 - target_prior))


def bayes_threshold(
    target_prior: float, c_miss: float = UNIT_COST, c_fa: float = UNIT_COST
) -> float:
    """The log-likelihood ratio above which accepting costs less than rejecting."""
    return float(np.log(c_fa * (1 - target_prior)) - np.log(c_miss * target_prior))


def cllr(llrs: np.ndarray, labels: np.ndarray) -> float:
    """Cost of log-likelihood ratios in bits: 0 is perfect, 1 is no information.

    Source: Brümmer and du Preez, Application-independent evaluation of speaker detection, 2006,
    equation 17.

    >>> cllr(np.zeros(4), np.array([0, 0, 1, 1]))
    1.0
    """
    llrs, labels = check_trials(llrs, labels)
    # Not log(1 + exp(x)), which overflows for large ratios.
    costs = np.logaddexp(0, np.where(labels, -llrs, llrs))
    return float((costs[labels].mean() + costs[~labels].mean()) / (2 * np.log(2)))


def min_cllr(rates: ErrorRates) -> float:
    """Cllr after the best monotonic calibration of these scores (pool adjacent violators), in bits.

    >>> min_cllr(error_rates(np.array([0.1, 0.2, 0.7, 0.8]), np.array([0, 0, 1, 1])))
    0.0
    """
    # Each edge of the convex hull is a pool of scores that the best calibration gives one ratio.
    targets = np.diff(rates.misses[rates.hull]) / rates.num_targets
    nontargets = -np.diff(rates.false_accepts[rates.hull]) / rates.num_nontargets
    with np.errstate(divide="ignore"):
        llrs = np.log(targets) - np.log(nontargets)
    # A pool of a single kind has an infinite ratio and costs nothing; 0 x infinity would give NaN.
    is_mixed = np.isfinite(llrs)
    target_cost = targets[is_mixed] @ np.logaddexp(0, -llrs[is_mixed])
    nontarget_cost = nontargets[is_mixed] @ np.logaddexp(0, llrs[is_mixed])
    return float((target_cost + nontarget_cost) / (2 * np.log(2)))


def area_under_roc(rates: ErrorRates) -> float:
    """Probability that a random target scores above a random non-target; ties count half.

    >>> area_under_roc(error_rates(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1])))
    0.75
    """
    # By trapezoids.
    hit = 1 - rates.miss_rates
    return float(-np.diff(rates.false_accept_rates) @ (hit[:-1] + hit[1:]) / 2)


def det_points(rates: ErrorRates) -> tuple[np.ndarray, np.ndarray]:
    """False-accept and miss rates of a DET curve, thinned evenly along the curve on normal-deviate
    axes.

    Returns:
        Two arrays (points,) with the points where both rates lie strictly between 0 and 1.
    """
    false_accept = rates.false_accept_rates
    miss = rates.miss_rates
    inside = (false_accept > 0) & (false_accept < 1) & (miss > 0) & (miss < 1)
    false_accept = false_accept[inside]
    miss = miss[inside]
    # More points would not be visible, but would make the drawing as large as the list.
    if len(miss) <= MAX_DET_POINTS:
        return false_accept, miss
    # For spacing, the logit is close enough to the normal deviate.
    position = np.log(miss / (1 - miss)) - np.log(false_accept / (1 - false_accept))
    kept = np.unique(
        np.searchsorted(position, np.linspace(position[0], position[-1], MAX_DET_POINTS))
    )
    kept = np.minimum(kept, len(miss) - 1)
    return false_accept[kept], miss[kept]
