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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import speakernet
from speakernet.assembly.inputs import Inputs, TrainingInput, TrialInput, chosen_by_validation
from speakernet.assembly.training import build_model
from speakernet.checkpoint import read_checkpoint
from speakernet.config import Config
from speakernet.config.schema import replaced
from speakernet.data.lists import NameIndex, TrainingList, TrialList
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
)
from speakernet.evaluation.figures import CHOSEN_ON_REPORTED, cautions, why_no_error_rate
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
from speakernet.evaluation.speakers import speakers_of
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
SUBSET_STREAM = 6201
MEAN_STREAM = 6202
COHORT_STREAM = 6203
MAX_DRAWS = 200
"""Draws of speakers for the interval of each slice and sweep step, of which there are many."""


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
    intervals = {name: one.test_interval for name, one in config.data.test_lists.items()}
    others = inputs.beside(inputs.validation) if intervals else {}
    embedder = build_embedder(config, net, inputs.device, section.validation_precision)
    embedder = dataclasses.replace(embedder, is_stopped=is_stopped)
    # Mean and cohort change with the network, so validation uses plain scores. Its intervals are
    # rough, because many draws take longer than all other figures.
    affordable = min(VALIDATION_DRAWS, section.bootstrap_samples)
    given: dict[str, Any] = {}
    for name, one in {"": inputs.validation, **others}.items():
        trials = subset(one.trials, section.max_trials, config.runtime.seed)
        if trials.labels is not None and len(np.unique(trials.labels)) < 2:
            raise ValueError(
                f"{trials.source}: the {len(trials):,} trials evaluated during training are all of "
                "one kind; expected targets and non-targets, so raise evaluation.max_trials (0: "
                "all) or correct the list"
            )
        num_draws = affordable if affordable * len(trials) <= VALIDATION_WORK else 0
        options = section.model_copy(update={"score_norm": "none", "bootstrap_samples": num_draws})
        backend = Backend(options, config.loss.normalize_embeddings, device=inputs.device)
        speakers = speakers_of(trials, section.speaker_table)
        given[name] = backend, trials, one.source, speakers, options, config.runtime.seed
    if final := [one for one in ("subtract_mean", "plda") if getattr(section, one)] + [
        "score_norm"
    ] * (section.score_norm != "none"):
        logger.info(
            "validation uses plain scores; only the final figures use evaluation.%s",
            ", evaluation.".join(final),
        )
    checksum = given[""][1].checksum
    unions = Unions()

    def validate(epoch: int) -> dict[str, Any]:
        # If a list's epoch falls between two validations, the list is due at the second.
        before = epoch - config.training.test_interval
        steps = {name: intervals[name] or 1 for name in others}
        due = {
            "": given[""],
            **{name: given[name] for name, step in steps.items() if epoch // step > before // step},
        }
        used = embedder
        if others:
            lists = [(one[1].names, one[2]) for one in due.values()]
            used = dataclasses.replace(embedder, embed_with=one_pass(lists, unions))
        found = {name: evaluate(used, *one).results for name, one in due.items()}
        # No plot uses the DET band of a validation, which would make each record ten times as long.
        results = dataclasses.replace(found.pop(""), det_band=None)
        rows = {name: one.as_row(name) for name, one in found.items()}
        return {
            **dataclasses.replace(results, test_lists=rows or None).to_dict(),
            "trials_checksum": checksum,
        }

    return validate


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
        read_metadata(section.metadata, list(inputs.test.trials.names))
    sweep = None
    if section.sweep or section.plda:
        # Late: few recipes use either.
        from speakernet.assembly.disturbed import build_sweep, fit_plda

        sweep = build_sweep(config) if section.sweep else None
        if section.plda and after_training:
            fit_plda(config, inputs, load_for_scoring(config, model_path), Path(model_path))
    scoring = _Scoring(config, inputs, Path(model_path), after_training=after_training)
    lists = {"": inputs.test, **(inputs.beside(inputs.test) if config.data.test_lists else {})}
    together = scoring.embedder
    if len(lists) > 1:
        shared = one_pass([(one.trials.names, one.source) for one in lists.values()], {})
        together = dataclasses.replace(together, embed_with=shared)
    calibration = None
    evaluations = {}
    for name, one in lists.items():
        trials = one.trials
        source = one.source
        embedder = together
        if name and embedder.stores:
            own = evaluation_folder(Path(config.training.save_path), name) / EMBEDDINGS
            embedder = dataclasses.replace(embedder, stores=(own, *embedder.stores))
        scoring.warnings = []
        speakers = speakers_of(trials, section.speaker_table)
        backend = scoring.backend(trials)
        calibration = calibration if name else scoring.calibration(backend)
        evaluation = evaluate(
            embedder, backend, trials, source, speakers, section, seed, calibration
        )
        found: dict[str, Any] = {}
        if not evaluation.results.why_no_eer:
            # Every rank takes part, because the ranks share the embedding.
            given = (trials, evaluation.scores, speakers)
            draws = min(MAX_DRAWS, section.bootstrap_samples)
            # The metadata describe the reported list only.
            sliced_by = (
                section.model_copy(update={"metadata": "", "slices": []}) if name else section
            )
            found["slices"] = all_slices(
                *given,
                source,
                sliced_by,
                num_threads=reader_threads(section),
                num_draws=draws,
                seed=seed,
            )
            # Each step embeds the list again, so only the reported list is swept.
            if sweep and not name:
                score = functools.partial(
                    _scores, dataclasses.replace(scoring.embedder, stores=()), backend, trials
                )
                found["sweep"] = sweep(source, score, *given, num_draws=draws, seed=seed)
        if after_training:
            if scoring.measured and not name and distributed.is_main():
                update_model_file(model_path, scoring.measured, backs_up=False)
                logger.info("wrote to %s: %s", model_path, ", ".join(scoring.measured))
            training = inputs.training.rows
            table = inputs.training.table
            hours = float(np.maximum(table.num_samples, 0).sum()) / config.data.sample_rate / 3600
            named = (("training", training), ("validation", inputs.validation.trials))
            read = [
                {"role": role, "name": Path(rows.source).name, "sha256": rows.sha256}
                for role, rows in named
            ]
            found["lists"] = [*(evaluation.results.lists or []), *read]
            found["training"] = {
                "speakers": len(training.speakers),
                "utterances": len(training),
                "hours": round(hours, 2),
            }
        results = scoring.with_facts(dataclasses.replace(evaluation.results, **found), trials)
        for warning in results.warnings or []:
            # The command's last line says this too: it is how the demo is meant to end.
            level = logging.INFO if warning == SYNTHETIC_ONLY else logging.WARNING
            logger.log(level, "%s%s", f"{name}: " if name else "", warning)
        evaluations[name] = dataclasses.replace(evaluation, results=results)
    reported = evaluations.pop("")
    rows = {name: one.results.as_row(name) for name, one in evaluations.items()}
    return dataclasses.replace(
        reported,
        results=dataclasses.replace(reported.results, test_lists=rows or None),
        others=evaluations,
    )


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


def subset(trials: TrialList, max_trials: int, seed: int) -> TrialList:
    """A fixed random subset of a list with about the same share of targets, in list order; 0 keeps
    every trial.
    """
    if max_trials == 0 or max_trials >= len(trials) or trials.labels is None:
        return trials
    random = numpy_generator(seed, SUBSET_STREAM)
    targets = np.flatnonzero(trials.labels == 1)
    others = np.flatnonzero(trials.labels == 0)
    # Without a target there is no error rate to choose by.
    num_targets = min(len(targets), max(1, round(max_trials * len(targets) / len(trials))))
    chosen = [
        random.permutation(targets)[:num_targets],
        random.permutation(others)[: max_trials - num_targets],
    ]
    rows = np.sort(np.concatenate(chosen))
    enrol = trials.enrol[rows]
    test = trials.test[rows]
    used, numbers = np.unique(np.concatenate([enrol, test]), return_inverse=True)
    logger.info("%s: a fixed subset of %d of %d trials", trials.source, len(rows), len(trials))
    first = numbers[: len(rows)].astype(np.int32)
    second = numbers[len(rows) :].astype(np.int32)
    return TrialList(
        trials.names.take(used), first, second, trials.labels[rows], trials.source, trials.sha256
    )


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
        embedder = build_embedder(
            config, self.model.net.to(inputs.device), inputs.device, config.evaluation.precision
        )
        # In 16 bits, folding would round the weights a second time.
        embedder = (
            dataclasses.replace(embedder, net=folded(self.model.net))
            if embedder.precision == "no"
            else embedder
        )
        if config.evaluation.keep_embeddings:
            run = Path(config.training.save_path)
            folder = run if after_training else evaluation_folder(run, config.data.test_list)
            # Shared lists, such as the cohort, reuse embeddings of the run and of its other
            # evaluations.
            others = (run / EMBEDDINGS, *sorted((run / EVALUATIONS).glob(f"*/{EMBEDDINGS}")))
            digest = weights_digest(self.contents["weights"]) + str(self.model.net.spec())
            embedder = dataclasses.replace(
                embedder, stores=(folder / EMBEDDINGS, *others), model_digest=digest
            )
        self.embedder = embedder

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
        folders = {part for one in trials.names for part in one.replace("\\", "/").split("/")[:-1]}
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
        lists = [one.train_list for one in config.data.corpora.values()] or [config.data.train_list]
        if not all(one and Path(one).exists() for one in lists):
            found = (
                "no mean embedding"
                if kept is None
                else f"the mean of {kept_of or 'an unknown kind of embedding'}"
            )
            raise ValueError(
                f"subtract_mean: the model file has {found}, but scoring needs the mean of "
                f"{described}, and there is no training list to measure it on; set --train_list "
                "and --train_path, or evaluation.subtract_mean: false"
            )
        training = self.inputs.training.rows
        source = self.inputs.training.source
        random = numpy_generator(config.runtime.seed, MEAN_STREAM)
        rows = np.sort(random.permutation(len(training))[: config.evaluation.mean_utterances])
        embeddings, _ = self.embedder.embed(
            training.paths.take(rows), source, mode, "training_mean"
        )
        mean = embeddings.mean(axis=(0, 1), dtype=np.float64).astype(np.float32)
        self.measured |= {"embedding_mean": torch.from_numpy(mean), "embedding_mean_of": described}
        return mean

    @functools.cached_property
    def _cohort(self) -> tuple[np.ndarray, str, list[str]]:
        """The cohort with one member per speaker, its name, and its speakers."""
        given, left_out = cohort_of(self.config, self.inputs)
        members = given.rows
        num_each = self.config.evaluation.cohort_utterances
        rows = np.arange(len(members))
        if num_each:
            order = numpy_generator(self.config.runtime.seed, COHORT_STREAM).permutation(
                len(members)
            )
            # A stable sort keeps the random order within a speaker, so the first rows are a random
            # sample.
            order = order[np.argsort(members.labels[order], kind="stable")]
            first = np.searchsorted(members.labels[order], members.labels[order])
            rows = np.sort(order[np.arange(len(order)) - first < num_each])
        rows = rows[~np.isin(members.labels[rows], left_out)]
        mode = modes_of(self.embedder.options)[0]
        listed = Path(members.source)
        name = f"{listed.name} {members.sha256[:12]}"
        if len(left_out):
            name += f" without {counted(len(left_out), 'speaker')}"
            logger.info(
                "the cohort of %s leaves out %s, who choose the model or calibrate its scores",
                listed.name,
                counted(len(left_out), "speaker"),
            )
        embeddings, _ = self.embedder.embed(
            members.paths.take(rows), given.source, mode, f"cohort_{listed.stem}"
        )
        means = speaker_means(mean_embeddings(embeddings, self._mean), members.labels[rows])
        speakers = np.unique(members.labels[rows]).tolist()
        return means, name, [members.speakers[speaker] for speaker in speakers]

    def calibration(self, backend: Backend) -> AffineCalibration | None:
        """The calibration for this scoring, fitted on a list if possible, otherwise from the model
        file.
        """
        section = self.config.evaluation
        data = self.config.data
        embedder = self.embedder
        described = backend.describe(embedder.options)
        # Trials that are reported must not select thresholds, just as they must not select the
        # model.
        validates = chosen_by_validation(self.config) or data.validation_list != data.test_list
        # Newest first: an older fit may use the score alone, the newer one quality measures too.
        fits_in_file = list(reversed((self.contents.get("calibration") or {}).get("fits", [])))
        kept = next((one for one in fits_in_file if one["backend"] == described), None)
        given: TrialInput | None = None
        if section.calibration_list:
            given = self.inputs.trial_input(
                section.calibration_list, section.calibration_path or data.test_path
            )
        elif self.after_training and validates:
            given = self.inputs.validation
        others: set[str] = set()
        if given and self.after_training:
            # A finished run that is started again must not replace what `speakernet calibrate` has
            # fitted since.
            foreign = [one for one in fits_in_file if one.get("list_sha256") != given.trials.sha256]
            others = {str(one.get("list") or "another list") for one in foreign}
        elif self.after_training:
            logger.info(
                "no calibration, because all trials are reported; set evaluation.calibration_list"
            )
        if given and others:
            replacing = f"`speakernet calibrate --trials {given.trials.source}` replaces it"
            logger.warning(
                "%s keeps the calibration fitted on %s; %s",
                self.path,
                ", ".join(sorted(others)),
                replacing,
            )
            given = given if kept is None else None
        if given is None:
            self.fitted_on = (kept or {}).get("list_sha256") or ""
            return AffineCalibration.from_dict(kept) if kept else None
        trials = given.trials
        source = given.source
        if reason := why_no_error_rate(trials):
            # Checked before hours of embedding.
            raise ValueError(f"cannot calibrate: {reason}")
        scored = score_trials(embedder, backend, trials, source)
        prior = section.calibration_prior
        measures = section.quality_measures
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
        if (
            self.after_training
            and not others
            and described != verifying_backend(self.contents).describe(VERIFYING)
        ):
            logger.info(
                "embedding %s again for decisions, which use detected speech alone", trials.source
            )
            own = [one for one in measures if one != "cohort"]
            fits += fit_for_verifying(embedder, self.contents, trials, source, prior, own)[0]
        for fit in fits:
            self.measured |= fit.changes(self.contents)
        return calibration

    def with_facts(self, results: Results, trials: TrialList) -> Results:
        """Add what is needed to reproduce the figures: model, checkpoint, versions, machine,
        configuration, command.
        """
        chosen_by = (self.contents.get("training_summary") or {}).get("chosen_by") or {}
        sha256 = trials.sha256
        chosen = [CHOSEN_ON_REPORTED] if sha256 and chosen_by.get("list_sha256") == sha256 else []
        fitted = [FITTED_ON_REPORTED] if sha256 and self.fitted_on == sha256 else []
        voices = list(filter(None, [voices_caution(self.contents)]))
        net = self.model.net
        thresholds = self.contents.get("thresholds") or []
        return dataclasses.replace(
            results,
            model=net.spec()["model"],
            num_parameters=sum(parameter.numel() for parameter in net.parameters()),
            front_end=net.spec()["front_end"],
            checkpoint={
                "path": str(self.path),
                "sha256": distributed.from_main(lambda: sha256_of(self.path)),
            },
            thresholds=[one for one in thresholds if one["backend"] == results.backend],
            versions={
                "speakernet": speakernet.__version__,
                "torch": torch.__version__,
                "numpy": np.__version__,
            },
            machine=system_info(),
            config=self.config.evaluation.model_dump(),
            command=" ".join(sys.argv),
            date=time.strftime("%Y-%m-%d %H:%M"),
            warnings=[
                *(results.warnings or []),
                *voices,
                *chosen,
                *self.warnings,
                *fitted,
                *cautions(results),
            ],
        )


def cohort_of(config: Config, inputs: Inputs) -> tuple[TrainingInput, np.ndarray]:
    """The list of the cohort, and its speakers (rows of its table) who are not members.

    Speakers who choose the model or calibrate its scores are left out. Otherwise their trials would
    be normalised against themselves, which lowers the scores of their targets, and the calibration
    would not fit anybody else's.

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
    given = inputs.training_input(path, root) if path else inputs.listed
    used_by = []
    if section.calibration_list:
        used_by.append(inputs.trials(section.calibration_list))
    # When a model file is scored, the lists of its training need not be there.
    has_training_list = data.corpora or (data.train_list and Path(data.train_list).exists())
    if data.validation_speakers and has_training_list:
        used_by.append(inputs.validation.trials)
    elif data.validation_list != data.test_list and Path(data.validation_list).is_file():
        used_by.append(inputs.trials(data.validation_list))
    shared = [shared_speakers(given.rows, trials) for trials in used_by]
    left_out = np.unique(np.concatenate([np.empty(0, np.int64), *shared]))
    num_left = len(given.rows.speakers) - len(left_out)
    if len(left_out) and num_left < MIN_COHORT:
        lists = " and ".join(trials.source for trials in used_by)
        raise ValueError(
            f"score_norm {section.score_norm} needs a cohort of speakers who neither choose the "
            f"model nor calibrate its scores, but {counted(num_left, 'speaker')} of "
            f"{given.rows.source} are not in {lists}; give a cohort of others with --cohort_list, "
            "or trials of fewer speakers"
        )
    return given, left_out


def shared_speakers(members: TrainingList, trials: TrialList) -> np.ndarray:
    """The speakers of a training list who are also in a trial list, as rows (speakers,).

    They have a recording or their name in common.
    """
    by_path = members.labels[NameIndex(trials.names).find(members.paths) >= 0]
    # Speakers of several corpora are prefixed with the corpus's name.
    named = set(speakers_of(trials).names)
    speakers = (speaker.rpartition("/")[2] for speaker in members.speakers)
    by_name = [row for row, speaker in enumerate(speakers) if speaker in named]
    return np.union1d(by_path, np.array(by_name, dtype=np.int64))


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
    return Embedder(net, options, device, autocast, name)
