"""Calibration and fusion of scores into log-likelihood ratios, and how a model file stores and
names them.

Calibration and fusion are one affine function, `offset + weights . inputs`: calibration takes one
score, fusion takes several, and quality measures are further inputs. `fitting.py` fits it on one
list; it is applied to others here, with little to import. Logarithms are natural throughout.

A quality measure gives four inputs: the smaller and the larger value of the two sides, their
difference and ratio.

Source: Brümmer and van Leeuwen, On calibration of language recognition scores, 2006; Thienpondt et
al., The IDLab VoxCeleb speaker recognition challenge 2020 system description (quality measures);
wespeaker, score_calibration.py (the four inputs of a measure).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speakernet.data.lists import TrialList
from speakernet.evaluation.results import AffineFit

EER_NAME = "eer"
RATE_PREFIX = "far_"
"""Name of the threshold at the EER, and the prefix of names such as `far_1%`, with the false-accept
rate in percent."""
FALSE_ACCEPT_RATES = (0.05, 0.01, 0.001, 0.0001)
MIN_EXPECTED_ERRORS = 10
"""A false-accept rate gets a threshold only if at least this many false accepts are expected on the
list."""
MIN_NONTARGETS = round(MIN_EXPECTED_ERRORS / FALSE_ACCEPT_RATES[0])
SCORE_ONLY = ("score",)
SMALLEST = 1e-9
ANY_SECONDS = (0.0, float("inf"))
FORMS = ("min", "max", "difference", "ratio")
DURATION = "duration"
LOGGED = (DURATION, "magnitude")
"""Measures whose smaller and larger values are used as logarithms, so that doubling always has the
same effect."""
TIMES_SCORE = "score * "
"""Beginning of the name of an input that is the product of the score and another input."""
BY_DURATION = (
    *SCORE_ONLY,
    *(f"{DURATION} {side}" for side in FORMS[:2]),
    *(f"{TIMES_SCORE}{DURATION} {side}" for side in FORMS[:2]),
)
"""Inputs with which seconds of speech change the slope too: short recordings say less."""
BY_QUALITY = "by log-likelihood ratio, with quality measures"
"""Beginning of the note of an evaluation whose calibration has inputs other than the score."""
FITTED_ON_REPORTED = (
    "the calibration was fitted on the reported list, so its actual costs and Cllr are optimistic"
)


@dataclass(frozen=True)
class AffineCalibration:
    """`llr = offset + weights . inputs`."""

    weights: np.ndarray
    """(inputs,) float64."""
    offset: float
    inputs: tuple[str, ...]
    """`score` (or several score names), then quality measures."""
    prior: float
    """Target prior for which the fit was weighted."""
    seconds: tuple[float, float] = ANY_SECONDS
    """Durations that the fit holds for; others count as the nearest of them."""

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Log-likelihood ratios for scores (trials,) or inputs (trials, inputs)."""
        # In float64, although scores are float32, because thresholds are fitted in float64.
        return columns_of(inputs, self.inputs) @ self.weights + self.offset

    def to_dict(self) -> AffineFit:
        """Plain values, as a model file stores them."""
        fit: AffineFit = {
            "inputs": list(self.inputs),
            "weights": self.weights.tolist(),
            "offset": float(self.offset),
            "prior": float(self.prior),
        }
        # Left out if there is no limit, so that such files look like those of earlier versions.
        if self.seconds != ANY_SECONDS:
            fit["seconds"] = list(self.seconds)
        return fit

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "AffineCalibration":
        """Read what `to_dict` returned."""
        weights = np.array(values["weights"], dtype=np.float64)
        # Earlier versions wrote no range; their durations are not clipped.
        low, high = values.get("seconds", ANY_SECONDS)
        inputs = tuple(values["inputs"])
        return cls(weights, float(values["offset"]), inputs, float(values["prior"]), (low, high))


def quality_inputs(measures: Sequence[str]) -> tuple[str, ...]:
    """The inputs of a calibration with quality measures: the score, and four inputs for each
    measure.

    >>> quality_inputs(["snr"])
    ('score', 'snr min', 'snr max', 'snr difference', 'snr ratio')
    """
    return (*SCORE_ONLY, *(f"{measure} {form}" for measure in measures for form in FORMS))


def quality_columns(
    inputs: Sequence[str],
    scores: np.ndarray,
    values: Mapping[str, np.ndarray],
    enrol: np.ndarray,
    test: np.ndarray,
    seconds: tuple[float, float] = ANY_SECONDS,
) -> np.ndarray:
    """The values of a calibration's inputs, (trials, inputs) float64.

    Args:
        inputs: names from `quality_inputs`; a measure without a form means its smaller value.
        scores: (trials,).
        values: measure -> its value for each utterance, (utterances,).
        enrol: (trials,) rows of utterances.
        test: (trials,) rows of utterances.
        seconds: durations below and above count as these.

    >>> one_and_four = {"duration": np.array([1.0, 4.0])}, np.array([0]), np.array([1])
    >>> inputs = quality_inputs(["duration"])
    >>> quality_columns(inputs, np.array([0.5]), *one_and_four).round(2).tolist()
    [[0.5, 0.0, 1.39, 3.0, 0.25]]
    """
    # Symmetric in the two sides, since swapping them must not change a decision. The smaller value
    # usually matters most: a trial is as hard as its worse recording.
    columns = []
    scores = np.asarray(scores, dtype=np.float64)
    if DURATION in values:
        values = {**values, DURATION: np.clip(values[DURATION], *seconds)}
    for name in inputs:
        factor = scores if name.startswith(TIMES_SCORE) else 1.0
        measure, _, form = name.removeprefix(TIMES_SCORE).partition(" ")
        if measure == "score":
            columns.append(scores)
            continue
        low, high = np.sort([values[measure][enrol], values[measure][test]], axis=0).astype(
            np.float64
        )
        # A duration or magnitude of 0 has no finite logarithm.
        least = np.maximum([low, high], SMALLEST)
        small, large = np.log(least) if measure in LOGGED else (low, high)
        # Clipped to -1..1: the mean score against a cohort may be near zero or negative.
        ratio = np.clip(low / least[1], -1, 1)
        forms = {"max": large, "difference": high - low, "ratio": ratio}
        columns.append(factor * forms.get(form, small))
    return np.stack(columns, axis=1)


def too_few_nontargets(number: int) -> str:
    """A warning if there are too few pairs for even the most lenient threshold; otherwise empty."""
    if number >= MIN_NONTARGETS:
        return ""
    return (
        f"only {number} different-speaker pairs, and a calibration fitted on so few is "
        "overconfident"
    )


def threshold_label(name: str) -> str:
    """A named threshold in words.

    >>> threshold_label("eer"), threshold_label("far_0.1%")
    ('equal error rate', 'at most 0.1 % false accepts')
    """
    if name == EER_NAME:
        return "equal error rate"
    return f"at most {name.removeprefix(RATE_PREFIX).removesuffix('%')} % false accepts"


def threshold_name(rate: float) -> str:
    """The name of the threshold at a false-accept rate.

    >>> threshold_name(0.001)
    'far_0.1%'
    """
    # Model files and command lines contain these names, so they must not change.
    return f"{RATE_PREFIX}{100 * rate:g}%"


def false_accept_rate_of(name: str) -> float | None:
    """The rate in the name of a threshold; None if it is not named by a rate.

    >>> false_accept_rate_of("far_0.1%"), false_accept_rate_of("eer")
    (0.001, None)
    """
    try:
        percent = float(name.removeprefix(RATE_PREFIX).removesuffix("%"))
    except ValueError:
        return None
    # Rounded, because dividing the percentage does not always give back the same number.
    return round(percent / 100, 12) if name.startswith(RATE_PREFIX) else None


def columns_of(inputs: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Inputs as columns, (trials, inputs) float64, one per name."""
    inputs = np.asarray(inputs, dtype=np.float64)
    columns = inputs[:, None] if inputs.ndim == 1 else inputs
    assert columns.shape[1] == len(names), "each input has a name"
    return columns


def threshold_way(backend: Mapping[str, Any], inputs: Sequence[str]) -> dict[str, Any]:
    """The scoring that thresholds on log-likelihood ratios with quality measures belong to."""
    return {**backend, "inputs": list(inputs)}


def identity_of(trials: TrialList) -> dict[str, Any]:
    """The name and checksum by which a model file identifies a list."""
    return {"list": Path(trials.source).name, "list_sha256": trials.sha256}
