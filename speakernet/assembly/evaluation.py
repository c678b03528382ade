"""Score trial lists with a model according to the evaluation options, for validation during
training and at the end.

Decides what scoring needs besides the network (mean embedding, cohort, calibration) and where to
get it: from the model file, otherwise from the lists of the configuration. Only the evaluation at
the end of training writes to the model file.
"""

import dataclasses
import functools
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

import speakernet
from speakernet import distributed
from speakernet.assembly.inputs import Inputs, TrialInput, chosen_by_validation
from speakernet.assembly.training import build_model
from speakernet.checkpoint import read_checkpoint
from speakernet.config import Config
from speakernet.config.schema import with_changes
from speakernet.data.lists import TrainingList, TrialList
from speakernet.data.names import folders_of, one_word
from speakernet.data.sources import AudioSource
from speakernet.evaluation.calibration import (
    FITTED_ON_REPORTED,
    AffineCalibration,
)
from speakernet.evaluation.embedding import (
    Embedder,
    Forward,
    Unions,
    as_heard,
    modes_of,
    one_pass,
    reader_threads,
    way_of,
    weights_digest,
)
from speakernet.evaluation.evaluate import (
    Evaluation,
    evaluate,
    fit_for_verifying,
    fits_of,
    score_trials,
    subset,
)
from speakernet.evaluation.figures import (
    CHOSEN_ON_REPORTED,
    cautions,
    group_draws,
    why_no_error_rate,
)
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.results import Results, SweepResult
from speakernet.evaluation.scoring import (
    MIN_COHORT,
    VERIFYING,
    Backend,
    mean_embeddings,
    speaker_means,
    verifying_backend,
)
from speakernet.evaluation.shortcuts import (
    ADVICE,
    describe,
    is_notable,
    quantities_of,
    shortcuts,
    silence_note,
)
from speakernet.evaluation.slices import all_slices, read_metadata
from speakernet.evaluation.speakers import Speakers, shared_speakers, some_of_each, speakers_of
from speakernet.files import sha256_of
from speakernet.machine.facts import system_info
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
from speakernet.models.speaker_net import folded
from speakernet.random import numpy_generator
from speakernet.run_folder import EMBEDDINGS, EVALUATIONS, evaluation_folder
from speakernet.terminal import MAX_NAMED, counted
from speakernet.training.precision import DTYPES, choose_precision

if TYPE_CHECKING:
    from speakernet.evaluation.embedding import EmbeddingNet

logger = logging.getLogger(__name__)

VALIDATION_DRAWS = 100
VALIDATION_WORK = 20_000_000
"""Draws of speakers for a validation's interval, which is skipped if draws times trials exceed the
latter (2 s)."""
CALIBRATION_LIST = "calibration list"
MEAN_STREAM = 6202
COHORT_STREAM = 6203


def build_validation(
    config: Config,
    inputs: Inputs,
    net: "EmbeddingNet",
    is_stopped: Callable[[], bool] = lambda: False,
) -> Callable[[int], dict[str, Any]]:
    """Return a function of the epoch that evaluates the network on the validation list or a fixed
    subset of it.

    It also evaluates the lists of data.test_lists that are due, and raises `Stopped` soon after
    `is_stopped` becomes true on any rank.
    """
    section = config.evaluation
    lists = {"": inputs.validation}
    if config.data.test_lists:
        lists |= inputs.beside(inputs.validation)
    prepared = {}
    for name, trial_list in lists.items():
        prepared[name] = _prepare_validation(config, inputs.device, trial_list)
    embedder = build_embedder(config, net, inputs.device, section.validation_precision)
    # A validation may take minutes, longer than a cluster waits for a job that it stops.
    forward = dataclasses.replace(embedder.forward, is_stopped=is_stopped)
    embedder = dataclasses.replace(embedder, forward=forward)
    at_the_end = {
        "subtract_mean": section.subtract_mean,
        "plda": section.plda,
        "score_norm": section.score_norm != "none",
    }
    if any(at_the_end.values()):
        # Mean and cohort change with the network, so validation does without them.
        options = [f"evaluation.{name}" for name, is_set in at_the_end.items() if is_set]
        logger.info(
            "validation uses plain scores; only the final figures use %s", ", ".join(options)
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
            used = dataclasses.replace(embedder, embed_with=together)
        results = {name: evaluate(used, *prepared[name]).results for name in due}
        # No plot uses the DET band of a validation, which would make each record ten times as long.
        chosen_by = dataclasses.replace(results.pop(""), det_band=None)
        rows = {name: result.as_row(name) for name, result in results.items()}
        figures = dataclasses.replace(chosen_by, test_lists=rows or None).to_dict()
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
    parts = prepare_backend(config, inputs, Path(model_path), after_training=after_training)
    parts = _calibrated(parts, config, inputs, after_training=after_training)
    if after_training and parts.measured and distributed.is_main():
        update_model_file(model_path, parts.measured, backs_up=False)
        logger.info("wrote to %s: %s", model_path, ", ".join(parts.measured))
    lists = {"": inputs.test, **(inputs.beside(inputs.test) if config.data.test_lists else {})}
    shared = one_pass([(listed.trials.recordings, listed.source) for listed in lists.values()], {})
    evaluations = {}
    for name, listed in lists.items():
        embedder = dataclasses.replace(parts.embedder, embed_with=shared)
        if name and embedder.stores:
            # Stores of other lists are searched too, because lists share recordings.
            store = evaluation_folder(Path(config.training.save_path), name) / EMBEDDINGS
            embedder = dataclasses.replace(embedder, stores=(store, *embedder.stores))
        speakers = speakers_of(listed.trials, section.speaker_table)
        evaluation = evaluate(
            embedder, parts.backend, listed.trials, listed.source, speakers, seed, parts.calibration
        )
        if not evaluation.results.why_no_eer:
            # Every rank takes part, because the ranks share the embedding. The metadata describe
            # the reported list only, and each step of a sweep embeds the list again.
            options = section.model_copy(update={"metadata": "", "slices": []} if name else {})
            evaluation = _with_groups(
                evaluation, listed.source, parts, options, seed, None if name else sweep
            )
        results = evaluation.results
        if after_training:
            results = _with_training_lists(results, config, inputs)
        results = _with_provenance(results, listed.trials, speakers, config, parts)
        for warning in results.warnings or []:
            # The command's last line says this too: it is how the demo is meant to end.
            level = logging.INFO if warning == SYNTHETIC_ONLY else logging.WARNING
            logger.log(level, "%s%s", f"{name}: " if name else "", warning)
        evaluations[name] = dataclasses.replace(evaluation, results=results)
    reported = evaluations.pop("")
    rows = {name: other.results.as_row(name) for name, other in evaluations.items()}
    results = dataclasses.replace(reported.results, test_lists=rows or None)
    return dataclasses.replace(reported, results=results, others=evaluations)


def _with_groups(
    evaluation: Evaluation,
    source: AudioSource,
    parts: "ScoringParts",
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
        score = functools.partial(_scores, parts, trials)
        # All rows have the same draws of speakers, so that they differ only by the audio.
        swept = sweep(source, score, *scored, **draws)
    results = dataclasses.replace(
        evaluation.results,
        slices=all_slices(*scored, source, options, seed),
        shortcuts=shortcuts(trials, speakers, quantities_of(table, trials, levels_db), **draws),
        sweep=swept,
        warnings=warnings,
    )
    return dataclasses.replace(evaluation, results=results)


def _scores(parts: "ScoringParts", trials: TrialList, source: AudioSource) -> np.ndarray:
    """Scores of other audio than that of a store."""
    # Degraded audio has the names of the original, so a store would return the wrong embeddings.
    embedder = dataclasses.replace(parts.embedder, stores=())
    return score_trials(embedder, parts.backend, trials, source).scores


def scores_of_model(config: Config, inputs: Inputs, model_path: str | Path) -> np.ndarray:
    """Scores of the test list, (trials,), as `run_evaluation` computes them."""
    config = with_changes(config, evaluation={"keep_embeddings": False})
    parts = prepare_backend(config, inputs, Path(model_path), after_training=False)
    return _scores(parts, inputs.test.trials, inputs.test.source)


@dataclass(frozen=True)
class ScoringParts:
    """Everything that scoring needs besides the trials and their audio."""

    path: Path
    model: ModelFile
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
        return {**self.model.contents, **self.measured}


def prepare_backend(
    config: Config, inputs: Inputs, path: Path, *, after_training: bool
) -> ScoringParts:
    """Scoring without calibration: the embedder, and a back end with mean and cohort."""
    section = config.evaluation
    model = load_for_scoring(config, path)
    embedder = _embedder_of(model, config, inputs, after_training=after_training)
    backend = verifying_backend(model.contents)
    measured: dict[str, Any] = {}
    warnings: list[str] = []
    known_speakers = {}
    if after_training:
        known_speakers["training list"] = _plain_names(inputs.training.rows.speakers)
    # Scoring never writes to the model file, and PLDA belongs to it.
    if section.plda and not backend.adaptation:
        warnings.append(
            "evaluation.plda is on, but the model file has no PLDA; evaluation does not fit one"
        )
    mean = None
    # An adaptation subtracts its own mean.
    if section.subtract_mean and not model.contents.get("adaptation"):
        measured = _mean_entries(model.contents, embedder, config, inputs)
        mean = np.asarray({**model.contents, **measured}["embedding_mean"], dtype=np.float32)
    backend = dataclasses.replace(
        backend,
        options=section,
        is_normalised=bool(model.contents["loss_normalizes"]),
        mean=mean,
        device=embedder.forward.device,
    )
    if section.score_norm != "none":
        cohort, name, known_speakers["cohort"] = _embed_cohort(embedder, mean, config, inputs)
        backend = dataclasses.replace(backend, cohort=cohort, cohort_name=name)
    return ScoringParts(
        path, model, embedder, backend, known_speakers, measured=measured, warnings=warnings
    )


def _embedder_of(
    model: ModelFile, config: Config, inputs: Inputs, *, after_training: bool
) -> Embedder:
    """The embedder of a model file, with the folders in which its embeddings are kept."""
    net = model.net.to(inputs.device)
    embedder = build_embedder(config, net, inputs.device, config.evaluation.precision)
    # In 16 bits, folding would round the weights a second time.
    if embedder.precision == "no":
        embedder = dataclasses.replace(embedder, net=folded(net))
    if not config.evaluation.keep_embeddings:
        return embedder
    run = Path(config.training.save_path)
    folder = run if after_training else evaluation_folder(run, config.data.test_list)
    # Shared lists, such as the cohort, reuse embeddings of the run and of its other evaluations.
    shared = (run / EMBEDDINGS, *sorted((run / EVALUATIONS).glob(f"*/{EMBEDDINGS}")))
    digest = weights_digest(model.contents["weights"]) + str(net.spec())
    return dataclasses.replace(embedder, stores=(folder / EMBEDDINGS, *shared), model_digest=digest)


def _mean_entries(
    contents: Mapping[str, Any], embedder: Embedder, config: Config, inputs: Inputs
) -> dict[str, Any]:
    """The mean embedding of the training set as entries of a model file; empty if the file has
    the mean of this way of embedding.
    """
    mode = modes_of(embedder.options)[0]
    # Crops have a different mean than whole recordings, so a mean is used only for embeddings made
    # in the way that it was measured on.
    described = way_of(embedder.options.model_copy(update={"embedding": mode}))
    has_mean = contents.get("embedding_mean") is not None
    kept_of = contents.get("embedding_mean_of")
    if has_mean and kept_of == described:
        return {}
    if not inputs.has_training_list():
        present = "no mean embedding"
        if has_mean:
            present = f"the mean of {kept_of or 'an unknown kind of embedding'}"
        raise ValueError(
            f"subtract_mean: the model file has {present}, but scoring needs the mean of "
            f"{described}, and there is no training list to measure it on; set --train_list "
            "and --train_path, or evaluation.subtract_mean: false"
        )
    training = inputs.training
    # A few thousand utterances are enough for a mean. They are drawn at random, because lists are
    # often sorted by speaker.
    order = numpy_generator(config.runtime.seed, MEAN_STREAM).permutation(len(training.rows))
    rows = np.sort(order[: config.evaluation.mean_utterances])
    names = training.rows.paths.take(rows)
    embeddings, _ = embedder.embed(names, training.source, mode, "training_mean")
    mean = embeddings.mean(axis=(0, 1), dtype=np.float64).astype(np.float32)
    return {"embedding_mean": torch.from_numpy(mean), "embedding_mean_of": described}


def _embed_cohort(
    embedder: Embedder, mean: np.ndarray | None, config: Config, inputs: Inputs
) -> tuple[np.ndarray, str, frozenset[str]]:
    """The cohort with one member per speaker, its name, and its speakers."""
    members, source, left_out = cohort_of(config, inputs)
    generator = numpy_generator(config.runtime.seed, COHORT_STREAM)
    rows = some_of_each(members.labels, config.evaluation.cohort_utterances, generator)
    rows = rows[~np.isin(members.labels[rows], left_out)]
    mode = modes_of(embedder.options)[0]
    path = Path(members.source)
    name = f"{path.name} {members.sha256[:12]}"
    if len(left_out):
        num_left_out = counted(len(left_out), "speaker")
        name += f" without {num_left_out}"
        logger.info(
            "the cohort of %s leaves out %s, who choose the model or calibrate its scores",
            path.name,
            num_left_out,
        )
    embeddings, _ = embedder.embed(members.paths.take(rows), source, mode, f"cohort_{path.stem}")
    means = speaker_means(mean_embeddings(embeddings, mean), members.labels[rows])
    speakers = np.unique(members.labels[rows]).tolist()
    return means, name, _plain_names(members.speakers[speaker] for speaker in speakers)


def _plain_names(speakers: Iterable[str]) -> frozenset[str]:
    """Speakers without the name of their corpus, which prefixes them if there are several."""
    return frozenset(speaker.rpartition("/")[2] for speaker in speakers)


def _calibrated(
    parts: ScoringParts, config: Config, inputs: Inputs, *, after_training: bool
) -> ScoringParts:
    """Add the calibration for this scoring, fitted on a list if possible, otherwise from the model
    file.
    """
    # Three parties may calibrate a model file: its training, on the validation list; somebody with
    # `speakernet calibrate`, on their own recordings; and this evaluation, on
    # evaluation.calibration_list, for its figures alone. Only training writes here, and a fit on
    # another list than its own stays in the file: somebody may be deciding with it.
    section = config.evaluation
    embedder = parts.embedder
    described = parts.backend.describe(embedder.options)
    # Newest first: an older fit may use the score alone, the newer one quality measures too.
    fits_in_file = list(reversed((parts.contents.get("calibration") or {}).get("fits", [])))
    kept = next((fit for fit in fits_in_file if fit["backend"] == described), None)
    listed = _calibration_trials(config, inputs, after_training=after_training)
    keeps_others = False
    if listed and after_training:
        # A finished run that is started again must not replace what `speakernet calibrate` has
        # fitted since.
        sha256 = listed.trials.sha256
        others = [fit for fit in fits_in_file if fit.get("list_sha256") != sha256]
        keeps_others = bool(others)
        if keeps_others:
            names = ", ".join(sorted({str(fit.get("list") or "another list") for fit in others}))
            logger.warning(
                "%s keeps the calibration fitted on %s; `speakernet calibrate --trials %s` "
                "replaces it",
                parts.path,
                names,
                listed.trials.source,
            )
    if listed is None or (keeps_others and kept is not None):
        if kept is None:
            return parts
        return dataclasses.replace(
            parts,
            calibration=AffineCalibration.from_dict(kept),
            fitted_on=kept.get("list_sha256") or "",
        )
    trials = listed.trials
    source = listed.source
    if reason := why_no_error_rate(trials):
        # Checked before hours of embedding.
        raise ValueError(f"cannot calibrate: {reason}")
    scored = score_trials(embedder, parts.backend, trials, source)
    prior = section.calibration_prior
    measures = section.quality_measures
    heard = as_heard(source, embedder.options)
    fits = fits_of(scored, trials, heard, prior, described, measures)
    calibration = fits[-1].calibration
    for sentence in fits[0].refused:
        logger.info("%s: %s", trials.source, sentence)
    # `speakernet verify` scores the detected speech of whole utterances by cosine or PLDA, however
    # the list was scored. A threshold only holds for scores of its own kind, so the list is
    # embedded again for it.
    is_of_verify = described == verifying_backend(parts.contents).describe(VERIFYING)
    if after_training and not keeps_others and not is_of_verify:
        logger.info(
            "embedding %s again for decisions, which use detected speech alone", trials.source
        )
        without_cohort = [measure for measure in measures if measure != "cohort"]
        listed_audio = trials, source
        table = section.speaker_table
        of_verify, _ = fit_for_verifying(
            embedder, parts.contents, *listed_audio, prior, without_cohort, table
        )
        fits += of_verify
    measured = dict(parts.measured)
    for fit in fits:
        measured |= fit.changes({**parts.contents, **measured})
    of_list = frozenset(speakers_of(trials).names)
    return dataclasses.replace(
        parts,
        known_speakers={**parts.known_speakers, CALIBRATION_LIST: of_list},
        calibration=calibration,
        fitted_on=trials.sha256,
        measured=measured,
    )


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


def _with_training_lists(results: Results, config: Config, inputs: Inputs) -> Results:
    """Add the lists of the run, and how much speech the network was trained on."""
    training = inputs.training
    lists = list(results.lists or [])
    for role, rows in (("training", training.rows), ("validation", inputs.validation.trials)):
        lists.append({"role": role, "name": Path(rows.source).name, "sha256": rows.sha256})
    num_samples = float(np.maximum(training.table.num_samples, 0).sum())
    amounts = {
        "speakers": len(training.rows.speakers),
        "utterances": len(training.rows),
        "hours": round(num_samples / config.data.sample_rate / 3600, 2),
    }
    return dataclasses.replace(results, lists=lists, training=amounts)


def _with_provenance(
    results: Results,
    trials: TrialList,
    speakers: Speakers,
    config: Config,
    parts: ScoringParts,
) -> Results:
    """Add what is needed to reproduce the figures: model, checkpoint, versions, machine,
    configuration, command; and what to know before trusting them.
    """
    contents = parts.contents
    chosen_by = (contents.get("training_summary") or {}).get("chosen_by") or {}
    warnings = list(results.warnings or [])
    if caution := voices_caution(contents):
        warnings.append(caution)
    if trials.sha256 and chosen_by.get("list_sha256") == trials.sha256:
        warnings.append(CHOSEN_ON_REPORTED)
    warnings += parts.warnings
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
    net = parts.model.net
    thresholds = contents.get("thresholds") or []
    return dataclasses.replace(
        results,
        model=net.spec()["model"],
        num_parameters=sum(parameter.numel() for parameter in net.parameters()),
        front_end=net.spec()["front_end"],
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
        config=config.evaluation.model_dump(),
        command=" ".join(sys.argv),
        date=time.strftime("%Y-%m-%d %H:%M"),
        warnings=warnings,
    )


def cohort_of(config: Config, inputs: Inputs) -> tuple[TrainingList, AudioSource, np.ndarray]:
    """The list of the cohort, its audio, and the speakers who are left out, as rows of its table:
    those who choose the model or calibrate its scores.

    Otherwise their trials would be normalised against themselves, which lowers the scores of their
    targets, and the calibration would not fit anybody else's.

    Raises:
        ValueError: no list, or fewer than two speakers are left.
    """
    # Nobody in the cohort may choose the model, calibrate its scores or be in the trials. The first
    # two are removed here; the last cannot be seen from a trial list that names no speakers, and is
    # no more than a warning (`_with_provenance`).
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
    shared = [shared_speakers(cohort.rows, trials) for trials in used_by]
    left_out = np.unique(np.concatenate([np.empty(0, np.int64), *shared]))
    num_left = len(cohort.rows.speakers) - len(left_out)
    if len(left_out) and num_left < MIN_COHORT:
        lists = " and ".join(trials.source for trials in used_by)
        raise ValueError(
            f"score_norm {section.score_norm} needs a cohort of speakers who neither choose the "
            f"model nor calibrate its scores, but {counted(num_left, 'speaker')} of "
            f"{cohort.rows.source} are not in {lists}; give a cohort of others with --cohort_list, "
            "or trials of fewer speakers"
        )
    return cohort.rows, cohort.source, left_out


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
    config: Config, net: "EmbeddingNet", device: torch.device, wanted: str
) -> Embedder:
    """An embedder with the options of section evaluation, in the `wanted` precision (auto: the
    training precision).
    """
    name = choose_precision(config.runtime.precision if wanted == "auto" else wanted, device).value
    autocast = functools.partial(torch.autocast, device.type, DTYPES[name], enabled=name != "no")
    # The cores of this process are counted only here.
    options = config.evaluation.model_copy(
        update={"num_workers": reader_threads(config.evaluation)}
    )
    return Embedder(net, options, Forward(device, autocast), name)
