"""Fit calibrations and named thresholds on the scores of a labelled list, by prior-weighted
logistic regression.

Source: Brümmer and van Leeuwen, On calibration of language recognition scores, 2006.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from speakernet.data.lists import TrialList
from speakernet.evaluation.calibration import (
    EER_NAME,
    FALSE_ACCEPT_RATES,
    MIN_EXPECTED_ERRORS,
    MIN_NONTARGETS,
    SCORE_ONLY,
    AffineCalibration,
    columns_of,
    identity_of,
    threshold_name,
    threshold_way,
    too_few_nontargets,
)
from speakernet.evaluation.figures import why_no_error_rate
from speakernet.evaluation.metrics import (
    ErrorRates,
    check_trials,
    equal_error_point,
    error_rates,
    point_at_false_accept_rate,
)

if TYPE_CHECKING:
    # It needs torch, which `evaluate --scores` does without.
    from speakernet.evaluation.several import SeveralRecordings

logger = logging.getLogger(__name__)

REGULARIZATION = 1e-6
"""Keeps the weights finite if the scores separate the list perfectly."""


def fit_calibration(
    inputs: np.ndarray, labels: np.ndarray, prior: float, names: Sequence[str] = ("score",)
) -> AffineCalibration:
    """Fit by logistic regression in which all targets together have the weight `prior`, and
    non-targets `1 - prior`.

    Args:
        inputs: (trials,) scores or (trials, inputs).
        labels: (trials,) 1 for targets.
        prior: target prior of the application.
        names: one name per input.

    Raises:
        ValueError: NaN inputs, no targets or no non-targets.
    """
    # Logistic regression, because its cost is that of decisions: a ratio on the wrong side of the
    # threshold costs the more, the further off it is, and a score far on the right side costs
    # nothing, so easy trials, which are most of a list, do not bend the line. Weighting by the
    # prior moves the attention to the thresholds that the application uses. Nothing here checks
    # that a line fits: with two kinds of recordings in one list it does not, and Cllr minus min
    # Cllr shows by how much.
    columns = columns_of(inputs, names)
    for column in columns.T:
        _, is_target = check_trials(column, labels)
    centre = columns.mean(axis=0)
    spread = columns.std(axis=0)
    # A quality measure that is the same for all trials must not cause a division by zero.
    spread = np.where(spread > 0, spread, 1.0)
    # L-BFGS needs inputs of similar scale; a cosine spans about 1, a duration about 100.
    standard = (columns - centre) / spread
    # The share of targets in the list is replaced by the prior of the application.
    shares = np.where(is_target, prior / is_target.sum(), (1 - prior) / (~is_target).sum())
    signs = np.where(is_target, 1.0, -1.0)
    log_odds = np.log(prior / (1 - prior))

    def cost(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        margins = signs * (standard @ parameters[1:] + parameters[0] + log_odds)
        value = (
            shares @ np.logaddexp(0, -margins) + REGULARIZATION * parameters[1:] @ parameters[1:]
        )
        # 1 / (1 + exp(margins)) without overflow at either end.
        slope = -shares * signs * np.exp(-np.logaddexp(0, margins))
        gradient = np.concatenate(
            [[slope.sum()], slope @ standard + 2 * REGULARIZATION * parameters[1:]]
        )
        # Scaled by the prior: at 0.01 the cost is tiny, and L-BFGS stops at absolute tolerances.
        return float(value) / prior, gradient / prior

    start = np.zeros(columns.shape[1] + 1)
    # The first input is the score; higher means more alike.
    start[1] = 1.0
    options = {"maxiter": 500, "ftol": 1e-12, "gtol": 1e-8}
    # Late: most commands apply a calibration and fit none.
    from scipy.optimize import minimize

    offset, *standard_weights = minimize(
        cost, start, jac=True, method="L-BFGS-B", options=options
    ).x
    # Undo the standardisation.
    weights = np.array(standard_weights) / spread
    return AffineCalibration(weights, float(offset - weights @ centre), tuple(names), prior)


def named_thresholds(
    rates: ErrorRates, backend: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Thresholds at the EER and at the named false-accept rates that the list supports.

    Returns:
        The thresholds as plain dictionaries, and a sentence for each rate that the list is too
        small for.
    """
    # A threshold is measured on the scores, not read off the calibration, which is a straight line
    # and least certain in the tail where few false accepts are counted. The price is that a list
    # must be long: a rate of one in ten thousand takes a hundred thousand different-speaker pairs.
    points = [(EER_NAME, equal_error_point(rates))]
    refused = []
    for rate in FALSE_ACCEPT_RATES:
        # Even a count of ten has a standard deviation of about a third; from fewer, a threshold
        # would be a guess.
        if rates.num_nontargets * rate >= MIN_EXPECTED_ERRORS:
            points.append((threshold_name(rate), point_at_false_accept_rate(rates, rate)))
        else:
            refused.append(
                f"no threshold at a false-accept rate of {100 * rate:g} %: there are only "
                f"{rates.num_nontargets:,} different-speaker pairs, but at least "
                f"{round(MIN_EXPECTED_ERRORS / rate):,} are needed"
            )
    ascending = rates.thresholds
    thresholds = []
    for name, point in points:
        # Halfway to the next lower score, where all decisions on the list stay the same. The point
        # itself is a score; on a list without errors it is the lowest target score, so a slightly
        # worse recording would be rejected.
        row = int(np.searchsorted(ascending, point.threshold))
        limit = float((ascending[row - 1] + ascending[row]) / 2 if row else point.threshold)
        thresholds.append(
            {
                "name": name,
                "threshold": limit,
                "miss_rate": point.miss,
                "false_accept_rate": point.false_accept,
                "backend": dict(backend),
            }
        )
    return thresholds, refused


class LengthFigures(NamedTuple):
    """Figures for one length of the test side, for speakers left out of the fit; (2,) each: with
    the score alone, and with durations.
    """

    label: str
    num_targets: int
    num_nontargets: int
    cllr: np.ndarray
    actual_dcf: np.ndarray
    """At a target prior of 0.01."""
    false_accept_percent: np.ndarray
    """At the threshold for 1 %."""
    miss_percent: np.ndarray


@dataclass(frozen=True)
class Fit:
    """A calibration and thresholds fitted on one list."""

    calibration: AffineCalibration
    thresholds: list[dict[str, Any]]
    """Named thresholds, as a model file stores them."""
    refused: list[str]
    """A sentence for each threshold, or other part, that the list is too small for."""
    backend: dict[str, Any]
    """How recordings are embedded and scored, as plain values."""
    origin: dict[str, Any]
    """Name and checksum of the list, and its numbers of targets and non-targets."""
    several: "SeveralRecordings | None" = None
    """For decisions about several recordings of a person; None if it was not measured."""
    lengths: Sequence[LengthFigures] | None = None
    """What durations change for speakers left out of the fit; None if it was not measured."""

    def find_replaced(self, contents: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The calibration in a model file that this one would replace; None if there is none for
        the same scoring.
        """
        for kept in (contents.get("calibration") or {}).get("fits", []):
            if (kept["backend"], tuple(kept["inputs"])) == (self.backend, self.calibration.inputs):
                return kept
        return None

    def changes(self, contents: Mapping[str, Any]) -> dict[str, Any]:
        """The new entries of a model file, in which this fit replaces any fit for the same
        scoring.
        """
        fits = (contents.get("calibration") or {}).get("fits", [])
        thresholds = contents.get("thresholds") or []
        fit: dict[str, Any] = {**self.calibration.to_dict(), **self.origin}
        fit["backend"] = self.backend
        if self.several is not None:
            fit["several_recordings"] = asdict(self.several)
        limits = [{**limit, **self.origin} for limit in self.thresholds]
        return {
            "calibration": {"fits": [*filter(self._leaves, fits), fit]},
            "thresholds": [*filter(self._leaves, thresholds), *limits],
        }

    def _leaves(self, entry: Mapping[str, Any]) -> bool:
        """Whether an entry of a model file stays beside this fit.

        Each way of scoring has its own thresholds, so only a fit for the same scoring is replaced.
        A fit of the score alone also replaces those with quality measures, which were fitted on an
        earlier list.
        """
        inputs = entry.get("inputs", entry["backend"].get("inputs", list(SCORE_ONLY)))
        ours = list(self.calibration.inputs)
        way = {name: value for name, value in entry["backend"].items() if name != "inputs"}
        return way != self.backend or (ours != list(SCORE_ONLY) and list(inputs) != ours)


def fit_scores(
    trials: TrialList,
    scores: np.ndarray,
    prior: float,
    backend: Mapping[str, Any],
    columns: np.ndarray | None = None,
    names: tuple[str, ...] = SCORE_ONLY,
) -> Fit:
    """Fit calibration and thresholds to the scores of labelled trials.

    With quality measures (`columns`, `names`), thresholds are log-likelihood ratios and belong to
    their own scoring.
    """
    if reason := why_no_error_rate(trials):
        raise ValueError(f"cannot calibrate: {reason}")
    assert trials.labels is not None, "a list without labels has no error rate"
    calibration = fit_calibration(
        scores if columns is None else columns, trials.labels, prior, names
    )
    if calibration.weights[0] <= 0:
        logger.warning(
            "%s: the scores do not separate targets from non-targets (higher scores make the same "
            "speaker less likely), so decisions with this calibration are meaningless; check that "
            "1 marks the same speaker, calibrate on more people, or train longer",
            trials.source,
        )
    rates = error_rates(scores, trials.labels)
    way = backend
    if columns is not None:
        rates = error_rates(calibration.apply(columns), trials.labels)
        way = threshold_way(backend, names)
    thresholds, refused = named_thresholds(rates, way)
    if few := too_few_nontargets(rates.num_nontargets):
        logger.warning(
            "%s: %s; a threshold needs at least %d pairs", trials.source, few, MIN_NONTARGETS
        )
    origin = {
        **identity_of(trials),
        "num_targets": rates.num_targets,
        "num_nontargets": rates.num_nontargets,
    }
    return Fit(calibration, thresholds, refused, dict(backend), origin)
