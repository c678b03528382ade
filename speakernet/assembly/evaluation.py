"""Score trial lists with a model according to the evaluation options, for validation during
training and at the end.

Decides what scoring needs besides the network (mean embedding, cohort, calibration) and where to
get it: from the model file, otherwise from the lists of the configuration. Only the evaluation at
the end of training writes to the model file.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from speakernet import distributed
from speakernet.assembly.inputs import Inputs, TrialInput, chosen_by_validation
from speakernet.assembly.training import build_model
from speakernet.checkpoint import read_checkpoint
from speakernet.config import Config
from speakernet.config.schema import with_changes
from speakernet.data.lists import TrainingList, TrialList
from speakernet.data.sources import AudioSource
from speakernet.evaluation.calibration import AffineCalibration
from speakernet.evaluation.cohort import (
    embed_cohort,
    mean_entries,
    plain_names,
    speakers_to_leave_out,
)
from speakernet.evaluation.embedding import (
    Embedder,
    EmbeddingNet,
    Forward,
    Unions,
    one_pass,
    reader_threads,
    weights_digest,
)
from speakernet.evaluation.evaluate import (
    Evaluation,
    ScoringParts,
    calibrate,
    evaluate,
    scores_of_audio,
    subset,
    with_groups,
)
from speakernet.evaluation.provenance import with_provenance, with_training_lists
from speakernet.evaluation.scoring import Backend, verifying_backend
from speakernet.evaluation.slices import read_metadata
from speakernet.evaluation.speakers import Speakers, speakers_of
from speakernet.models.model_file import (
    SYNTHETIC_ONLY,
    ModelFile,
    is_model_file,
    load_initial_weights,
    model_file_contents,
    model_of,
    update_model_file,
    voices_caution,
)
from speakernet.models.speaker_net import fold_network
from speakernet.run_folder import EMBEDDINGS, EVALUATIONS, evaluation_folder
from speakernet.training.precision import DTYPES, choose_precision

logger = logging.getLogger(__name__)

VALIDATION_DRAWS = 100
VALIDATION_WORK = 20_000_000
"""Draws of speakers for a validation's interval, which is skipped if draws times trials exceed the
latter (2 s)."""


def build_validation(
    config: Config,
    inputs: Inputs,
    net: EmbeddingNet,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Callable[[int], dict[str, Any]]:
    """Return a function of the epoch that evaluates the network on the validation list or a fixed
    subset of it.

    It also evaluates the lists of data.test_lists that are due, and raises `Stopped` soon after
    `is_stopped` becomes true on any rank.
    """
    section = config.evaluation
    prepared = {}
    for name, trial_list in {"": inputs.validation, **inputs.beside(inputs.validation)}.items():
        prepared[name] = _prepare_validation(config, inputs.device, trial_list)
    embedder = build_embedder(config, net, inputs.device, section.validation_precision)
    # A validation may take minutes, longer than a cluster waits for a job that it stops.
    forward = replace(embedder.forward, is_stopped=is_stopped)
    embedder = replace(embedder, forward=forward)
    at_the_end = []
    for name in ("subtract_mean", "plda", "score_norm"):
        if getattr(section, name) not in (False, "none"):
            at_the_end.append(f"evaluation.{name}")
    if at_the_end:
        # Mean and cohort change with the network, so validation does without them.
        logger.info(
            "validation uses plain scores; only the final figures use %s", ", ".join(at_the_end)
        )
    unions = Unions()

    def is_due(name: str, epoch: int) -> bool:
        if not name:
            return True
        # If a list's epoch falls between two validations, the list is due at the second.
        interval = config.data.test_lists[name].test_interval or 1
        return epoch // interval > (epoch - config.training.test_interval) // interval

    def validate(epoch: int) -> dict[str, Any]:
        due = [name for name in prepared if is_due(name, epoch)]
        # Lists share recordings (VoxCeleb1-O is part of E), so those that are due together are
        # embedded in one pass.
        used = embedder
        if len(prepared) > 1:
            pairs = [(prepared[name].trials.recordings, prepared[name].source) for name in due]
            together = one_pass(pairs, unions)
            used = replace(embedder, embed_with=together)
        results = {name: evaluate(used, *prepared[name]).results for name in due}
        # No plot uses the DET band of a validation, which would make each record ten times as long.
        chosen_by = replace(results.pop(""), det_band=None)
        rows = {name: result.as_row(name) for name, result in results.items()}
        figures = replace(chosen_by, test_lists=rows or None).to_dict()
        return {**figures, "trials_checksum": prepared[""].trials.checksum}

    return validate


class _Validation(NamedTuple):
    """A list to validate on: the arguments of `evaluate` after the embedder."""

    backend: Backend
    trials: TrialList
    source: AudioSource
    speakers: Speakers
    seed: int


def _prepare_validation(
    config: Config, device: torch.device, trial_list: TrialInput
) -> _Validation:
    section = config.evaluation
    seed = config.runtime.seed
    # The same subset at every validation, because the best epoch is chosen by comparing them.
    trials = subset(trial_list.trials, section.max_trials, seed)
    if trials.labels is not None and len(np.unique(trials.labels)) < 2:
        raise ValueError(
            f"{trials.source}: the {len(trials):,} trials evaluated during training are all of one "
            "kind; expected targets and non-targets, so raise evaluation.max_trials (0: all) or "
            "correct the list"
        )
    # Its intervals are rough, because many draws take longer than all other figures.
    num_draws = min(VALIDATION_DRAWS, section.bootstrap_samples)
    if num_draws * len(trials) > VALIDATION_WORK:
        num_draws = 0
    options = section.model_copy(update={"score_norm": "none", "bootstrap_samples": num_draws})
    backend = Backend(options, config.loss.normalize_embeddings, device=device)
    speakers = speakers_of(trials, section.speaker_table)
    return _Validation(backend, trials, trial_list.source, speakers, seed)


def run_evaluation(
    config: Config, inputs: Inputs, model_path: str | Path, *, after_training: bool = False
) -> Evaluation:
    """Score the test lists with a model file; training data is needed only for what the file
    lacks.
    """
    section = config.evaluation
    seed = config.runtime.seed
    if section.metadata:
        # Unreadable metadata and an unknown sweep are refused before anything slow starts.
        read_metadata(section.metadata, list(inputs.test.trials.recordings))
    sweep = None
    if section.sweep or section.plda:
        # Late: few recipes use either.
        from speakernet.assembly.disturbed import build_sweep, fit_plda

        sweep = build_sweep(config) if section.sweep else None
        if section.plda and after_training:
            fit_plda(config, inputs, load_for_scoring(config, model_path), Path(model_path))
    # A list is scored in steps, each of which reads only what the previous ones made: embed every
    # utterance once, score all trials, turn scores into log-likelihood ratios, compute the figures,
    # then the figures of subsets of the trials. Everything that these steps need besides the list
    # (network, mean embedding, cohort, calibration) is the same for all lists, so it is prepared
    # before the loop and frozen. Preparing it may take longer than scoring: the cohort and the
    # calibration list are often larger than the test list.
    parts = prepare_scoring(config, inputs, Path(model_path), after_training=after_training)
    if after_training and parts.measured and distributed.is_main():
        update_model_file(model_path, parts.measured, backs_up=False)
        logger.info("wrote to %s: %s", model_path, ", ".join(parts.measured))
    lists = {"": inputs.test, **inputs.beside(inputs.test)}
    shared = one_pass([(listed.trials.recordings, listed.source) for listed in lists.values()], {})
    evaluations = {}
    for name, listed in lists.items():
        embedder = replace(parts.embedder, embed_with=shared)
        if name and embedder.stores:
            # Stores of other lists are searched too, because lists share recordings.
            store = evaluation_folder(config.run_folder, name) / EMBEDDINGS
            embedder = replace(embedder, stores=(store, *embedder.stores))
        speakers = speakers_of(listed.trials, section.speaker_table)
        evaluation = evaluate(embedder, parts.backend, *listed, speakers, seed, parts.calibration)
        if not evaluation.results.why_no_eer:
            # Every rank takes part, because the ranks share the embedding. The metadata describe
            # the reported list only, and each step of a sweep embeds the list again.
            options = section.model_copy(update={"metadata": "", "slices": []} if name else {})
            evaluation = with_groups(
                evaluation, listed.source, parts, options, seed, None if name else sweep
            )
        results = evaluation.results
        if after_training:
            results = with_training_lists(results, *inputs.training, inputs.validation.trials)
        results = with_provenance(results, listed.trials, speakers, parts)
        for warning in results.warnings or []:
            # The command's last line says this too: it is how the demo is meant to end.
            level = logging.INFO if warning == SYNTHETIC_ONLY else logging.WARNING
            logger.log(level, "%s%s", f"{name}: " if name else "", warning)
        evaluations[name] = replace(evaluation, results=results)
    reported = evaluations.pop("")
    rows = {name: other.results.as_row(name) for name, other in evaluations.items()}
    results = replace(reported.results, test_lists=rows or None)
    return replace(reported, results=results, others=evaluations)


def scores_of_model(config: Config, inputs: Inputs, model_path: str | Path) -> np.ndarray:
    """Scores of the test list, (trials,), as `run_evaluation` computes them."""
    config = with_changes(config, evaluation={"keep_embeddings": False})
    parts = _uncalibrated(config, inputs, Path(model_path), after_training=False)
    return scores_of_audio(parts, *inputs.test)


def prepare_scoring(
    config: Config, inputs: Inputs, path: Path, *, after_training: bool
) -> ScoringParts:
    """Everything that scoring needs besides the list, with a calibration fitted on a list if
    possible, otherwise that of the model file.
    """
    parts = _uncalibrated(config, inputs, path, after_training=after_training)
    # Three parties may calibrate a model file: its training, on the validation list; somebody with
    # `speakernet calibrate`, on their own recordings; and this evaluation, on
    # evaluation.calibration_list, for its figures alone. Only training writes here, and a fit on
    # another list than its own stays in the file: somebody may be deciding with it.
    listed = _calibration_trials(config, inputs, after_training=after_training)
    described = parts.backend.describe(parts.embedder.options)
    # Newest first: an older fit may use the score alone, the newer one quality measures too.
    fits = list(reversed((parts.in_file.get("calibration") or {}).get("fits", [])))
    kept = next((fit for fit in fits if fit["backend"] == described), None)
    if listed is not None:
        # A finished run that is started again must not replace what `speakernet calibrate` has
        # fitted since.
        others = [fit for fit in fits if fit.get("list_sha256") != listed.trials.sha256]
        if others and after_training:
            logger.warning(
                "%s keeps the calibration fitted on %s; `speakernet calibrate --trials %s` "
                "replaces it",
                path,
                ", ".join(sorted({str(fit.get("list") or "another list") for fit in others})),
                listed.trials.source,
            )
        writes = after_training and not others
        if writes or kept is None or not after_training:
            return calibrate(parts, *listed, for_decisions=writes)
    if kept is None:
        return parts
    return replace(
        parts,
        calibration=AffineCalibration.from_dict(kept),
        fitted_on=kept.get("list_sha256") or "",
    )


def _uncalibrated(
    config: Config, inputs: Inputs, path: Path, *, after_training: bool
) -> ScoringParts:
    """Scoring without calibration: the embedder, and a back end with mean and cohort."""
    section = config.evaluation
    seed = config.runtime.seed
    model = load_for_scoring(config, path)
    contents = model.contents
    spec = model.net.spec()
    embedder = _embedder_of(model, config, inputs, after_training=after_training)
    backend = verifying_backend(contents)
    measured: dict[str, Any] = {}
    warnings: list[str] = []
    known_speakers = {}
    if caution := voices_caution(contents):
        warnings.append(caution)
    if after_training:
        known_speakers["training list"] = plain_names(inputs.training.rows.speakers)
    # Scoring never writes to the model file, and PLDA belongs to it.
    if section.plda and not backend.adaptation:
        warnings.append(
            "evaluation.plda is on, but the model file has no PLDA; evaluation does not fit one"
        )
    mean = None
    # An adaptation subtracts its own mean.
    if section.subtract_mean and not contents.get("adaptation"):
        measured = mean_entries(contents, embedder, inputs.training_if_listed, seed)
        mean = np.asarray({**contents, **measured}["embedding_mean"], dtype=np.float32)
    backend = replace(
        backend,
        options=section,
        is_normalised=bool(contents["loss_normalizes"]),
        mean=mean,
        device=embedder.forward.device,
    )
    if section.score_norm != "none":
        cohort, name, known_speakers["cohort"] = embed_cohort(
            embedder, mean, *cohort_of(config, inputs), seed
        )
        backend = replace(backend, cohort=cohort, cohort_name=name)
    return ScoringParts(
        path,
        contents,
        {
            "model": spec["model"],
            "num_parameters": model.net.num_parameters,
            "front_end": spec["front_end"],
        },
        embedder,
        backend,
        known_speakers,
        measured=measured,
        warnings=warnings,
    )


def _embedder_of(
    model: ModelFile, config: Config, inputs: Inputs, *, after_training: bool
) -> Embedder:
    """The embedder of a model file, with the folders in which its embeddings are kept."""
    net = model.net.to(inputs.device)
    embedder = build_embedder(config, net, inputs.device, config.evaluation.precision)
    # In 16 bits, folding would round the weights a second time.
    if embedder.precision == "no":
        embedder = replace(embedder, net=fold_network(net))
    if not config.evaluation.keep_embeddings:
        return embedder
    run = config.run_folder
    folder = run if after_training else evaluation_folder(run, config.data.test_list)
    # Shared lists, such as the cohort, reuse embeddings of the run and of its other evaluations.
    shared = (run / EMBEDDINGS, *sorted((run / EVALUATIONS).glob(f"*/{EMBEDDINGS}")))
    digest = weights_digest(model.contents["weights"]) + str(net.spec())
    return replace(embedder, stores=(folder / EMBEDDINGS, *shared), model_digest=digest)


def _calibration_trials(
    config: Config, inputs: Inputs, *, after_training: bool
) -> TrialInput | None:
    """The list to fit a calibration on; None if there is none that may be used."""
    data = config.data
    path = config.evaluation.calibration_list
    if path:
        return inputs.trial_input(path, config.evaluation.calibration_path or data.test_path)
    if not after_training:
        return None
    # Trials that are reported must not select thresholds, just as they must not select the model.
    if chosen_by_validation(config) or data.validation_list != data.test_list:
        return inputs.validation
    logger.info("no calibration, because all trials are reported; set evaluation.calibration_list")
    return None


def cohort_of(config: Config, inputs: Inputs) -> tuple[TrainingList, AudioSource, np.ndarray]:
    """The list of the cohort, its audio, and the speakers who are left out, as rows of its table:
    those who choose the model or calibrate its scores.

    Raises:
        ValueError: no list, or fewer than two speakers are left.
    """
    # Nobody in the cohort may choose the model, calibrate its scores or be in the trials. The first
    # two are removed here; the last cannot be seen from a trial list that names no speakers, and is
    # no more than a warning (`with_provenance`).
    section = config.evaluation
    data = config.data
    path = section.cohort_list or data.train_list
    if not path and not data.corpora:
        raise ValueError(
            f"score_norm {section.score_norm} needs a cohort: set --cohort_list (`speaker path` on "
            "each line)"
        )
    root = section.cohort_path
    if not root and path == data.train_list:
        root = data.train_path
    cohort = inputs.training_input(path, root) if path else inputs.listed
    used_by = []
    if section.calibration_list:
        used_by.append(inputs.trials(section.calibration_list))
    # When a model file is scored, the lists of its training need not be there.
    if data.validation_speakers and inputs.has_training_list():
        used_by.append(inputs.validation.trials)
    elif data.validation_list != data.test_list and Path(data.validation_list).is_file():
        used_by.append(inputs.trials(data.validation_list))
    left_out = speakers_to_leave_out(cohort.rows, used_by, section.score_norm)
    return *cohort, left_out


def load_for_scoring(config: Config, path: str | Path) -> ModelFile:
    """Load the network to score with; for a foreign checkpoint, the configuration describes it."""
    # The run folder need not be visible to other ranks' machines.
    contents = distributed.from_main(lambda: read_checkpoint(path))
    if is_model_file(contents):
        return model_of(contents, path)
    net = build_model(config)
    load_initial_weights(net, None, path)
    return ModelFile(
        net.eval(), model_file_contents(net, loss_normalizes=config.loss.normalize_embeddings)
    )


def build_embedder(
    config: Config, net: EmbeddingNet, device: torch.device, precision: str
) -> Embedder:
    """An embedder with the options of section evaluation, in this precision (auto: that of
    training).
    """
    if precision == "auto":
        precision = config.runtime.precision
    name = choose_precision(precision, device).value
    autocast = functools.partial(torch.autocast, device.type, DTYPES[name], enabled=name != "no")
    # The cores of this process are counted only here.
    options = config.evaluation.model_copy(
        update={"num_workers": reader_threads(config.evaluation)}
    )
    return Embedder(net, options, Forward(device, autocast), name)
