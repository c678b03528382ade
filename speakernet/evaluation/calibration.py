"""From scores to log-likelihood ratios, from several score files to one, and to thresholds with a name.

One affine function `offset + weights . inputs` does it: a single score is calibration, several scores are fusion,
further inputs are quality measures. It is fitted by prior-weighted logistic regression on one list and applied to
others. Natural logarithms throughout.

Source: Brümmer and van Leeuwen, On calibration of language recognition scores, 2006; Thienpondt et al., The IDLab
VoxCeleb speaker recognition challenge 2020 system description (quality measures).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize

from speakernet.evaluation.metrics import (
    ErrorRates,
    OperatingPoint,
    check_trials,
    equal_error_point,
    point_at_false_accept_rate,
)

EER_NAME, RATE_PREFIX = "eer", "far_"
"""Names of thresholds: at the EER, and at a false-accept rate that follows in percent."""
FALSE_ACCEPT_RATES = (0.05, 0.01, 0.001, 0.0001)
MIN_EXPECTED_ERRORS = 10
"""A false-accept rate is only named where the list expects at least so many false accepts at it."""
FEWEST_NONTARGETS = round(MIN_EXPECTED_ERRORS / FALSE_ACCEPT_RATES[0])
REGULARIZATION = 1e-6
"""Keeps the weights finite where a list is separated perfectly."""


@dataclass(frozen=True)
class AffineCalibration:
    """`llr = offset + weights . inputs`.

    Attributes:
        weights: (inputs,) float64.
        offset: the constant.
        inputs: names of the inputs: `score` (or several score names) and quality measures.
        prior: target prior that the fit was weighted for.
    """

    weights: np.ndarray
    offset: float
    inputs: tuple[str, ...]
    prior: float

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Log-likelihood ratios of (trials,) scores or (trials, inputs).

        Raises:
            ValueError: another number of inputs than it was fitted on.
        """
        columns = _columns(inputs)
        if columns.shape[1] != len(self.weights):
            raise ValueError(f"{columns.shape[1]} inputs for a calibration of {', '.join(self.inputs)}")
        return columns @ self.weights + self.offset

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they go into a model file."""
        return {
            "inputs": list(self.inputs),
            "weights": [float(weight) for weight in self.weights],
            "offset": float(self.offset),
            "prior": float(self.prior),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "AffineCalibration":
        """What `to_dict` gave."""
        weights = np.array(values["weights"], dtype=np.float64)
        return cls(weights, float(values["offset"]), tuple(values["inputs"]), float(values["prior"]))


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
        ValueError: NaN inputs, no targets or no non-targets, or one name for several inputs.
    """
    columns = _columns(inputs)
    if columns.shape[1] != len(names):
        raise ValueError(f"{columns.shape[1]} inputs with {len(names)} names ({', '.join(names)})")
    for column in columns.T:
        _, is_target = check_trials(column, labels)
    centre, spread = columns.mean(axis=0), columns.std(axis=0)
    # A quality measure that is the same for all trials says nothing and must not divide by zero.
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
        slope = -shares * signs * _sigmoid(-margins)
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
    """What is said of a calibration on so few pairs; empty where they are enough for the mildest threshold."""
    if number >= FEWEST_NONTARGETS:
        return ""
    return f"{number} pairs of different speakers are few: odds of a calibration on them are far too sure"


def named_thresholds(rates: ErrorRates, backend: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Thresholds at the EER and at the named false-accept rates that the list supports.

    Args:
        rates: of raw scores, on the list they are fitted on.
        backend: the scoring that the thresholds belong to, plain values.

    Returns:
        The thresholds as plain dictionaries, and a sentence for each rate that the list is too small for.
    """
    point = equal_error_point(rates)
    thresholds = [_threshold(EER_NAME, point, rates, backend)]
    refused = []
    for rate in FALSE_ACCEPT_RATES:
        # A count of ten is off by a third by chance alone; with fewer a threshold would be a guess.
        expected = rates.num_nontargets * rate
        if expected < MIN_EXPECTED_ERRORS:
            refused.append(
                f"no threshold at a false-accept rate of {100 * rate:g} %: the list's {int(rates.num_nontargets)} "
                f"non-targets expect {expected:g} such errors, at least {MIN_EXPECTED_ERRORS} are needed"
            )
            continue
        point = point_at_false_accept_rate(rates, rate)
        name = threshold_name(rate)
        thresholds.append(_threshold(name, point, rates, backend))
    return thresholds, refused


def threshold_label(name: str) -> str:
    """What a named threshold is for, in words.

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
    """The rate that a threshold is named by; None where it is named by something else.

    >>> false_accept_rate_of("far_0.1%"), false_accept_rate_of("eer")
    (0.001, None)
    """
    try:
        percent = float(name.removeprefix(RATE_PREFIX).removesuffix("%"))
    except ValueError:
        return None
    return round(percent / 100, 12) if name.startswith(RATE_PREFIX) else None


def smaller_side(values: np.ndarray, enrol: np.ndarray, test: np.ndarray) -> np.ndarray:
    """A quality measure of trials from one of utterances: the worse of the two sides."""
    return np.minimum(values[enrol], values[test])


def _threshold(name: str, point: OperatingPoint, rates: ErrorRates, backend: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "threshold": _in_the_gap(point.threshold, rates.thresholds),
        "miss_rate": float(point.miss),
        "false_accept_rate": float(point.false_accept),
        "backend": dict(backend),
    }


def _in_the_gap(threshold: float, ascending: np.ndarray) -> float:
    """A threshold that decides the list as the given one does, as far from its scores as it can be.

    An operating point lies on a score: of a list that is told apart without an error, on that of its worst target, and
    the next recording that is a little worse would be refused.

    >>> _in_the_gap(0.8, np.array([0.1, 0.2, 0.8, np.inf])), _in_the_gap(0.1, np.array([0.1, np.inf]))
    (0.5, 0.1)
    """
    row = int(np.searchsorted(ascending, threshold))
    return float((ascending[row - 1] + ascending[row]) / 2 if row else threshold)


def _columns(inputs: np.ndarray) -> np.ndarray:
    inputs = np.asarray(inputs, dtype=np.float64)
    return inputs[:, None] if inputs.ndim == 1 else inputs


def _sigmoid(values: np.ndarray) -> np.ndarray:
    # 1 / (1 + exp(-x)) without overflow at either end.
    return np.exp(-np.logaddexp(0, -values))
