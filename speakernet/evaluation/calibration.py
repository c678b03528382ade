"""From scores to log-likelihood ratios and named thresholds, from several score files to one; how a model keeps them.

One affine function `offset + weights . inputs` does it: a single score is calibration, several scores are fusion,
further inputs are quality measures. It is fitted by prior-weighted logistic regression on one list and applied to
others. Natural logarithms throughout.

A quality measure gives four inputs, the smaller and the larger of the two sides, their difference and their ratio.

Source: Brümmer and van Leeuwen, On calibration of language recognition scores, 2006; Thienpondt et al., The IDLab
VoxCeleb speaker recognition challenge 2020 system description (quality measures); wespeaker, score_calibration.py (the
four inputs of a measure).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize

from speakernet.data.lists import TrialList
from speakernet.evaluation.figures import why_no_error_rate
from speakernet.evaluation.metrics import (
    ErrorRates,
    check_trials,
    equal_error_point,
    error_rates,
    point_at_false_accept_rate,
)
from speakernet.evaluation.results import AffineFit

logger = logging.getLogger(__name__)

EER_NAME, RATE_PREFIX = "eer", "far_"
"""Names of thresholds: at the EER, and at a false-accept rate that follows in percent."""
FALSE_ACCEPT_RATES = (0.05, 0.01, 0.001, 0.0001)
MIN_EXPECTED_ERRORS = 10
"""A false-accept rate is only named if the list expects at least so many false accepts at it."""
FEWEST_NONTARGETS = round(MIN_EXPECTED_ERRORS / FALSE_ACCEPT_RATES[0])
REGULARIZATION = 1e-6
"""Keeps the weights finite if a list is separated perfectly."""
SCORE_ONLY = ("score",)
SMALLEST = 1e-9
FORMS = ("min", "max", "difference", "ratio")
LOGGED = ("duration", "magnitude")
"""Measures whose smaller and larger sides are logarithms: twice as long means as much at any length."""
FITTED_ON_REPORTED = "calibration was fitted on the list that is reported: its actual costs and Cllr are optimistic"


@dataclass(frozen=True)
class AffineCalibration:
    """`llr = offset + weights . inputs`."""

    weights: np.ndarray
    """(inputs,) float64."""
    offset: float
    inputs: tuple[str, ...]
    """Names: `score` (or several score names) and quality measures."""
    prior: float
    """Target prior that the fit was weighted for."""

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Log-likelihood ratios of (trials,) scores or (trials, inputs)."""
        return _columns(inputs, self.inputs) @ self.weights + self.offset

    def to_dict(self) -> AffineFit:
        """Plain values, as they go into a model file."""
        weights, offset, prior = self.weights.tolist(), float(self.offset), float(self.prior)
        return {"inputs": list(self.inputs), "weights": weights, "offset": offset, "prior": prior}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "AffineCalibration":
        """What `to_dict` returned."""
        weights = np.array(values["weights"], dtype=np.float64)
        return cls(weights, float(values["offset"]), tuple(values["inputs"]), float(values["prior"]))


def quality_inputs(measures: Sequence[str]) -> tuple[str, ...]:
    """The inputs of a calibration with quality measures: the score, and four of each.

    >>> quality_inputs(["snr"])
    ('score', 'snr min', 'snr max', 'snr difference', 'snr ratio')
    """
    return (*SCORE_ONLY, *(f"{measure} {form}" for measure in measures for form in FORMS))


def quality_columns(
    inputs: Sequence[str], scores: np.ndarray, values: Mapping[str, np.ndarray], enrol: np.ndarray, test: np.ndarray
) -> np.ndarray:
    """Values of a calibration's inputs, (trials, inputs) float64.

    Args:
        inputs: names, as `quality_inputs` gives them; a measure alone means its smaller side.
        scores: (trials,).
        values: measure -> its value for each utterance, (utterances,).
        enrol: (trials,) rows of utterances.
        test: (trials,) rows of utterances.

    >>> one_and_four = {"duration": np.array([1.0, 4.0])}, np.array([0]), np.array([1])
    >>> quality_columns(quality_inputs(["duration"]), np.array([0.5]), *one_and_four).round(2).tolist()
    [[0.5, 0.0, 1.39, 3.0, 0.25]]
    """
    columns = []
    for name in inputs:
        measure, _, form = name.partition(" ")
        if measure == "score":
            columns.append(np.asarray(scores, dtype=np.float64))
            continue
        low, high = np.sort([values[measure][enrol], values[measure][test]], axis=0).astype(np.float64)
        least = np.maximum([low, high], SMALLEST)
        small, large = np.log(least) if measure in LOGGED else (low, high)
        # Within -1 to 1: a cohort's mean score may be near zero, and below it.
        ratio = np.clip(low / least[1], -1, 1)
        columns.append({"max": large, "difference": high - low, "ratio": ratio}.get(form, small))
    return np.stack(columns, axis=1)


def fit_calibration(
    inputs: np.ndarray, labels: np.ndarray, prior: float, names: Sequence[str] = ("score",)
) -> AffineCalibration:
    """Fit by logistic regression in which targets weigh `prior` and non-targets `1 - prior`, whatever their numbers.

    Args:
        inputs: (trials,) scores or (trials, inputs).
        labels: (trials,) 1 for targets.
        prior: target prior of the application.
        names: of the inputs.

    Raises:
        ValueError: NaN inputs, no targets or no non-targets, or another number of names than inputs.
    """
    columns = _columns(inputs, names)
    for column in columns.T:
        _, is_target = check_trials(column, labels)
    centre, spread = columns.mean(axis=0), columns.std(axis=0)
    # A quality measure that is the same for all trials must not divide by zero.
    spread = np.where(spread > 0, spread, 1.0)
    # Inputs of like size: a cosine spans one, a duration a hundred, and L-BFGS steps alike in all directions.
    standard = (columns - centre) / spread
    # The list has its own share of targets; the application has `prior`.
    shares = np.where(is_target, prior / is_target.sum(), (1 - prior) / (~is_target).sum())
    signs = np.where(is_target, 1.0, -1.0)
    log_odds = np.log(prior / (1 - prior))

    def cost(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        margins = signs * (standard @ parameters[1:] + parameters[0] + log_odds)
        value = shares @ np.logaddexp(0, -margins) + REGULARIZATION * parameters[1:] @ parameters[1:]
        # 1 / (1 + exp(margins)) without overflow at either end.
        slope = -shares * signs * np.exp(-np.logaddexp(0, margins))
        gradient = np.concatenate([[slope.sum()], slope @ standard + 2 * REGULARIZATION * parameters[1:]])
        # The cost of a prior of 0.01 is tiny; L-BFGS stops by absolute size.
        return float(value) / prior, gradient / prior

    start = np.zeros(columns.shape[1] + 1)
    # The first input is the score, which is right side up.
    start[1] = 1.0
    options = {"maxiter": 500, "ftol": 1e-12, "gtol": 1e-8}
    found = minimize(cost, start, jac=True, method="L-BFGS-B", options=options).x
    # Back to the inputs as they come.
    weights = found[1:] / spread
    return AffineCalibration(weights, float(found[0] - weights @ centre), tuple(names), prior)


def too_few_nontargets(number: int) -> str:
    """A warning on a calibration on so few pairs; empty if they are enough for the mildest threshold."""
    few = f"{number} pairs of different speakers are few: a calibration fitted on so few is overconfident"
    return few if number < FEWEST_NONTARGETS else ""


def named_thresholds(rates: ErrorRates, backend: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Thresholds at the EER and at the named false-accept rates that the list supports.

    Returns:
        The thresholds as plain dictionaries, and a sentence for each rate that the list is too small for.
    """
    points, refused = [(EER_NAME, equal_error_point(rates))], []
    for rate in FALSE_ACCEPT_RATES:
        # A count of ten is off by a third by chance alone; with fewer a threshold would be a guess.
        expected = rates.num_nontargets * rate
        if expected >= MIN_EXPECTED_ERRORS:
            points.append((threshold_name(rate), point_at_false_accept_rate(rates, rate)))
            continue
        refused.append(
            f"no threshold at a false-accept rate of {100 * rate:g} %: the list's {int(rates.num_nontargets)} "
            f"non-targets expect {expected:g} such errors, at least {MIN_EXPECTED_ERRORS} are needed"
        )
    ascending, thresholds = rates.thresholds, []
    for name, point in points:
        # Half-way between two scores of the list, which it decides as the point does: that lies on a score, in a list
        # without errors on that of its worst target, and the next recording that is a little worse would be refused.
        row = int(np.searchsorted(ascending, point.threshold))
        limit = float((ascending[row - 1] + ascending[row]) / 2 if row else point.threshold)
        shares = {"miss_rate": float(point.miss), "false_accept_rate": float(point.false_accept)}
        thresholds.append({"name": name, "threshold": limit, **shares, "backend": dict(backend)})
    return thresholds, refused


def threshold_label(name: str) -> str:
    """A named threshold in words.

    >>> threshold_label("eer"), threshold_label("far_0.1%")
    ('equal error rate', 'false accepts 0.1 % at most')
    """
    if name == EER_NAME:
        return "equal error rate"
    return f"false accepts {name.removeprefix(RATE_PREFIX).removesuffix('%')} % at most"


def threshold_name(rate: float) -> str:
    """The name of the threshold at a false-accept rate.

    >>> threshold_name(0.001)
    'far_0.1%'
    """
    return f"{RATE_PREFIX}{100 * rate:g}%"


def false_accept_rate_of(name: str) -> float | None:
    """The rate that a threshold is named by; None if it is named by something else.

    >>> false_accept_rate_of("far_0.1%"), false_accept_rate_of("eer")
    (0.001, None)
    """
    try:
        percent = float(name.removeprefix(RATE_PREFIX).removesuffix("%"))
    except ValueError:
        return None
    return round(percent / 100, 12) if name.startswith(RATE_PREFIX) else None


def _columns(inputs: np.ndarray, names: Sequence[str]) -> np.ndarray:
    inputs = np.asarray(inputs, dtype=np.float64)
    columns = inputs[:, None] if inputs.ndim == 1 else inputs
    if columns.shape[1] != len(names):
        raise ValueError(f"{columns.shape[1]} inputs for {len(names)} names ({', '.join(names)})")
    return columns


@dataclass(frozen=True)
class Fit:
    """What was fitted on one list."""

    calibration: AffineCalibration
    thresholds: list[dict[str, Any]]
    """Named decisions, as a model file keeps them."""
    refused: list[str]
    """A sentence for each threshold that the list is too small for."""
    backend: dict[str, Any]
    """The way of embedding and scoring, plain values."""
    origin: dict[str, Any]
    """Name and checksum of the list, and its numbers of pairs of one and of two speakers."""

    def replaced(self, contents: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The calibration of the same way that a model file holds now."""
        fits = (contents.get("calibration") or {}).get("fits", [])
        way = self.backend, list(self.calibration.inputs)
        return next((one for one in fits if (one["backend"], list(one["inputs"])) == way), None)

    def changes(self, contents: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of a model file of these contents, with this fit in place of one of the same way."""
        inputs = list(self.calibration.inputs)
        own = {**self.calibration.to_dict(), **self.origin, "backend": self.backend}

        def stays(one: Mapping[str, Any]) -> bool:
            # Thresholds of one scoring mean nothing under another: each fit stays with its own. A fit of the score
            # alone also replaces those with quality measures, which come from another list.
            theirs = one.get("inputs", one["backend"].get("inputs", list(SCORE_ONLY)))
            way = {**one["backend"], "inputs": theirs}
            return way != {**self.backend, "inputs": theirs if inputs == list(SCORE_ONLY) else inputs}

        fits, thresholds = (contents.get("calibration") or {}).get("fits", []), contents.get("thresholds") or []
        return {
            "calibration": {"fits": [*filter(stays, fits), own]},
            "thresholds": [*filter(stays, thresholds), *({**one, **self.origin} for one in self.thresholds)],
        }


def fit_scores(
    trials: TrialList,
    scores: np.ndarray,
    prior: float,
    backend: Mapping[str, Any],
    columns: np.ndarray | None = None,
    names: tuple[str, ...] = SCORE_ONLY,
) -> Fit:
    """Calibration and thresholds from scores of labelled trials.

    With quality measures (`columns`, `names`) the thresholds are log-likelihood ratios, of a way of scoring of its own.
    """
    reason = why_no_error_rate(trials)
    if reason or trials.labels is None:
        raise ValueError(f"cannot calibrate: {reason or 'the trials have no labels'}")
    calibration = fit_calibration(scores if columns is None else columns, trials.labels, prior, names)
    if calibration.weights[0] <= 0:
        logger.warning(
            "%s: the scores do not separate targets from non-targets (a higher one makes one speaker less likely), so "
            "decisions of this calibration are meaningless; train longer, or calibrate on more people",
            trials.source,
        )
    rates, way = error_rates(scores, trials.labels), backend
    if columns is not None:
        rates, way = error_rates(calibration.apply(columns), trials.labels), threshold_way(backend, names)
    thresholds, refused = named_thresholds(rates, way)
    num_targets, num_nontargets = int(rates.num_targets), int(rates.num_nontargets)
    if few := too_few_nontargets(num_nontargets):
        logger.warning("%s: %s; %d pairs or more give a threshold", trials.source, few, FEWEST_NONTARGETS)
    origin = {**known_by(trials), "num_targets": num_targets, "num_nontargets": num_nontargets}
    return Fit(calibration, thresholds, refused, dict(backend), origin)


def threshold_way(backend: Mapping[str, Any], inputs: Sequence[str]) -> dict[str, Any]:
    """The way of scoring that thresholds on log-likelihood ratios with quality measures belong to."""
    return {**backend, "inputs": list(inputs)}


def known_by(trials: TrialList) -> dict[str, Any]:
    """Name and checksum by which a model file recognises a list."""
    return {"list": Path(trials.source).name, "list_sha256": trials.sha256}
