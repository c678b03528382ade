"""Calibration and thresholds fitted on labelled scores, and how a model file keeps them.

Each fit belongs to the way of embedding and scoring that it was made with, and takes the place of an earlier one of the
same way; those of other ways stay.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speakernet.data.lists import TrialList
from speakernet.data.sources import AudioSource
from speakernet.evaluation import metrics
from speakernet.evaluation.backend import plain_backend, verifying_backend
from speakernet.evaluation.calibration import (
    FALSE_ACCEPT_RATES,
    FEWEST_NONTARGETS,
    AffineCalibration,
    fit_calibration,
    named_thresholds,
    too_few_nontargets,
)
from speakernet.evaluation.embedder import Embedder
from speakernet.evaluation.evaluate import score_trials
from speakernet.evaluation.figures import why_no_error_rate

SCORE_ONLY = ("score",)
FITTED_ON_REPORTED = "calibration was fitted on the list that is reported: its actual costs and Cllr are optimistic"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fit:
    """What was fitted on one list.

    Attributes:
        calibration: scores to log-likelihood ratios.
        thresholds: named decisions, as a model file keeps them.
        refused: a sentence for each threshold that the list is too small for.
        backend: the way of embedding and scoring, plain values.
        origin: name and checksum of the list, and how many pairs of one and of two speakers it has.
    """

    calibration: AffineCalibration
    thresholds: list[dict[str, Any]]
    refused: list[str]
    backend: dict[str, Any]
    origin: dict[str, Any]

    def replaced(self, contents: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The calibration of the same way that a model file holds now."""
        fits = (contents.get("calibration") or {}).get("fits", [])
        return next((one for one in fits if self._is_of_this_way(one)), None)

    def _is_of_this_way(self, one: Mapping[str, Any]) -> bool:
        way = (plain_backend(self.backend), list(self.calibration.inputs))
        return (plain_backend(one["backend"]), list(one["inputs"])) == way

    def changes(self, contents: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of a model file with this fit in the place of that of the same way.

        Args:
            contents: of the model file as it is.
        """
        same = plain_backend(self.backend)
        fits = (contents.get("calibration") or {}).get("fits", [])
        # Thresholds of one scoring mean nothing under another: each fit stays with its own.
        others = [one for one in fits if not self._is_of_this_way(one)]
        kept = [one for one in contents.get("thresholds") or [] if plain_backend(one["backend"]) != same]
        belongs = {**self.origin, "backend": self.backend}
        return {
            "calibration": {"fits": [*others, {**self.calibration.to_dict(), **belongs}]},
            "thresholds": [*kept, *({**one, **self.origin} for one in self.thresholds)],
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

    Args:
        trials: the list.
        scores: (trials,).
        prior: target prior that the calibration is tuned for.
        backend: the way of embedding and scoring, plain values.
        columns: (trials, inputs) of the calibration; the scores alone where left out.
        names: of these inputs.

    Raises:
        ValueError: the list has no error rate (no labels, or of one kind), or NaN scores.
    """
    reason = why_no_error_rate(trials)
    if reason or trials.labels is None:
        raise ValueError(f"cannot calibrate: {reason or 'the trials have no labels'}")
    calibration = fit_calibration(scores if columns is None else columns, trials.labels, prior, names)
    if columns is None and calibration.weights[0] <= 0:
        logger.warning(
            "%s: its scores tell nobody apart (by this fit a higher one makes one speaker less likely): decisions of "
            "this calibration mean nothing; train longer, or calibrate on more people",
            trials.source,
        )
    rates = metrics.error_rates(scores, trials.labels)
    thresholds, refused = named_thresholds(rates, backend)
    if few := too_few_nontargets(int(rates.num_nontargets)):
        logger.warning(
            "%s: %s, and a rate of 0 %% means none of so many; from %d pairs on there is a threshold at %g %% false "
            "accepts",
            *(trials.source, few, FEWEST_NONTARGETS, 100 * FALSE_ACCEPT_RATES[0]),
        )
    numbers = {"num_targets": int(rates.num_targets), "num_nontargets": int(rates.num_nontargets)}
    return Fit(calibration, thresholds, refused, dict(backend), {**known_by(trials), **numbers})


def known_by(trials: TrialList) -> dict[str, Any]:
    """By what a model file knows a list again."""
    return {"list": Path(trials.source).name, "list_sha256": trials.sha256}


def fit_for_verifying(
    embedder: Embedder, contents: Mapping[str, Any], trials: TrialList, source: AudioSource, prior: float
) -> tuple[Fit, np.ndarray]:
    """Embed a list as recordings are verified, whole and in float32, and fit calibration and thresholds on it.

    Args:
        embedder: the network and how it is run.
        contents: of its model file.
        trials: labelled.
        source: where their audio lies.
        prior: target prior that the calibration is tuned for.

    Returns:
        What was fitted, and the scores (trials,).

    Raises:
        ValueError: no labels, or audio that is missing or broken.
    """
    whole = dataclasses.replace(
        embedder, options=embedder.options.in_mode("whole"), autocast=contextlib.nullcontext, precision="no"
    )
    if reason := why_no_error_rate(trials):
        # Before hours of embedding, not after.
        raise ValueError(f"cannot calibrate: {reason}")
    backend = verifying_backend(contents)
    scores = score_trials(whole, backend, trials, source).scores
    return fit_scores(trials, scores, prior, backend.describe(whole.options)), scores
