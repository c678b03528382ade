"""What an evaluation adds to the figures of a list besides those of every validation: a calibration
fitted on a list; figures of parts of the trials, of what is not the voice, and of degraded audio;
and where all of them come from.
"""

import contextlib
import functools
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import speakernet
from speakernet import distributed
from speakernet.data.lists import TrainingList, TrialList
from speakernet.data.names import folders_of, one_word
from speakernet.data.sources import AudioSource
from speakernet.evaluation.calibration import (
    DURATION,
    FITTED_ON_REPORTED,
    AffineCalibration,
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
from speakernet.evaluation.embedding import Embedder, as_heard
from speakernet.evaluation.evaluate import Scored, calibration_inputs, score_trials
from speakernet.evaluation.figures import (
    CHOSEN_ON_REPORTED,
    cautions,
    group_draws,
    why_no_error_rate,
)
from speakernet.evaluation.files import Evaluation
from speakernet.evaluation.fitting import Fit, fit_scores
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.results import Results
from speakernet.evaluation.scoring import VERIFYING, Backend, verifying_backend
from speakernet.evaluation.several import fit_several_on_people
from speakernet.evaluation.shortcuts import (
    ADVICE,
    describe,
    is_notable,
    quantities_of,
    shortcuts,
    silence_note,
)
from speakernet.evaluation.slices import all_slices
from speakernet.evaluation.speakers import Speakers, speakers_of
from speakernet.evaluation.sweep import Step, run_sweep
from speakernet.files import sha256_of
from speakernet.machine.facts import system_info
from speakernet.terminal import MAX_NAMED, counted

logger = logging.getLogger(__name__)

CALIBRATION_LIST = "calibration list"
"""What `ScoringParts.known_speakers` calls it."""
SEVERAL_UNCALIBRATED = (
    "no calibration for several recordings of a person: too few speakers have several; mean scores "
    "are compared with the thresholds, which accepts fewer strangers than stated and misses more"
)


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


def with_groups(
    evaluation: Evaluation,
    source: AudioSource,
    parts: ScoringParts,
    options: EvaluationOptions,
    seed: int,
    sweep: Mapping[str, Sequence[Step]],
) -> Evaluation:
    """Add the figures of parts of the trials, of what is not the voice, and of degraded audio."""
    trials = evaluation.trials
    speakers = evaluation.speakers
    assert speakers is not None, "every list that is scored has speakers"
    scored = (trials, evaluation.scores, speakers)
    num_draws = group_draws(options)
    table = source.lookup_table(trials.recordings)
    levels_db = as_heard(source, options).levels_db(trials.recordings)
    quantities = quantities_of(table, trials, levels_db)
    warnings = list(evaluation.results.warnings or [])
    if silence := silence_note(trials, levels_db):
        warnings.append(silence)
    score = functools.partial(scores_of_audio, parts, trials)
    # All rows have the same draws of speakers, so that they differ only by the audio.
    swept = None
    if sweep:
        swept = run_sweep(sweep, source, score, *scored, num_draws=num_draws, seed=seed)
    results = replace(
        evaluation.results,
        slices=all_slices(*scored, source, options, seed),
        shortcuts=shortcuts(trials, speakers, quantities, num_draws=num_draws, seed=seed),
        sweep=swept,
        warnings=warnings,
    )
    return replace(evaluation, results=results)


def scores_of_audio(parts: ScoringParts, trials: TrialList, source: AudioSource) -> np.ndarray:
    """Scores of other audio than that of a store."""
    # Degraded audio has the names of the original, so a store would return the wrong embeddings.
    embedder = replace(parts.embedder, stores=())
    return score_trials(embedder, parts.backend, trials, source).scores


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
    # The list decides which speakers are compared, but all their recordings are.
    assert trials.labels is not None, "a list with error rates is labelled"
    is_nontarget = trials.labels == 0
    pairs = speakers.ids[np.stack([trials.enrol, trials.test])[:, is_nontarget]]
    several = fit_several_on_people(scored.units, speakers.ids, backend.plda, pairs)
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


def with_provenance(
    results: Results, trials: TrialList, speakers: Speakers, parts: ScoringParts
) -> Results:
    """Add what is needed to reproduce the figures: model, checkpoint, versions, machine,
    configuration, command; and what to know before trusting them.
    """
    contents = parts.contents
    chosen_by = (contents.get("training_summary") or {}).get("chosen_by") or {}
    warnings = [*(results.warnings or []), *parts.warnings]
    if trials.sha256 and chosen_by.get("list_sha256") == trials.sha256:
        warnings.append(CHOSEN_ON_REPORTED)
    known_speakers = dict(parts.known_speakers)
    if trials.sha256 and parts.fitted_on == trials.sha256:
        warnings.append(FITTED_ON_REPORTED)
        # Otherwise every speaker of the list would also be named as shared.
        known_speakers.pop(CALIBRATION_LIST, None)
    possible = set(speakers.names)
    if known_speakers and not possible:
        # Any folder of a path may name the speaker.
        for name in trials.recordings:
            possible.update(map(one_word, folders_of(name)))
    for role, names in known_speakers.items():
        if shared := sorted(names & possible):
            number = counted(len(shared), "speaker")
            warnings.append(
                f"{number} of the {role} may also be in the trials "
                f"({', '.join(shared[:MAX_NAMED])}); if so, the error rates are optimistic"
            )
    for row in filter(is_notable, results.shortcuts or []):
        warnings.append(f"{describe(row)}; {ADVICE}")
    warnings += cautions(results)
    thresholds = contents.get("thresholds") or []
    return replace(
        results,
        **parts.network,
        checkpoint={
            "path": str(parts.path),
            "sha256": distributed.from_main(lambda: sha256_of(parts.path)),
        },
        # Thresholds hold only for scores that were made in the same way.
        thresholds=[limit for limit in thresholds if limit["backend"] == results.backend],
        versions={
            "speakernet": speakernet.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        machine=system_info(),
        config=parts.backend.options.model_dump(),
        command=" ".join(sys.argv),
        date=time.strftime("%Y-%m-%d %H:%M"),
        warnings=warnings,
    )


def with_training_lists(
    results: Results, training: TrainingList, source: AudioSource, validation: TrialList
) -> Results:
    """Add the lists of the run, and how much speech the network was trained on."""
    lists = list(results.lists or [])
    for role, rows in (("training", training), ("validation", validation)):
        lists.append({"role": role, "name": Path(rows.source).name, "sha256": rows.sha256})
    table = source.lookup_table(training.paths)
    num_samples = float(np.maximum(table.num_samples, 0).sum())
    amounts = {
        "speakers": len(training.speakers),
        "utterances": len(training),
        "hours": round(num_samples / table.sample_rate / 3600, 2),
    }
    return replace(results, lists=lists, training=amounts)


def with_earlier_lists(results: Results, earlier: Results, changed: Sequence[str]) -> Results:
    """New results of a model that was trained on the lists of an earlier report."""
    of_model = {listed["role"]: listed for listed in earlier.lists or []}
    of_model.pop("trials", None)
    lists = [of_model.get(listed["role"], listed) for listed in results.lists or []]
    warning = (
        f"the model was trained before {' and '.join(changed)} changed; the SHA-256 on this page "
        "is that of the list it was trained with"
    )
    return replace(
        results,
        lists=lists,
        training=earlier.training,
        warnings=[*(results.warnings or []), warning],
    )
