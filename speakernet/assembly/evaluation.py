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
from collections import ChainMap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

import speakernet
from speakernet.assembly.inputs import Inputs, TrialInput, chosen_by_validation
from speakernet.assembly.training import build_model
from speakernet.checkpoint import read_checkpoint
from speakernet.config import Config
from speakernet.config.schema import replaced
from speakernet.data.lists import TrainingList, TrialList
from speakernet.data.sources import AudioSource
from speakernet.evaluation.calibration import (
    FITTED_ON_REPORTED,
    AffineCalibration,
)
from speakernet.evaluation.embedding import (
    Embedder,
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
from speakernet.evaluation.figures import CHOSEN_ON_REPORTED, cautions, why_no_error_rate
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.results import Results
from speakernet.evaluation.scoring import (
    MIN_COHORT,
    VERIFYING,
    Backend,
    mean_embeddings,
    speaker_means,
    verifying_backend,
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
from speakernet.parallel import distributed
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
MEAN_STREAM = 6202
COHORT_STREAM = 6203
MAX_DRAWS = 200
"""Draws of speakers for the interval of each slice and sweep step, of which there are many."""

Sweep = Callable[..., Any]
"""`run_sweep` with its steps."""


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
    embedder = dataclasses.replace(embedder, is_stopped=is_stopped)
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
        used = embedder
        if len(prepared) > 1:
            audio = [(prepared[name].trials.names, prepared[name].source) for name in due]
            together = one_pass(audio, unions)
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
    options: EvaluationOptions
    seed: int


def _prepare_validation(
    config: Config, device: torch.device, trial_list: TrialInput
) -> _Validation:
    section = config.evaluation
    seed = config.runtime.seed
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
    return _Validation(backend, trials, trial_list.source, speakers, options, seed)


def run_evaluation(
    config: Config, inputs: Inputs, model_path: str | Path, *, after_training: bool = False
) -> Evaluation:
    """Score the test lists with a model file; training data is needed only for what the file
    lacks.
    """
    # What a list is scored with comes from the model file first: it is the same for whoever uses the
    # model, and it is what the thresholds in it belong to. Only what the file lacks is measured on
    # the lists of the configuration (the mean embedding, the cohort, a calibration), and only the
    # evaluation that ends a training writes what it has measured back into the file. Scoring alone
    # must leave every file as it was, because somebody else may be using it.
    #
    # Several test lists often share recordings (VoxCeleb1-O, -E and -H do), so each recording is
    # embedded once for all of them. The first list, without a name, is the reported one: the model
    # is calibrated with its back end, and only it is sliced by metadata and swept.
    section = config.evaluation
    path = Path(model_path)
    if section.metadata:
        # Unreadable metadata and an unknown sweep are refused before anything slow starts.
        read_metadata(section.metadata, list(inputs.test.trials.names))
    sweep = None
    if section.sweep or section.plda:
        # Late: few recipes use either.
        from speakernet.assembly.disturbed import build_sweep, fit_plda

        sweep = build_sweep(config) if section.sweep else None
        if section.plda and after_training:
            fit_plda(config, inputs, load_for_scoring(config, path), path)
    scoring = _Scoring(config, inputs, path, after_training=after_training)
    lists = {"": inputs.test}
    if config.data.test_lists:
        lists |= inputs.beside(inputs.test)
    if len(lists) > 1:
        scoring.embed_together(lists.values())
    evaluations = {}
    for name, trial_list in lists.items():
        evaluation = scoring.evaluate(name, trial_list, None if name else sweep)
        for warning in evaluation.results.warnings or []:
            # The command's last line says this too: it is how the demo is meant to end.
            level = logging.INFO if warning == SYNTHETIC_ONLY else logging.WARNING
            logger.log(level, "%s%s", f"{name}: " if name else "", warning)
        evaluations[name] = evaluation
    reported = evaluations.pop("")
    rows = {name: evaluation.results.as_row(name) for name, evaluation in evaluations.items()}
    results = dataclasses.replace(reported.results, test_lists=rows or None)
    return dataclasses.replace(reported, results=results, others=evaluations)


def _scores(
    embedder: Embedder, backend: Backend, trials: TrialList, source: AudioSource
) -> np.ndarray:
    return score_trials(embedder, backend, trials, source).scores


def scores_of_model(config: Config, inputs: Inputs, model_path: str | Path) -> np.ndarray:
    """Scores of the test list, (trials,), as `run_evaluation` computes them."""
    config = replaced(config, evaluation={"keep_embeddings": False})
    scoring = _Scoring(config, inputs, Path(model_path), after_training=False)
    trials = inputs.test.trials
    return _scores(scoring.embedder, scoring.backend(trials), trials, inputs.test.source)


class _Scoring:
    """A model file with everything that scoring a list needs; `measured` adds to or replaces its
    contents.
    """

    def __init__(self, config: Config, inputs: Inputs, path: Path, *, after_training: bool) -> None:
        self.config = config
        self.inputs = inputs
        self.path = path
        self.after_training = after_training
        self.model: ModelFile = load_for_scoring(config, path)
        self.measured: dict[str, Any] = {}
        self.contents = ChainMap(self.measured, self.model.contents)
        self.warnings: list[str] = []
        """Warnings about the list being scored."""
        self.fitted_on = ""
        """SHA-256 of the list that the calibration was fitted on."""
        self._calibration: AffineCalibration | None = None
        net = self.model.net.to(inputs.device)
        embedder = build_embedder(config, net, inputs.device, config.evaluation.precision)
        # In 16 bits, folding would round the weights a second time.
        if embedder.precision == "no":
            embedder = dataclasses.replace(embedder, net=folded(net))
        if config.evaluation.keep_embeddings:
            run = Path(config.training.save_path)
            folder = run if after_training else evaluation_folder(run, config.data.test_list)
            # Shared lists, such as the cohort, reuse embeddings of the run and of its other
            # evaluations.
            kept = (run / EMBEDDINGS, *sorted((run / EVALUATIONS).glob(f"*/{EMBEDDINGS}")))
            digest = weights_digest(self.contents["weights"]) + str(net.spec())
            embedder = dataclasses.replace(
                embedder, stores=(folder / EMBEDDINGS, *kept), model_digest=digest
            )
        self.embedder = embedder
        self._test_embedder = embedder

    def embed_together(self, lists: Iterable[TrialInput]) -> None:
        """Embed every utterance of several test lists once."""
        audio = [(trial_list.trials.names, trial_list.source) for trial_list in lists]
        self._test_embedder = dataclasses.replace(self.embedder, embed_with=one_pass(audio, {}))

    def evaluate(self, name: str, trial_list: TrialInput, sweep: Sweep | None) -> Evaluation:
        """Score and measure a test list; the one without a name is the reported one, with which
        everything is fitted.
        """
        section = self.config.evaluation
        seed = self.config.runtime.seed
        trials, source = trial_list
        embedder = self._test_embedder
        if name and embedder.stores:
            folder = evaluation_folder(Path(self.config.training.save_path), name) / EMBEDDINGS
            embedder = dataclasses.replace(embedder, stores=(folder, *embedder.stores))
        self.warnings = []
        speakers = speakers_of(trials, section.speaker_table)
        backend = self.backend(trials)
        if not name:
            self._calibration = self.calibration(backend)
        evaluation = evaluate(
            embedder, backend, trials, source, speakers, section, seed, self._calibration
        )
        further: dict[str, Any] = {}
        if not evaluation.results.why_no_eer:
            # Every rank takes part, because the ranks share the embedding.
            scored = (trials, evaluation.scores, speakers)
            draws = min(MAX_DRAWS, section.bootstrap_samples)
            # The metadata describe the reported list only.
            sliced_by = section.model_copy(update={"metadata": "", "slices": []} if name else {})
            further["slices"] = all_slices(
                *scored,
                source,
                sliced_by,
                num_threads=reader_threads(section),
                num_draws=draws,
                seed=seed,
            )
            # Each step embeds the list again, so only the reported list is swept.
            if sweep:
                score = functools.partial(
                    _scores, dataclasses.replace(self.embedder, stores=()), backend, trials
                )
                further["sweep"] = sweep(source, score, *scored, num_draws=draws, seed=seed)
        if self.after_training:
            if self.measured and not name and distributed.is_main():
                update_model_file(self.path, self.measured, backs_up=False)
                logger.info("wrote to %s: %s", self.path, ", ".join(self.measured))
            further |= self._facts_of_training(evaluation.results)
        results = dataclasses.replace(evaluation.results, **further)
        return dataclasses.replace(evaluation, results=self.with_facts(results, trials))

    def _facts_of_training(self, results: Results) -> dict[str, Any]:
        rows = self.inputs.training.rows
        validation = self.inputs.validation.trials
        lists = list(results.lists or [])
        for role, name, sha256 in (
            ("training", rows.source, rows.sha256),
            ("validation", validation.source, validation.sha256),
        ):
            lists.append({"role": role, "name": Path(name).name, "sha256": sha256})
        samples = np.maximum(self.inputs.training.table.num_samples, 0).sum()
        training = {
            "speakers": len(rows.speakers),
            "utterances": len(rows),
            "hours": round(float(samples) / self.config.data.sample_rate / 3600, 2),
        }
        return {"lists": lists, "training": training}

    def backend(self, trials: TrialList) -> Backend:
        """The scoring back end, with mean and cohort according to the options."""
        section = self.config.evaluation
        adapted = verifying_backend(self.contents)
        if section.plda and not adapted.adaptation:
            self.warnings.append(
                "evaluation.plda is on, but the model file has no PLDA; evaluation does not fit one"
            )
        is_normalised = bool(self.contents["loss_normalizes"])
        backend = dataclasses.replace(
            adapted,
            options=section,
            is_normalised=is_normalised,
            mean=self._mean,
            device=self.embedder.device,
        )
        if section.score_norm == "none":
            return backend
        cohort, name, speakers = self._cohort
        if section.score_norm == "as" and len(cohort) <= section.cohort_size:
            self.warnings.append(
                f"the cohort has {len(cohort)} speakers and evaluation.cohort_size is "
                f"{section.cohort_size}, so all of them are used, which is s-norm; a smaller "
                "cohort_size makes it adaptive"
            )
        # Any folder of a path may name the speaker, because lists differ in depth.
        folders = set()
        for name in trials.names:
            folders.update(name.replace("\\", "/").split("/")[:-1])
        if shared := sorted(folders & set(speakers)):
            self.warnings.append(
                f"{len(shared)} speakers of the cohort may also be in the trials "
                f"({', '.join(shared[:MAX_NAMED])}); if so, the scores are optimistic"
            )
        return dataclasses.replace(backend, cohort=cohort, cohort_name=name)

    @functools.cached_property
    def _mean(self) -> np.ndarray | None:
        """The mean embedding of the training set, measured unless the model file has one for this
        way of embedding.

        None if it is not subtracted; an adaptation has its own mean.
        """
        if not self.config.evaluation.subtract_mean or self.contents.get("adaptation"):
            return None
        config = self.config
        mode = modes_of(self.embedder.options)[0]
        described = way_of(self.embedder.options.model_copy(update={"embedding": mode}))
        kept = self.contents.get("embedding_mean")
        kept_of = self.contents.get("embedding_mean_of")
        if kept is not None and kept_of == described:
            return np.asarray(kept, dtype=np.float32)
        if not self.inputs.has_training_list():
            found = "no mean embedding"
            if kept is not None:
                found = f"the mean of {kept_of or 'an unknown kind of embedding'}"
            raise ValueError(
                f"subtract_mean: the model file has {found}, but scoring needs the mean of "
                f"{described}, and there is no training list to measure it on; set --train_list "
                "and --train_path, or evaluation.subtract_mean: false"
            )
        training = self.inputs.training.rows
        source = self.inputs.training.source
        generator = numpy_generator(config.runtime.seed, MEAN_STREAM)
        rows = np.sort(generator.permutation(len(training))[: config.evaluation.mean_utterances])
        embeddings, _ = self.embedder.embed(
            training.paths.take(rows), source, mode, "training_mean"
        )
        mean = embeddings.mean(axis=(0, 1), dtype=np.float64).astype(np.float32)
        self.measured |= {"embedding_mean": torch.from_numpy(mean), "embedding_mean_of": described}
        return mean

    @functools.cached_property
    def _cohort(self) -> tuple[np.ndarray, str, list[str]]:
        """The cohort with one member per speaker, its name, and its speakers."""
        members, source, left_out = cohort_of(self.config, self.inputs)
        generator = numpy_generator(self.config.runtime.seed, COHORT_STREAM)
        rows = some_of_each(members.labels, self.config.evaluation.cohort_utterances, generator)
        rows = rows[~np.isin(members.labels[rows], left_out)]
        mode = modes_of(self.embedder.options)[0]
        listed = Path(members.source)
        name = f"{listed.name} {members.sha256[:12]}"
        if len(left_out):
            speakers = counted(len(left_out), "speaker")
            name += f" without {speakers}"
            logger.info(
                "the cohort of %s leaves out %s, who choose the model or calibrate its scores",
                listed.name,
                speakers,
            )
        embeddings, _ = self.embedder.embed(
            members.paths.take(rows), source, mode, f"cohort_{listed.stem}"
        )
        means = speaker_means(mean_embeddings(embeddings, self._mean), members.labels[rows])
        labels = np.unique(members.labels[rows]).tolist()
        return means, name, [members.speakers[label] for label in labels]

    def calibration(self, backend: Backend) -> AffineCalibration | None:
        """The calibration for this scoring, fitted on a list if possible, otherwise from the model
        file.
        """
        described = backend.describe(self.embedder.options)
        # Newest first: an older fit may use the score alone, the newer one quality measures too.
        fits_in_file = list(reversed((self.contents.get("calibration") or {}).get("fits", [])))
        kept = next((fit for fit in fits_in_file if fit["backend"] == described), None)
        fitting_list = self._fitting_list()
        foreign: set[str] = set()
        if fitting_list and self.after_training:
            # A finished run that is started again must not replace what `speakernet calibrate` has
            # fitted since.
            for fit in fits_in_file:
                if fit.get("list_sha256") != fitting_list.trials.sha256:
                    foreign.add(str(fit.get("list") or "another list"))
        if fitting_list and foreign:
            logger.warning(
                "%s keeps the calibration fitted on %s; `speakernet calibrate --trials %s` replaces "
                "it",
                self.path,
                ", ".join(sorted(foreign)),
                fitting_list.trials.source,
            )
            if kept is not None:
                fitting_list = None
        if fitting_list is None:
            if kept is None:
                return None
            self.fitted_on = kept.get("list_sha256") or ""
            return AffineCalibration.from_dict(kept)
        return self._fit(fitting_list, backend, for_decisions=self.after_training and not foreign)

    def _fitting_list(self) -> TrialInput | None:
        """The list on which to fit a calibration; None to use that of the model file."""
        section = self.config.evaluation
        data = self.config.data
        if section.calibration_list:
            folder = section.calibration_path or data.test_path
            return self.inputs.trial_input(section.calibration_list, folder)
        if not self.after_training:
            return None
        # Trials that are reported must not select thresholds, just as they must not select the
        # model.
        if chosen_by_validation(self.config) or data.validation_list != data.test_list:
            return self.inputs.validation
        logger.info(
            "no calibration, because all trials are reported; set evaluation.calibration_list"
        )
        return None

    def _fit(
        self, fitting_list: TrialInput, backend: Backend, *, for_decisions: bool
    ) -> AffineCalibration:
        section = self.config.evaluation
        embedder = self.embedder
        trials, source = fitting_list
        if reason := why_no_error_rate(trials):
            # Checked before hours of embedding.
            raise ValueError(f"cannot calibrate: {reason}")
        scored = score_trials(embedder, backend, trials, source)
        prior = section.calibration_prior
        measures = section.quality_measures
        described = backend.describe(embedder.options)
        fits = fits_of(
            scored, trials, as_heard(source, embedder.options), prior, described, measures
        )
        calibration = fits[-1].calibration
        self.fitted_on = trials.sha256
        for sentence in fits[0].refused:
            logger.info("%s: %s", trials.source, sentence)
        # `speakernet verify` scores the detected speech of whole utterances by cosine or PLDA,
        # however the list was scored. A threshold only holds for scores of its own kind, so the
        # list is embedded again for it.
        if for_decisions and described != verifying_backend(self.contents).describe(VERIFYING):
            logger.info(
                "embedding %s again for decisions, which use detected speech alone", trials.source
            )
            usable = [measure for measure in measures if measure != "cohort"]
            fits += fit_for_verifying(embedder, self.contents, trials, source, prior, usable)[0]
        for fit in fits:
            self.measured |= fit.changes(self.contents)
        return calibration

    def with_facts(self, results: Results, trials: TrialList) -> Results:
        """Add what is needed to reproduce the figures: model, checkpoint, versions, machine,
        configuration, command.
        """
        chosen_by = (self.contents.get("training_summary") or {}).get("chosen_by") or {}
        sha256 = trials.sha256
        net = self.model.net
        spec = net.spec()
        thresholds = self.contents.get("thresholds") or []
        warnings = list(results.warnings or [])
        if voices := voices_caution(self.contents):
            warnings.append(voices)
        if sha256 and chosen_by.get("list_sha256") == sha256:
            warnings.append(CHOSEN_ON_REPORTED)
        warnings += self.warnings
        if sha256 and self.fitted_on == sha256:
            warnings.append(FITTED_ON_REPORTED)
        warnings += cautions(results)
        return dataclasses.replace(
            results,
            model=spec["model"],
            num_parameters=sum(parameter.numel() for parameter in net.parameters()),
            front_end=spec["front_end"],
            checkpoint={
                "path": str(self.path),
                "sha256": distributed.from_main(lambda: sha256_of(self.path)),
            },
            thresholds=[fit for fit in thresholds if fit["backend"] == results.backend],
            versions={
                "speakernet": speakernet.__version__,
                "torch": torch.__version__,
                "numpy": np.__version__,
            },
            machine=system_info(),
            config=self.config.evaluation.model_dump(),
            command=" ".join(sys.argv),
            date=time.strftime("%Y-%m-%d %H:%M"),
            warnings=warnings,
        )


class Cohort(NamedTuple):
    """The list that scores are normalised against."""

    rows: TrainingList
    source: AudioSource
    left_out: np.ndarray
    """Speakers, as rows of the list's table, who are not members."""


def cohort_of(config: Config, inputs: Inputs) -> Cohort:
    """The list of the cohort, without the speakers who choose the model or calibrate its scores.

    Otherwise their trials would be normalised against themselves, which lowers the scores of their
    targets, and the calibration would not fit anybody else's.

    Raises:
        ValueError: no list, or fewer than two speakers are left.
    """
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
    return Cohort(cohort.rows, cohort.source, left_out)


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
    config: Config, net: "EmbeddingNet", device: torch.device, precision: str
) -> Embedder:
    """An embedder with the options of section evaluation; precision auto is that of training."""
    if precision == "auto":
        precision = config.runtime.precision
    name = choose_precision(precision, device).value
    autocast = functools.partial(torch.autocast, device.type, DTYPES[name], enabled=name != "no")
    # The cores of this process are counted only here.
    options = config.evaluation.model_copy(
        update={"num_workers": reader_threads(config.evaluation)}
    )
    return Embedder(net, options, device, autocast, name)
