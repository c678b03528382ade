"""The two kinds of run: train a model and write its report, and score a trial list with a model.

Training first checks everything that can be refused: options, lists, files, free space.
"""

import contextlib
import dataclasses
import functools
import logging
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import speakernet
from speakernet import distributed
from speakernet.assembly.evaluation import build_validation, cohort_of, run_evaluation
from speakernet.assembly.fine_tuning import (
    compared_with_initial_model,
    refuse_other_network,
    train_stage,
)
from speakernet.assembly.inputs import (
    Inputs,
    chosen_by_validation,
    make_synthetic_corpus,
    with_default_paths,
)
from speakernet.assembly.training import build_model, prepare_machine, refuse_impossible
from speakernet.checkpoint import read_own_checkpoint
from speakernet.checks import Finding, worst
from speakernet.checks.lists import quick_check
from speakernet.checks.samples import read_facts, sample_findings
from speakernet.config import Config, ConfigError, LoadedConfig
from speakernet.config.schema import stages_of
from speakernet.distributed import refuse_differences
from speakernet.evaluation.evaluate import Evaluation
from speakernet.evaluation.fitting import known_by
from speakernet.evaluation.results import Results
from speakernet.files import human_bytes, sha256_of
from speakernet.machine.device import choose_device, find_device
from speakernet.machine.facts import system_info, usable_cores
from speakernet.models.model_file import voices_caution
from speakernet.models.speaker_net import SpeakerNet
from speakernet.random import seed_everything
from speakernet.run_folder import (
    BEST,
    EVALUATION_FILES,
    LAST,
    PLOTS,
    evaluation_folder,
    held,
    later_stages,
)
from speakernet.terminal import counted
from speakernet.training.stopping import StopRequest
from speakernet.training.trackers import TEST_FIGURES, Trackers

PLOTS_OF_ERRORS = ("det", "scores", "llrs", "thresholds", "calibration")
"""Plots of the report that are also sent to trackers."""
READ_AT_START_SECONDS = 3600.0
"""Trial lists with at most this much audio are decoded before the first step; longer ones are left
to the doctor."""
SHOWN = ("speakers", "training audio: length", "trials", "trial identity")
"""Findings shown even if all is well, because they report amounts; the others then go to log.txt
only."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TrainingOutcome:
    """The result of a training run."""

    summary: dict[str, Any]
    """The trainer's numbers: epochs, best EER, seconds, paths."""
    evaluation: Evaluation | None
    """The results of the best checkpoint on the test list; None if the run was already finished."""
    run_folder: Path


def train_experiment(loaded: LoadedConfig) -> TrainingOutcome:
    """Train (or resume), evaluate the best checkpoint on the test list, write the report, and
    mirror the run folder.
    """
    config = loaded.config
    training = loaded.config.training
    # Before anything else, because ranks that train and ranks that score would wait for each other.
    refuse_differences({"the command": "training", "training.mirror": training.mirror})
    copies: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if training.mirror:
        # Late: few runs have a mirror.
        from speakernet.training.mirror import fetch_run, mirrored

        given = training.mirror, training.save_path
        with held(training.save_path) if distributed.is_main() else contextlib.nullcontext():
            distributed.from_main(functools.partial(fetch_run, *given))
        if distributed.is_main():
            copies = mirrored(*given, with_epochs=training.average_checkpoints > 0)
    with copies:
        run_folder = Path(config.training.save_path)
        prepare_machine(config)
        logger.debug("machine: %s", system_info())
        device = choose_device(config.runtime)
        # Before the network is built, because its weights are drawn from torch's global generator.
        seed_everything(config.runtime.seed)
        net = build_model(config)
        refuse_differences(_compared_options(config))
        # Impossible options are refused before a corpus is made or decoded.
        for stage in stages_of(config).values():
            refuse_impossible(stage, net, device)
        initial_model = refuse_other_network(config, net)
        config = with_default_paths(make_synthetic_corpus(config))
        inputs = Inputs(config, device)
        check_inputs(config, inputs, net)
        refuse_differences({**inputs.checksums(), **initial_model})
        million = sum(one.numel() for one in net.parameters()) / 1e6
        what = (
            f"{config.model.name} ({million:.2f} million parameters) for "
            f"{counted(config.training.max_epochs, 'epoch')}"
        )
        logger.info("training %s in %s; the progress bar shows the time left", what, run_folder)
        stop = StopRequest()
        validate = build_validation(config, inputs, net, stop.is_requested)
        chosen_by = known_by(inputs.validation.trials) if chosen_by_validation(config) else {}
        loss = None
        stages = stages_of(config)
        summaries: list[dict[str, Any]] = []
        for number in range(len(stages)):
            steps = sum(before["steps"] for before in summaries)
            loss, summary = train_stage(
                config,
                stages,
                number,
                net,
                loss,
                steps,
                inputs,
                validate,
                stop=stop,
                chosen_by=chosen_by,
            )
            summaries.append(summary)
        summary = _merge_summaries(summaries) if len(summaries) > 1 else summaries[0]
        # Rank 0 writes best.pt, which may not be visible on other machines.
        best = distributed.from_main(
            lambda: read_own_checkpoint(summary["best_path"])["training_summary"]
        )
        summary |= {
            "best_eer_percent": best["best_eer_percent"],
            "best_epoch": best["epoch"],
            "best_stage": best.get("stage", ""),
            "caution": voices_caution({"training_summary": best}),
        }
        others = inputs.beside(inputs.test) if config.data.test_lists else ()
        if not summary["performance"]["steps"] and distributed.from_main(
            lambda: _is_reported(run_folder, others)
        ):
            return TrainingOutcome(summary, None, run_folder)
        # Locked as in training, so that a second start does not remove files that are still being
        # written.
        with held(run_folder) if distributed.is_main() else contextlib.nullcontext():
            evaluation = run_evaluation(config, inputs, summary["best_path"], after_training=True)
            if training.initial_model:
                evaluation = compared_with_initial_model(config, inputs, summary, evaluation)
            # A run whose training had already finished takes no steps; its performance is in the
            # model file.
            performance = (
                summary["performance"]
                if summary["performance"]["steps"]
                else best.get("performance")
            )
            results = dataclasses.replace(evaluation.results, performance=performance)
            evaluation = dataclasses.replace(evaluation, results=results)
            if distributed.is_main():
                _write_evaluations(evaluation, run_folder, run_folder)
                _send_results(config, results, summary)
        return TrainingOutcome(summary, evaluation, run_folder)


def _send_results(config: Config, results: Results, summary: Mapping[str, Any]) -> None:
    """Send the figures of the test, its plots and the model to the trackers."""
    run_folder = Path(config.training.save_path)
    plots = []
    for name in PLOTS_OF_ERRORS:
        path = run_folder / PLOTS / f"{name}.png"
        if path.is_file():
            plots.append(path)
    figures = {name: value for name, value in results.to_dict().items() if name in TEST_FIGURES}
    steps = int(summary["steps"])
    trackers = Trackers([*config.training.trackers], run_folder, {}, steps)
    trackers.results(steps, figures, plots, Path(summary["best_path"]))
    trackers.close()


def _merge_summaries(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The summary of several stages; speed and precision are those of the last stage that this
    process trained.
    """
    trained = [one for one in summaries if one["performance"]["steps"]] or summaries
    counts = ("epochs", "steps", "bad_steps", "fp16_overflows", "utterances", "seconds")
    of_the_first = {
        name: summaries[0][name] for name in ("initial_eer_percent", "best_path", "last_path")
    }
    return {
        **trained[-1],
        **{name: sum(one[name] for one in summaries) for name in counts},
        **of_the_first,
    }


def _is_reported(run_folder: Path, others: Iterable[str]) -> bool:
    """Whether results, scores and reports exist and are newer than the last checkpoint and the best
    model.
    """
    trained = [
        run_folder / BEST,
        *(folder / LAST for folder in (run_folder, *later_stages(run_folder).values())),
    ]
    latest = max(file.stat().st_mtime_ns for file in trained if file.exists())
    folders = [run_folder, *(evaluation_folder(run_folder, name) for name in others)]
    written = [folder / name for folder in folders for name in EVALUATION_FILES]
    return all(file.exists() and file.stat().st_mtime_ns >= latest for file in written)


def score_experiment(loaded: LoadedConfig) -> tuple[Evaluation, list[Path]]:
    """Score the test list with `training.initial_model` (or the run's best.pt); return the
    evaluation and its files.
    """
    refuse_differences({"the command": "scoring (--eval)"})
    config = loaded.config
    run_folder = Path(config.training.save_path)
    model = Path(config.training.initial_model or run_folder / BEST)
    if not distributed.from_main(model.is_file):
        raise ConfigError(
            f"no model file at {model}; give one with --initial_model FILE (training writes "
            "<save_path>/best.pt), or evaluate score files with `speakernet evaluate --scores FILE "
            "--trials LIST`"
        )
    refuse_differences(_compared_options(config))
    prepare_machine(config)
    logger.debug("machine: %s", system_info())
    config = with_default_paths(make_synthetic_corpus(config))
    inputs = Inputs(config, choose_device(config.runtime))
    weights = sha256_of(model) if model.is_file() else "no such file"
    refuse_differences({**inputs.checksums(of_training=False), f"{model} (SHA-256)": weights})
    evaluation = run_evaluation(config, inputs, model)
    folder = evaluation_folder(run_folder, config.data.test_list)
    if not distributed.is_main():
        return evaluation, []
    return evaluation, _write_evaluations(evaluation, run_folder, folder)


def _write_evaluations(evaluation: Evaluation, run_folder: Path, folder: Path) -> list[Path]:
    """Write the results of the other lists, then those of the run into `folder`: their presence
    marks it as finished. Returns the files in `folder`.
    """
    # Late: only a finished run needs matplotlib, which takes half a second.
    from speakernet.evaluation.report import write_evaluation

    for name, other in evaluation.others.items():
        write_evaluation(evaluation_folder(run_folder, name), other)
    return [folder / name for name in write_evaluation(folder, evaluation)]


def _compared_options(config: Config) -> dict[str, Any]:
    """The options that must be the same on all ranks; paths may differ between machines."""
    # Lists are compared later, by content.
    places = (
        "_path",
        "_list",
        "test_lists",
        "corpora",
        "_corpus",
        "speaker_table",
        "initial_model",
    )
    lists = [(name, one.test_interval) for name, one in config.data.test_lists.items()]
    corpora = [(name, one.weight) for name, one in config.data.corpora.items()]
    options = {
        f"{section}.{name}": value
        for section, fields in config.model_dump().items()
        for name, value in fields.items()
        if not name.endswith(places)
    }
    versions = {
        "the version of speakernet": speakernet.__version__,
        "the version of torch": str(torch.__version__),
    }
    return options | versions | {"data.test_lists": lists, "data.corpora": corpora}


def check_options(config: Config) -> list[Finding]:
    """Whether this machine can train with these options, as findings of the doctor."""
    try:
        device = find_device(config.runtime)
        net = build_model(config)
        for one in stages_of(config).values():
            refuse_impossible(one, net, device)
    except ValueError as error:
        return [Finding("error", "options", str(error))]
    can = f"{config.model.name} with {config.loss.name} can be trained on {device.type}"
    return [Finding("ok", "options", can), *_space_findings(config, net)]


def _space_findings(config: Config, net: SpeakerNet) -> list[Finding]:
    """An error if the disk lacks space for the checkpoints of a run."""
    folder = Path(config.training.save_path).absolute()
    weights = sum(one.numel() * one.element_size() for one in net.parameters())
    # Weights, two optimizer moments, and the average. A lower bound, because the head comes on top.
    last = weights * (3 + (config.training.ema_decay > 0))
    # A new last.pt is written before the old one is removed.
    needed = weights + last * (1 if (folder / LAST).exists() else 2)
    existing = next(one for one in (folder, *folder.parents) if one.exists())
    free = shutil.disk_usage(existing).free
    message = (
        f"{human_bytes(free)} free in {existing}; checkpoints of {config.model.name} need "
        f"{human_bytes(needed)}"
    )
    advice = "free some space or choose another --save_path"
    return [Finding("error", "free space", message, advice)] if free < needed else []


def check_inputs(config: Config, inputs: Inputs, net: SpeakerNet) -> None:
    """Check the lists of a run against options, each other and their files, and check the disk; log
    the findings.
    """
    data = config.data
    if not (data.train_list or data.corpora):
        missing = " and ".join(
            f"data.{name}" for name in ("train_list", "test_list") if not getattr(data, name)
        )
        raise ConfigError(f"no training list: set {missing}; `speakernet prepare` makes lists")
    if data.validation_list == data.test_list and chosen_by_validation(config):
        logger.warning(
            "the best checkpoint is chosen on %s, which is also the reported list; to avoid this, "
            "set data.validation_list or data.validation_speakers, or training.final_model: last",
            data.test_list,
        )
    if inputs.validation.trials.labels is None:
        raise ConfigError(
            f"{data.validation_list} has no labels, so it cannot choose the best checkpoint; add "
            "labels"
        )
    if calibration_list := config.evaluation.calibration_list:
        # Read here, so that errors do not surface after the last epoch.
        inputs.trial_input(calibration_list, config.evaluation.calibration_path or data.test_path)
    if config.evaluation.score_norm != "none":
        cohort_of(config, inputs)
    training = inputs.training.rows
    if config.evaluation.plda and len(training) == len(training.speakers):
        raise ConfigError(
            f"evaluation.plda is on, but every speaker of {data.train_list} has only one "
            "recording; add more for some speakers, or set evaluation.plda: false"
        )
    # Validation and test list are often the same.
    both = inputs.validation, inputs.test
    others = inputs.beside(inputs.test).values() if data.test_lists else ()
    trial_lists = {(id(one.trials), id(one.source)): one for one in (*both, *others)}.values()
    findings = quick_check(
        train_list=inputs.training.rows,
        train_source=inputs.training.source,
        trials=[(one.trials, one.source) for one in trial_lists],
        min_utterances=config.loss.min_utterances,
        max_bad_share=data.max_bad_share if data.on_bad_audio == "skip" else 0.0,
        # Only the doctor reports short files.
        min_seconds=0.0,
    )
    findings += _space_findings(config, net)
    if worst(findings) != "error":
        for one in trial_lists:
            # Evaluation audio is decoded here, so that damage is not found after the last epoch.
            names = one.trials.names
            if one.source.lookup_table(names).seconds.sum() <= READ_AT_START_SECONDS:
                check = f"trial audio ({Path(one.trials.source).name})"
                findings += sample_findings(read_facts(one.source, names, usable_cores()), check)
    levels = {"warning": logging.WARNING, "ok": logging.DEBUG, "error": logging.DEBUG}
    for finding in findings:
        is_shown = finding.level == "ok" and finding.check in SHOWN
        logger.log(logging.INFO if is_shown else levels[finding.level], "%s", finding)
    if worst(findings) == "error":
        raise ValueError(
            "\n".join(str(finding) for finding in findings if finding.level == "error")
        )
