"""Evaluate a network on a trial list: embed, score, normalise, calibrate and compute the figures.

`evaluate` does all of it for one list; `assembly/evaluation.py` reads configurations and model
files.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from speakernet.data.lists import TrialList
from speakernet.data.sources import AudioSource
from speakernet.evaluation.calibration import (
    ANY_SECONDS,
    BY_QUALITY,
    DURATION,
    SCORE_ONLY,
    AffineCalibration,
    quality_columns,
    quality_inputs,
)
from speakernet.evaluation.durations import (
    MIN_SPEAKERS,
    TOO_FEW_SPEAKERS,
    compare_left_out,
    cut_trials,
    fit_durations,
    helps,
    speakers_with_targets,
)
from speakernet.evaluation.embedding import MAX_READERS, Embedder, as_heard, modes_of
from speakernet.evaluation.figures import figures, group_draws, why_no_error_rate
from speakernet.evaluation.files import Evaluation
from speakernet.evaluation.fitting import Fit, fit_scores
from speakernet.evaluation.options import EvaluationOptions, Mode
from speakernet.evaluation.results import EMBEDDING, KEPT_EMBEDDINGS, SweepResult, headline_sentence
from speakernet.evaluation.scoring import VERIFYING, Backend, mean_embeddings, verifying_backend
from speakernet.evaluation.several import fit_several_on_list
from speakernet.evaluation.shortcuts import quantities_of, shortcuts, silence_note
from speakernet.evaluation.slices import all_slices, signal_to_noise_ratios
from speakernet.evaluation.speakers import Speakers, speakers_of
from speakernet.random import numpy_generator

logger = logging.getLogger(__name__)

SUBSET_STREAM = 6201
CALIBRATION_LIST = "calibration list"
"""What `ScoringParts.known_speakers` calls it."""
SEVERAL_UNCALIBRATED = (
    "no calibration for several recordings of a person: too few speakers have several; mean scores "
    "are compared with the thresholds, which accepts fewer strangers than stated and misses more"
)
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


@dataclass(frozen=True)
class ScoringParts:
    """Everything that scoring needs besides the trials and their audio."""

    path: Path
    """Of the model file."""
    in_file: Mapping[str, Any]
    """The entries of the model file."""
    network: Mapping[str, Any]
    """The fields of `Results` that describe the network."""
    embedder: Embedder
    backend: Backend
    known_speakers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Names of the speakers of other lists, by what the lists are for."""
    calibration: AffineCalibration | None = None
    fitted_on: str = ""
    """SHA-256 of the list that the calibration was fitted on."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """New entries of the model file, which only training writes into it."""
    warnings: Sequence[str] = ()
    """Warnings that hold for every list."""

    @property
    def contents(self) -> dict[str, Any]:
        """The entries of the model file, with those that were measured."""
        return {**self.in_file, **self.measured}


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


def with_groups(
    evaluation: Evaluation,
    source: AudioSource,
    parts: ScoringParts,
    options: EvaluationOptions,
    seed: int,
    sweep: Callable[..., list[SweepResult]] | None,
) -> Evaluation:
    """Add the figures of parts of the trials, of what is not the voice, and of degraded audio."""
    trials = evaluation.trials
    speakers = evaluation.speakers
    assert speakers is not None, "every list that is scored has speakers"
    scored = (trials, evaluation.scores, speakers)
    draws = {"num_draws": group_draws(options), "seed": seed}
    table = source.lookup_table(trials.recordings)
    levels_db = as_heard(source, options).levels_db(trials.recordings)
    warnings = list(evaluation.results.warnings or [])
    if silence := silence_note(trials, levels_db):
        warnings.append(silence)
    swept = None
    if sweep is not None:
        score = functools.partial(scores_of_audio, parts, trials)
        # All rows have the same draws of speakers, so that they differ only by the audio.
        swept = sweep(source, score, *scored, **draws)
    results = replace(
        evaluation.results,
        slices=all_slices(*scored, source, options, seed),
        shortcuts=shortcuts(trials, speakers, quantities_of(table, trials, levels_db), **draws),
        sweep=swept,
        warnings=warnings,
    )
    return replace(evaluation, results=results)


def scores_of_audio(parts: ScoringParts, trials: TrialList, source: AudioSource) -> np.ndarray:
    """Scores of other audio than that of a store."""
    # Degraded audio has the names of the original, so a store would return the wrong embeddings.
    embedder = replace(parts.embedder, stores=())
    return score_trials(embedder, parts.backend, trials, source).scores


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


def fits_of(
    scored: Scored,
    trials: TrialList,
    source: AudioSource,
    prior: float,
    backend: Mapping[str, Any],
    measures: Sequence[str],
) -> list[Fit]:
    """The fit of the score alone, then one with quality measures if any are given: the order in
    which a model file takes them.
    """
    fits = [fit_scores(trials, scored.scores, prior, backend)]
    if measures:
        names = quality_inputs(measures)
        columns = calibration_inputs(names, scored, trials, source)
        fits.append(fit_scores(trials, scored.scores, prior, backend, columns, names))
    return fits


def fit_for_verifying(
    embedder: Embedder,
    contents: Mapping[str, Any],
    trials: TrialList,
    source: AudioSource,
    prior: float,
    measures: Sequence[str] | None = (),
    speaker_table: str = "",
) -> tuple[list[Fit], np.ndarray]:
    """Fit calibration and thresholds on a list embedded as in verification: detected speech in
    float32.

    The fits also have what decisions about several recordings of a person need. With no measures
    at all (None), durations are used if that lowers Cllr for short recordings.

    Returns:
        The fits of `fits_of`, and the scores (trials,).
    """
    if reason := why_no_error_rate(trials):
        # Checked before embedding, which may take hours.
        raise ValueError(f"cannot calibrate: {reason}")
    # `verify` embeds like this whatever the options of the evaluation are, and a threshold holds
    # only for scores made in the same way.
    options = embedder.options.model_copy(update={"embedding": "whole", "speech": "detected"})
    in_float32 = replace(embedder.forward, autocast=contextlib.nullcontext)
    embedder = replace(embedder, options=options, forward=in_float32, precision="no")
    backend = verifying_backend(contents)
    source = as_heard(source, options)
    # A decision about two recordings is calibrated on pairs of recordings.
    trials, _ = trials.by_recording()
    scored = score_trials(embedder, backend, trials, source)
    way = backend.describe(options)
    speakers = speakers_of(trials, speaker_table)
    is_automatic = measures is None
    measures = measures or ()
    asks_duration = list(measures) == [DURATION]
    fits = fits_of(scored, trials, source, prior, way, () if asks_duration else measures)
    has_enough = len(speakers_with_targets(trials, speakers.ids)) >= MIN_SPEAKERS
    if asks_duration or (is_automatic and has_enough):
        # Recordings of a list are often longer than those of a decision, so durations are fitted on
        # cut ones.
        cut = cut_trials(embedder, backend, scored.embeddings["whole"], trials, source)
        lengths = compare_left_out(cut, speakers.ids, prior)
        if asks_duration or helps(lengths):
            fits.append(fit_durations(cut, fits[0], way))
        fits[0] = replace(fits[0], lengths=lengths)
    elif is_automatic:
        fits[0].refused.append(TOO_FEW_SPEAKERS)
    several = fit_several_on_list(scored.units, speakers.ids, trials, backend.plda)
    notes = [] if several else [SEVERAL_UNCALIBRATED]
    # All fits get the same values for several recordings, because a decision reads only one fit.
    fits = [replace(fit, several=several, refused=fit.refused + notes) for fit in fits]
    return fits, scored.scores


def calibrate(
    parts: ScoringParts, trials: TrialList, source: AudioSource, *, for_decisions: bool
) -> ScoringParts:
    """Add the calibration of this scoring, fitted on a list, and if asked for the one that
    `speakernet verify` decides with.
    """
    if reason := why_no_error_rate(trials):
        # Checked before hours of embedding.
        raise ValueError(f"cannot calibrate: {reason}")
    embedder = parts.embedder
    options = parts.backend.options
    prior = options.calibration_prior
    measures = options.quality_measures
    described = parts.backend.describe(embedder.options)
    scored = score_trials(embedder, parts.backend, trials, source)
    heard = as_heard(source, embedder.options)
    fits = fits_of(scored, trials, heard, prior, described, measures)
    calibration = fits[-1].calibration
    for sentence in fits[0].refused:
        logger.info("%s: %s", trials.source, sentence)
    # `speakernet verify` scores the detected speech of whole utterances by cosine or PLDA, however
    # the list was scored. A threshold only holds for scores of its own kind, so the list is
    # embedded again for it.
    is_of_verify = described == verifying_backend(parts.contents).describe(VERIFYING)
    if for_decisions and not is_of_verify:
        logger.info(
            "embedding %s again for decisions, which use detected speech alone", trials.source
        )
        without_cohort = [measure for measure in measures if measure != "cohort"]
        table = options.speaker_table
        of_verify, _ = fit_for_verifying(
            embedder, parts.contents, trials, source, prior, without_cohort, table
        )
        fits += of_verify
    measured = dict(parts.measured)
    for fit in fits:
        measured |= fit.changes({**parts.contents, **measured})
    of_list = frozenset(speakers_of(trials).names)
    return replace(
        parts,
        known_speakers={**parts.known_speakers, CALIBRATION_LIST: of_list},
        calibration=calibration,
        fitted_on=trials.sha256,
        measured=measured,
    )


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
