"""From the section evaluation and a model file to scored lists: validation while training, and a trial list on its own.

Decides what the scoring needs beside the network (mean embedding, cohort, calibration) and where it comes from: the
model file first, else the lists of the configuration. What is measured anew is kept in the model file.
"""

import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import speakernet
from speakernet import distributed
from speakernet.assembly.choosing import chosen_by_validation, validates_on_test_list
from speakernet.assembly.detail import build_sweep, check_slices, with_detail
from speakernet.assembly.inputs import Inputs
from speakernet.assembly.model import load_for_scoring
from speakernet.checkpoint import read_checkpoint
from speakernet.config import Config
from speakernet.config.schema import config_to_dict
from speakernet.data.lists import TrialList
from speakernet.evaluation.backend import (
    Backend,
    Cohort,
    mean_of_whole_utterances,
    plain_backend,
    verifying_backend,
)
from speakernet.evaluation.calibrating import (
    FITTED_ON_REPORTED,
    SCORE_ONLY,
    Fit,
    fit_for_verifying,
    fit_scores,
)
from speakernet.evaluation.calibration import AffineCalibration
from speakernet.evaluation.cautions import cautions
from speakernet.evaluation.embedder import Embedder
from speakernet.evaluation.embedding import EmbeddingNet
from speakernet.evaluation.embedding_store import weights_digest
from speakernet.evaluation.evaluate import Evaluation, calibration_inputs, evaluate, score_trials
from speakernet.evaluation.figures import why_no_error_rate
from speakernet.evaluation.options import Mode
from speakernet.evaluation.results import Results
from speakernet.evaluation.score_norm import speaker_means
from speakernet.evaluation.scoring import mean_embeddings
from speakernet.evaluation.speakers import Speakers, read_speaker_table, speakers_of
from speakernet.files import sha256_of
from speakernet.machine.facts import system_info
from speakernet.models.model_file import ModelFile, is_model_file, update_model_file
from speakernet.run_folder import EMBEDDINGS
from speakernet.seeding import numpy_generator
from speakernet.terminal import MAX_NAMED
from speakernet.training.precision import DTYPES, choose_precision

logger = logging.getLogger(__name__)

VALIDATION_DRAWS, VALIDATION_WORK = 100, 20_000_000
"""Draws of speakers for the interval of each validation, and trials x draws above which there is none (2 s)."""
SUBSET_STREAM, MEAN_STREAM, COHORT_STREAM = 6201, 6202, 6203


def build_validation(
    config: Config, inputs: Inputs, net: EmbeddingNet, is_stopped: Callable[[], bool] = lambda: False
) -> Callable[[], dict[str, Any]]:
    """A callable that evaluates the network, as it is then, on the validation list (or a fixed subset of it).

    It raises `Stopped` soon after `is_stopped`, in whichever process.
    """
    trials = subset(inputs.validation.trials, config.evaluation.max_trials, config.runtime.seed)
    if trials.labels is not None and len(np.unique(trials.labels)) < 2:
        raise ValueError(
            f"{trials.source}: the {len(trials)} trials to choose the best checkpoint by have no error rate, which "
            "needs targets and non-targets; raise evaluation.max_trials (0: all), or mend the list"
        )
    source = inputs.validation.source
    # The mean and the cohort move with the network: what is watched while training is the plain score.
    # Rough intervals, for the curve: those of many draws take longer than all other figures.
    affordable = min(VALIDATION_DRAWS, config.evaluation.bootstrap_samples)
    num_draws = affordable if affordable * len(trials) <= VALIDATION_WORK else 0
    options = dataclasses.replace(config.evaluation, score_norm="none", bootstrap_samples=num_draws)
    precision = config.evaluation.validation_precision
    embedder = dataclasses.replace(_embedder(config, net, inputs.device, precision), is_stopped=is_stopped)
    # Read and told once: the list is the same at every epoch.
    backend = Backend(options, config.loss.normalize_embeddings, device=inputs.device)
    speakers, checksum = _speakers(config, trials), trials.checksum

    def validate() -> dict[str, Any]:
        results = evaluate(embedder, backend, trials, source, speakers, options, config.runtime.seed).results
        # The band of a curve that nobody draws would make each record ten times as long.
        return {**dataclasses.replace(results, det_band=None).to_dict(), "trials_checksum": checksum}

    return validate


def run_evaluation(
    config: Config, inputs: Inputs, model_path: str | Path, *, after_training: bool = False
) -> Evaluation:
    """Score the test list with a model file; the training data is needed only for what the file lacks.

    Args:
        config: what to score and how.
        inputs: of the run; lists that they have are not read again.
        model_path: a model file, or a foreign checkpoint of the config's architecture.
        after_training: fit calibration and thresholds on the validation list where no calibration_list is named.

    Raises:
        ValueError: a list, audio or option that the user can mend.
    """
    check_slices(config)
    sweep = build_sweep(config)
    device = inputs.device
    model = load_for_scoring(config, model_path)
    embedder = dataclasses.replace(
        _embedder_of_file(config, model, device),
        store=Path(config.training.save_path) / EMBEDDINGS if config.evaluation.keep_embeddings else None,
        model_digest=weights_digest(model.contents["weights"]) + str(model.net.spec()),
    )
    trials, source = inputs.test.trials, inputs.test.source
    speakers = _speakers(config, trials)
    keep = _ModelKeeper(Path(model_path), model, is_ours=after_training)
    warnings: list[str] = []
    chosen_by = (model.contents.get("training_summary") or {}).get("chosen_by") or {}
    if trials.sha256 and chosen_by.get("list_sha256") == trials.sha256:
        warnings.append("the best checkpoint was chosen on this very list: the error rates flatter")
    backend = _backend(config, inputs, model, embedder, keep, trials, warnings)
    calibration = _calibration(config, inputs, model, embedder, backend, keep, after_training, warnings)
    evaluation = evaluate(
        embedder, backend, trials, source, speakers, config.evaluation, config.runtime.seed, calibration
    )
    results = with_detail(evaluation, config, source, embedder, backend, sweep)
    keep.write()
    results = _with_facts(results, config, model, Path(model_path), warnings)
    if after_training:
        results = _with_training_data(results, config, inputs)
    for warning in warnings:
        logger.warning("%s", warning)
    return dataclasses.replace(evaluation, results=results)


def scores_of_model(config: Config, inputs: Inputs, model_path: str | Path) -> np.ndarray:
    """Scores of the test list, (trials,), as `run_evaluation` makes them; the model file stays as it is.

    Raises:
        ValueError: a list, audio or option that the user can mend.
    """
    model = load_for_scoring(config, model_path)
    embedder = _embedder_of_file(config, model, inputs.device)
    trials, source = inputs.test.trials, inputs.test.source
    backend = _backend(config, inputs, model, embedder, _ModelKeeper(Path(model_path), model), trials, [])
    return score_trials(embedder, backend, trials, source).scores


def subset(trials: TrialList, max_trials: int, seed: int) -> TrialList:
    """A fixed random subset of a list with about the same share of targets, in the list's order; 0 takes all."""
    if max_trials == 0 or max_trials >= len(trials):
        return trials
    random = numpy_generator(seed, SUBSET_STREAM)
    if trials.labels is None:
        rows = np.sort(random.permutation(len(trials))[:max_trials])
    else:
        targets, others = np.flatnonzero(trials.labels == 1), np.flatnonzero(trials.labels == 0)
        # At least one target, or there is no error rate to choose by.
        num_targets = min(len(targets), max(1, round(max_trials * len(targets) / len(trials)))) if len(targets) else 0
        chosen = [random.permutation(targets)[:num_targets], random.permutation(others)[: max_trials - num_targets]]
        rows = np.sort(np.concatenate(chosen))
    enrol, test = trials.enrol[rows], trials.test[rows]
    used, numbers = np.unique(np.concatenate([enrol, test]), return_inverse=True)
    labels = None if trials.labels is None else trials.labels[rows]
    logger.info("%s: a fixed subset of %d of %d trials", trials.source, len(rows), len(trials))
    first, second = numbers[: len(rows)].astype(np.int32), numbers[len(rows) :].astype(np.int32)
    return TrialList(trials.names.take(used), first, second, labels, trials.source, trials.sha256)


class _ModelKeeper:
    """Collects what was measured anew and writes it into the model file once, on the main process."""

    def __init__(self, path: Path, model: ModelFile, *, is_ours: bool = False) -> None:
        self.path = path
        self.changes: dict[str, Any] = {}
        self.contents = model.contents
        self._subtracted = mean_of_whole_utterances(model.contents) is not None
        # This very run made it a moment ago: there is nothing to come back to.
        self._is_ours = is_ours

    def put(self, found: Fit | Mapping[str, Any]) -> None:
        changes = found.changes(self.contents) if isinstance(found, Fit) else found
        self.changes.update(changes)
        self.contents.update(changes)

    def write(self) -> None:
        if not self.changes or not distributed.is_main():
            return
        names = ", ".join(self.changes)
        if not is_model_file(read_checkpoint(self.path)):
            # Whoever names a list to calibrate on means to decide by it later.
            level = logging.WARNING if "calibration" in self.changes else logging.INFO
            logger.log(
                level,
                "%s is a checkpoint of another program, which cannot keep %s: make a model file of it with "
                "`speakernet import-weights %s --model %s --out model.pt`, and name that one instead",
                *(self.path, names, self.path, self.contents["model"]["name"]),
            )
            return
        backup = update_model_file(self.path, self.changes, backs_up=not self._is_ours)
        logger.info("kept in %s: %s%s", self.path, names, f" (as it was: {backup})" if backup else "")
        # A mean of crops is for lists that are scored by crops; nothing else takes it.
        subtracts = mean_of_whole_utterances(self.contents) is not None
        if "embedding_mean" in self.changes and (subtracts or self._subtracted) and not self._is_ours:
            logger.warning(
                "verify, export and identify with %s subtract %s from now on: thresholds and scores of before do not "
                "fit any more; calibrate anew, or take back the file as it was%s",
                *(self.path, "this mean" if subtracts else "no mean", f", {backup}" if backup else ""),
            )


def _embedder_of_file(config: Config, model: ModelFile, device: torch.device) -> Embedder:
    embedder = _embedder(config, model.net.to(device), device, config.evaluation.precision)
    # In 16 bits merged weights would be rounded once more.
    return dataclasses.replace(embedder, net=model.folded) if embedder.precision == "no" else embedder


def _embedder(
    config: Config, net: EmbeddingNet, device: torch.device, wanted: Literal["auto", "no", "bf16", "fp16"]
) -> Embedder:
    section = config.evaluation
    precision = choose_precision(config.runtime.precision if wanted == "auto" else wanted, device).name
    if precision == "no":
        return Embedder(net, section, device)
    return Embedder(net, section, device, lambda: torch.autocast(device.type, DTYPES[precision]), precision)


def _speakers(config: Config, trials: TrialList) -> Speakers:
    table = config.evaluation.speaker_table
    return speakers_of(trials, read_speaker_table(table) if table else None)


def _backend(
    config: Config,
    inputs: Inputs,
    model: ModelFile,
    embedder: Embedder,
    keep: _ModelKeeper,
    trials: TrialList,
    warnings: list[str],
) -> Backend:
    section = config.evaluation
    mean = _mean(config, inputs, model, embedder, keep) if section.subtract_mean else None
    is_normalised = bool(model.contents["loss_normalizes"])
    if section.score_norm == "none":
        return Backend(section, is_normalised, mean, device=embedder.device)
    cohort, speakers = _cohort(config, inputs, embedder, mean)
    if section.score_norm == "as" and len(cohort.members) <= section.cohort_size:
        warnings.append(
            f"the cohort has {len(cohort.members)} speakers and evaluation.cohort_size is {section.cohort_size}: all "
            "of them are taken, which is s-norm; a smaller cohort_size makes it adaptive"
        )
    # By any folder of the name: lists write speakers at different depths.
    test_speakers = {part for one in trials.names for part in one.replace("\\", "/").split("/")[:-1]}
    shared = sorted(test_speakers & set(speakers))
    if shared:
        shown = ", ".join(shared[:MAX_NAMED])
        warnings.append(f"{len(shared)} speakers of the cohort seem to be in the trials too ({shown}): scores flatter")
    return Backend(section, is_normalised, mean, cohort, embedder.device)


def _mean(config: Config, inputs: Inputs, model: ModelFile, embedder: Embedder, keep: _ModelKeeper) -> np.ndarray:
    """The mean embedding of the training set: the model file's where it was measured this way, else measured anew."""
    mode = embedder.options.modes[0]
    described = embedder.options.in_mode(mode).describe()
    kept, kept_of = model.contents.get("embedding_mean"), model.contents.get("embedding_mean_of")
    if kept is not None and kept_of == described:
        return np.asarray(kept, dtype=np.float32)
    data = config.data
    if not data.train_list or not Path(data.train_list).exists():
        found = "no mean embedding" if kept is None else f"the mean embedding of {_in_words(kept_of)}"
        raise ValueError(
            f"subtract_mean: the model file holds {found}, this scoring needs that of {_in_words(described)}, and "
            "there is no training list to measure it on; set --train_list and --train_path, or "
            "evaluation.subtract_mean: false"
        )
    training, source = inputs.training.rows, inputs.training.source
    random = numpy_generator(config.runtime.seed, MEAN_STREAM)
    rows = np.sort(random.permutation(len(training))[: config.evaluation.mean_utterances])
    embeddings = embedder.embed(training.paths.take(rows), source, mode, "training_mean")
    mean = embeddings.mean(axis=(0, 1), dtype=np.float64).astype(np.float32)
    if kept is not None:
        logger.info("mean embedding measured anew: the kept one is of %s", _in_words(kept_of))
    keep.put({"embedding_mean": torch.from_numpy(mean), "embedding_mean_of": described})
    return mean


def _in_words(described: Mapping[str, Any] | None) -> str:
    """A way of embedding, for messages."""
    if not described:
        return "an unknown way of embedding"
    return ", ".join(str(value) if name == "embedding" else f"{name} {value}" for name, value in described.items())


def _cohort(config: Config, inputs: Inputs, embedder: Embedder, mean: np.ndarray | None) -> tuple[Cohort, list[str]]:
    """The cohort, a member for each speaker, and its speakers."""
    section, data = config.evaluation, config.data
    path = section.cohort_list or data.train_list
    if not path:
        raise ValueError(f"score_norm {section.score_norm} needs a cohort: set --cohort_list (`speaker path` a line)")
    given = inputs.training_input(path, section.cohort_path or (data.train_path if path == data.train_list else ""))
    members = given.rows
    rows = np.arange(len(members))
    if section.cohort_utterances:
        order = numpy_generator(config.runtime.seed, COHORT_STREAM).permutation(len(members))
        # Stable: within a speaker the drawn order stays, so the first ones are a random sample.
        order = order[np.argsort(members.labels[order], kind="stable")]
        first = np.searchsorted(members.labels[order], members.labels[order])
        rows = np.sort(order[np.arange(len(order)) - first < section.cohort_utterances])
    mode: Mode = embedder.options.modes[0]
    embeddings = embedder.embed(members.paths.take(rows), given.source, mode, f"cohort_{Path(path).stem}")
    means = speaker_means(mean_embeddings(embeddings, mean), members.labels[rows])
    return Cohort(means, f"{Path(path).name} {members.sha256[:12]}"), list(members.speakers)


def _calibration(
    config: Config,
    inputs: Inputs,
    model: ModelFile,
    embedder: Embedder,
    backend: Backend,
    keep: _ModelKeeper,
    after_training: bool,
    warnings: list[str],
) -> AffineCalibration | None:
    """The calibration for this scoring: fitted on calibration_list where one is named, else the model file's."""
    section, data = config.evaluation, config.data
    described = backend.describe(embedder.options)
    # Where the reported trials choose no model, they choose no threshold either.
    validates = after_training and (chosen_by_validation(config) or not validates_on_test_list(config))
    if not section.calibration_list and not validates:
        if after_training:
            logger.info("no calibration: the only trials are those that are reported (evaluation.calibration_list)")
        # The newest first: there may be one of the score alone, and one of quality measures too.
        for kept in reversed((model.contents.get("calibration") or {}).get("fits", [])):
            if plain_backend(kept["backend"]) == plain_backend(described):
                if kept.get("list_sha256") == inputs.test.trials.sha256:
                    warnings.append(FITTED_ON_REPORTED)
                return AffineCalibration.from_dict(kept)
        return None
    given = inputs.validation
    if section.calibration_list:
        given = inputs.trial_input(section.calibration_list, section.calibration_path or data.test_path)
    trials, source = given.trials, given.source
    if reason := why_no_error_rate(trials):
        # Before hours of embedding, not after.
        raise ValueError(f"cannot calibrate: {reason}")
    scored = score_trials(embedder, backend, trials, source)
    measures = ("score", *section.quality_measures)
    columns = calibration_inputs(measures, scored, trials, source)
    fit = fit_scores(trials, scored.scores, section.calibration_prior, described, columns, measures)
    # Said, not refused: with one list only it is all that one can do.
    if trials.sha256 == inputs.test.trials.sha256:
        warnings.append(FITTED_ON_REPORTED)
    for sentence in fit.refused:
        logger.info("%s: %s", trials.source, sentence)
    keep.put(fit)
    # `speakernet verify` decides by whole utterances and cosine, whatever the list was scored by.
    verifying = verifying_backend(keep.contents).describe(embedder.options.in_mode("whole"))
    if (plain_backend(described), measures) != (plain_backend(verifying), SCORE_ONLY):
        keep.put(fit_for_verifying(embedder, keep.contents, trials, source, section.calibration_prior)[0])
    return fit.calibration


def _with_facts(results: Results, config: Config, model: ModelFile, model_path: Path, warnings: list[str]) -> Results:
    """What a figure needs to be repeated: model, checkpoint, versions, machine, configuration, command."""
    warnings += cautions(results)
    spec = model.net.spec()
    described = plain_backend(results.backend or {})
    thresholds = model.contents.get("thresholds") or []
    return dataclasses.replace(
        results,
        model=spec["model"],
        num_parameters=sum(parameter.numel() for parameter in model.net.parameters()),
        front_end=spec["front_end"],
        checkpoint={"path": str(model_path), "sha256": distributed.from_main(lambda: sha256_of(model_path))},
        thresholds=[one for one in thresholds if plain_backend(one["backend"]) == described],
        versions={"speakernet": speakernet.__version__, "torch": torch.__version__, "numpy": np.__version__},
        machine=system_info(),
        config=config_to_dict(config)["evaluation"],
        command=" ".join(sys.argv),
        date=time.strftime("%Y-%m-%d %H:%M"),
        warnings=warnings,
    )


def _with_training_data(results: Results, config: Config, inputs: Inputs) -> Results:
    """What the model was trained on and chosen by: the lists by name, and how much there was of the first."""
    data = config.data
    training = inputs.training.rows
    num_samples = inputs.training.table.num_samples
    hours = float(np.maximum(num_samples, 0).sum()) / data.sample_rate / 3600
    validation = inputs.validation.trials
    named = (("training", training), ("validation", validation))
    lists = [{"role": role, "name": Path(rows.source).name, "sha256": rows.sha256} for role, rows in named]
    facts = {"speakers": len(training.speakers), "utterances": len(training), "hours": round(hours, 2)}
    return dataclasses.replace(results, lists=[*(results.lists or []), *lists], training=facts)
