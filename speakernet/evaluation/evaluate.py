"""Evaluate a network on a trial list: embed, score, normalise, apply a calibration and compute the
figures.

`evaluate` does all of it for one list, in training and after it; `further.py` adds to its result.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from speakernet.data.levels import signal_to_noise_ratios
from speakernet.data.lists import TrialList
from speakernet.data.sources import AudioSource
from speakernet.evaluation.calibration import (
    ANY_SECONDS,
    BY_QUALITY,
    SCORE_ONLY,
    AffineCalibration,
    quality_columns,
)
from speakernet.evaluation.embedding import MAX_READERS, Embedder, as_heard, modes_of
from speakernet.evaluation.figures import figures, why_no_error_rate
from speakernet.evaluation.files import Evaluation
from speakernet.evaluation.options import Mode
from speakernet.evaluation.results import EMBEDDING, KEPT_EMBEDDINGS, headline_sentence
from speakernet.evaluation.scoring import Backend, mean_embeddings
from speakernet.evaluation.speakers import Speakers
from speakernet.random import numpy_generator

logger = logging.getLogger(__name__)

SUBSET_STREAM = 6201
PRECISIONS = {"no": "float32", "bf16": "bf16", "fp16": "fp16"}
"""An embedder's precision -> its name in results.json."""


class Scored(NamedTuple):
    """Scores of a list and the arrays that they were computed from."""

    scores: np.ndarray
    """(trials,) float32."""
    embeddings: dict[Mode, np.ndarray]
    """Mode -> (recordings, crops, dim)."""
    units: np.ndarray
    """(utterances, dim), unit length, of the first mode."""
    cohort_mean: np.ndarray | None
    """(utterances,) mean score against the cohort."""
    seconds: dict[str, float]
    """Time spent embedding and scoring."""


def evaluate(
    embedder: Embedder,
    backend: Backend,
    trials: TrialList,
    source: AudioSource,
    speakers: Speakers,
    seed: int,
    calibration: AffineCalibration | None = None,
) -> Evaluation:
    """Embed, score and measure one list."""
    options = backend.options
    begin = time.perf_counter()
    scored = score_trials(embedder, backend, trials, source)
    llrs = None
    notes = []
    if calibration is not None and calibration.inputs == SCORE_ONLY:
        llrs = calibration.apply(scored.scores)
    elif calibration is not None:
        # Measures must describe what was embedded: if only speech was, silence does not count as
        # duration.
        heard = as_heard(source, embedder.options)
        inputs = calibration_inputs(calibration.inputs, scored, trials, heard, calibration.seconds)
        llrs = calibration.apply(inputs)
        if not why_no_error_rate(trials):
            # With quality measures, ratios rank the trials differently than scores.
            # They are only a note, so no time is spent on intervals.
            plain = options.model_copy(update={"bootstrap_samples": 0})
            by_ratio = figures(trials, llrs, speakers, plain, seed)
            notes = [f"{BY_QUALITY}: {headline_sentence(by_ratio)}"]
    start = time.perf_counter()
    results = figures(trials, scored.scores, speakers, options, seed, llrs)
    seconds = {**scored.seconds, "figures": time.perf_counter() - start}
    # With a checksum, since many lists are called `trials.txt`.
    listed = [{"role": "trials", "name": Path(trials.source).name, "sha256": trials.sha256}]
    if models := trials.models:
        name = Path(models.source).name
        listed.append({"role": "enrolment", "name": name, "sha256": models.sha256})
    results = replace(
        results,
        precision=PRECISIONS[embedder.precision],
        backend=backend.describe(embedder.options),
        lists=listed,
        timings_seconds={name: round(value, 3) for name, value in seconds.items()},
        seconds=time.perf_counter() - begin,
        warnings=notes,
    )
    # For the report's hardest trials, which often have a short recording.
    durations = trials.mean(source.lookup_table(trials.recordings).seconds)
    return Evaluation(trials, scored.scores, results, llrs, scored.units, speakers, durations)


def score_trials(
    embedder: Embedder, backend: Backend, trials: TrialList, source: AudioSource
) -> Scored:
    """Score every trial with a back end; `both` averages the scores of crops and of whole
    utterances.
    """
    embeddings: dict[Mode, np.ndarray] = {}
    seconds: dict[str, float] = {}
    stem = Path(trials.source).stem
    for mode in modes_of(embedder.options):
        start = time.perf_counter()
        embeddings[mode], was_kept = embedder.embed(trials.recordings, source, mode, stem)
        # Timed separately, because reading kept embeddings says nothing about the speed of the
        # network.
        name = KEPT_EMBEDDINGS if was_kept else EMBEDDING
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
    start = time.perf_counter()
    # A model with several recordings is scored by the mean of its embeddings, or by the mean of its
    # recordings' scores. Scores are averaged after normalisation, which is defined for pairs of
    # recordings.
    of_modes = []
    for table in embeddings.values():
        if backend.options.enrolment == "scores":
            of_modes.append(_mean_scores(backend, table, trials))
        else:
            of_modes.append(backend.score(trials.mean(table), trials))
    seconds["scoring"] = time.perf_counter() - start
    scores, units, cohort_mean = of_modes[0]
    if len(of_modes) > 1:
        # Both modes give scores on the same scale, so their mean needs no weights.
        other_scores, _, _ = of_modes[1]
        scores = np.mean([scores, other_scores], axis=0)
    return Scored(scores, embeddings, units, cohort_mean, seconds)


def _mean_scores(
    backend: Backend, table: np.ndarray, trials: TrialList
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """As `Backend.score`, with each trial's mean score over the recordings of its model."""
    pairs, trial_of = trials.by_recording()
    scores, units, cohort_mean = backend.score(table, pairs)
    # No count is zero, because every trial has a recording on each side.
    means = np.bincount(trial_of, scores) / np.bincount(trial_of)
    if cohort_mean is not None:
        cohort_mean = trials.mean(cohort_mean)
    return means.astype(np.float32), mean_embeddings(trials.mean(units)), cohort_mean


def calibration_inputs(
    inputs: Sequence[str],
    scored: Scored,
    trials: TrialList,
    source: AudioSource,
    seconds: tuple[float, float] = ANY_SECONDS,
) -> np.ndarray:
    """The inputs of a calibration, (trials, inputs): the score and quality measures of both sides.

    The source is as heard (`embedding.as_heard`), so that measures are of what was embedded.
    """
    measures = {name.partition(" ")[0] for name in inputs}
    values = {}
    if "duration" in measures:
        values["duration"] = trials.mean(source.lookup_table(trials.recordings).seconds)
    if "magnitude" in measures:
        first = next(iter(scored.embeddings.values()))
        magnitudes = np.linalg.norm(first, axis=2).mean(axis=1)
        values["magnitude"] = trials.mean(magnitudes)
    if "snr" in measures:
        ratios = signal_to_noise_ratios(source, trials.recordings, MAX_READERS)
        values["snr"] = trials.mean(ratios)
    if "cohort" in measures:
        assert scored.cohort_mean is not None, "the options ask for a cohort"
        values["cohort"] = scored.cohort_mean
    return quality_columns(inputs, scored.scores, values, trials.enrol, trials.test, seconds)


def subset(trials: TrialList, max_trials: int, seed: int) -> TrialList:
    """A fixed random subset of a list with about the same share of targets, in list order; 0 keeps
    every trial.
    """
    if max_trials == 0 or max_trials >= len(trials) or trials.labels is None:
        return trials
    generator = numpy_generator(seed, SUBSET_STREAM)
    targets = np.flatnonzero(trials.labels == 1)
    nontargets = np.flatnonzero(trials.labels == 0)
    # Without a target there is no error rate to choose by.
    num_targets = min(len(targets), max(1, round(max_trials * len(targets) / len(trials))))
    targets = generator.permutation(targets)[:num_targets]
    nontargets = generator.permutation(nontargets)[: max_trials - num_targets]
    rows = np.sort(np.concatenate([targets, nontargets]))
    logger.info("%s: a fixed subset of %d of %d trials", trials.source, len(rows), len(trials))
    return trials.take(rows)
