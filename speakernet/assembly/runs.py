"""The two runs of `trainSpeakerNet.py`: train an experiment to its report, and score a trial list with a model.

Both begin with everything that can be refused: options, lists, files, free space.
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
from speakernet.assembly.evaluation import build_validation, run_evaluation
from speakernet.assembly.fine_tuning import compared_with_initial_model, refuse_other_network, train_stage
from speakernet.assembly.inputs import Inputs, chosen_by_validation, make_synthetic_corpus, with_default_paths
from speakernet.assembly.training import build_model, prepare_machine, refuse_impossible
from speakernet.checkpoint import read_own_checkpoint
from speakernet.checks import Finding, worst
from speakernet.checks.lists import quick_check
from speakernet.checks.samples import read_facts, sample_findings
from speakernet.config import Config, ConfigError, LoadedConfig
from speakernet.config.schema import stages_of
from speakernet.evaluation.calibration import known_by
from speakernet.evaluation.evaluate import Evaluation
from speakernet.evaluation.report import write_evaluation
from speakernet.files import human_bytes, sha256_of
from speakernet.machine.device import choose_device, find_device
from speakernet.machine.facts import system_info, usable_cores
from speakernet.models.speaker_net import SpeakerNet
from speakernet.parallel import distributed
from speakernet.parallel.distributed import refuse_differences
from speakernet.random import seed_everything
from speakernet.run_folder import BEST, EVALUATION_FILES, LAST, PLOTS, evaluation_folder, held, later_stages
from speakernet.terminal import counted
from speakernet.training.progress import StopRequest
from speakernet.training.trackers import TEST_FIGURES, Trackers

PLOTS_OF_ERRORS = ("det", "scores", "llrs", "thresholds", "calibration")
"""Plots of the report that trackers show too."""
READ_AT_START_SECONDS = 3600.0
"""Trial lists of no more speech are decoded before the first step, in seconds; longer ones are left to the doctor."""
SHOWN = ("speakers", "training audio: length", "trials", "trial identity")
"""Findings that are logged although all is well: how much there is. That nothing is missing is a detail."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TrainingOutcome:
    """The result of a training run."""

    summary: dict[str, Any]
    """The trainer's numbers: epochs, best EER, seconds, paths."""
    evaluation: Evaluation | None
    """The best checkpoint on the test list; None if the run was finished before."""
    run_folder: Path


def train_experiment(loaded: LoadedConfig) -> TrainingOutcome:
    """Train (or resume), evaluate the best checkpoint on the test list, write the report; copy all to the mirror."""
    config, training = loaded.config, loaded.config.training
    # First: ranks that train and ranks that score would wait for each other.
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
        # Before the network is made: its first weights are drawn from torch's global generator.
        seed_everything(config.runtime.seed)
        net = build_model(config)
        refuse_differences(_comparable(config))
        # An impossible option should not wait for a corpus to be made or decoded.
        for stage in stages_of(config).values():
            refuse_impossible(stage, net, device)
        initial_model = refuse_other_network(config, net)
        config = with_default_paths(make_synthetic_corpus(config))
        inputs = Inputs(config, device)
        check_inputs(config, inputs, net)
        refuse_differences({**inputs.checksums(), **initial_model})
        million = sum(one.numel() for one in net.parameters()) / 1e6
        what = (
            f"{config.model.name} ({million:.2f} million parameters) for {counted(config.training.max_epochs, 'epoch')}"
        )
        logger.info("training %s into %s; the bar shows the time left", what, run_folder)
        stop = StopRequest()
        validate = build_validation(config, inputs, net, stop.is_requested)
        chosen_by = known_by(inputs.validation.trials) if chosen_by_validation(config) else None
        loss, stages = None, stages_of(config)
        summaries: list[dict[str, Any]] = []
        for number in range(len(stages)):
            steps = sum(before["steps"] for before in summaries)
            loss, summary = train_stage(
                config, stages, number, net, loss, steps, inputs, validate, stop=stop, chosen_by=chosen_by
            )
            summaries.append(summary)
        summary = _together(summaries) if len(summaries) > 1 else summaries[0]
        # Only rank 0 writes best.pt, and every rank scores with it.
        best = distributed.from_main(lambda: read_own_checkpoint(summary["best_path"])["training_summary"])
        summary |= {
            "best_eer_percent": best["best_eer_percent"],
            "best_epoch": best["epoch"],
            "best_stage": best.get("stage", ""),
        }
        others = inputs.beside(inputs.test) if config.data.test_lists else ()
        if not summary["performance"]["steps"] and distributed.from_main(lambda: _is_reported(run_folder, others)):
            return TrainingOutcome(summary, None, run_folder)
        # Held as while training: a start removes half-written files of a killed run, and none of a running one.
        with held(run_folder) if distributed.is_main() else contextlib.nullcontext():
            evaluation = run_evaluation(config, inputs, summary["best_path"], after_training=True)
            if training.initial_model:
                evaluation = compared_with_initial_model(config, inputs, summary, evaluation)
            # A run that was finished before took no step: what it came to is in its model.
            performance = summary["performance"] if summary["performance"]["steps"] else best.get("performance")
            results = dataclasses.replace(evaluation.results, performance=performance)
            evaluation = dataclasses.replace(evaluation, results=results)
            if distributed.is_main():
                # The run's own come last: when they are there, it is finished.
                for name, one in evaluation.others.items():
                    write_evaluation(evaluation_folder(run_folder, name), one)
                write_evaluation(run_folder, evaluation)
                plots = [path for name in PLOTS_OF_ERRORS if (path := run_folder / PLOTS / f"{name}.png").is_file()]
                figures = {name: one for name, one in results.to_dict().items() if name in TEST_FIGURES}
                steps = int(summary["steps"])
                trackers = Trackers([*training.trackers], run_folder, {}, steps)
                trackers.each("results", steps, figures, plots, Path(summary["best_path"]))
                trackers.each("close")
        return TrainingOutcome(summary, evaluation, run_folder)


def _together(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The summary of several stages: speed and precision are those of the last one that this process trained."""
    trained = [one for one in summaries if one["performance"]["steps"]] or summaries
    counts = ("epochs", "steps", "bad_steps", "fp16_overflows", "utterances", "seconds")
    of_the_first = {name: summaries[0][name] for name in ("initial_eer_percent", "best_path", "last_path")}
    return {**trained[-1], **{name: sum(one[name] for one in summaries) for name in counts}, **of_the_first}


def _is_reported(run_folder: Path, others: Iterable[str]) -> bool:
    """Whether there are results, scores and reports that are newer than the last checkpoint and the best model."""
    trained = [run_folder / BEST, *(folder / LAST for folder in (run_folder, *later_stages(run_folder).values()))]
    latest = max(file.stat().st_mtime_ns for file in trained if file.exists())
    folders = [run_folder, *(evaluation_folder(run_folder, name) for name in others)]
    written = [folder / name for folder in folders for name in EVALUATION_FILES]
    return all(file.exists() and file.stat().st_mtime_ns >= latest for file in written)


def score_experiment(loaded: LoadedConfig) -> tuple[Evaluation, list[Path]]:
    """Score the test list with `training.initial_model` (or the run's best.pt); returns the result and its files."""
    refuse_differences({"the command": "scoring (--eval)"})
    config = loaded.config
    run_folder = Path(config.training.save_path)
    model = Path(config.training.initial_model or run_folder / BEST)
    if not distributed.from_main(model.is_file):
        raise ConfigError(
            f"no model file at {model}; name one with --initial_model FILE (training writes one to <save_path>/best.pt)"
        )
    refuse_differences(_comparable(config))
    prepare_machine(config)
    logger.debug("machine: %s", system_info())
    config = with_default_paths(make_synthetic_corpus(config))
    inputs = Inputs(config, choose_device(config.runtime))
    weights = sha256_of(model) if model.is_file() else "no such file"
    refuse_differences({**inputs.checksums(of_training=False), f"{model} (SHA-256)": weights})
    evaluation = run_evaluation(config, inputs, model)
    folder = evaluation_folder(run_folder, config.data.test_list)
    if distributed.is_main():
        for name, one in evaluation.others.items():
            write_evaluation(evaluation_folder(run_folder, name), one)
    written = write_evaluation(folder, evaluation) if distributed.is_main() else []
    return evaluation, [folder / name for name in written]


def _comparable(config: Config) -> dict[str, Any]:
    """What must be the same on all ranks: every option except paths, which may differ between machines."""
    # Lists are compared by their content, once they are read.
    places = ("_path", "_list", "test_lists", "corpora", "_corpus", "speaker_table", "initial_model")
    lists = [(name, one.test_interval) for name, one in config.data.test_lists.items()]
    corpora = [(name, one.weight) for name, one in config.data.corpora.items()]
    options = {
        f"{section}.{name}": value
        for section, fields in config.model_dump().items()
        for name, value in fields.items()
        if not name.endswith(places)
    }
    versions = {"the version of speakernet": speakernet.__version__, "the version of torch": str(torch.__version__)}
    return options | versions | {"data.test_lists": lists, "data.corpora": corpora}


def check_options(config: Config) -> list[Finding]:
    """Whether this machine can train what the options ask for, as the doctor's lines."""
    try:
        device, net = find_device(config.runtime), build_model(config)
        for one in stages_of(config).values():
            refuse_impossible(one, net, device)
    except ValueError as error:
        return [Finding("error", "options", str(error))]
    can = f"{config.model.name} with {config.loss.name} can be trained on {device.type}"
    return [Finding("ok", "options", can), *_space_findings(config, net)]


def _space_findings(config: Config, net: SpeakerNet) -> list[Finding]:
    """An error if the disk lacks the space for the checkpoints of a run."""
    folder = Path(config.training.save_path).absolute()
    weights = sum(one.numel() * one.element_size() for one in net.parameters())
    # Two moments of the optimizer, and the average. The head comes on top: this is the least.
    last = weights * (3 + (config.training.ema_decay > 0))
    # A new last.pt is written beside the old one, which is kept.
    needed = weights + last * (1 if (folder / LAST).exists() else 2)
    existing = next(one for one in (folder, *folder.parents) if one.exists())
    free = shutil.disk_usage(existing).free
    message = f"{human_bytes(free)} free in {existing}; checkpoints of {config.model.name} need {human_bytes(needed)}"
    advice = "free some space, or choose another --save_path"
    return [Finding("error", "free space", message, advice)] if free < needed else []


def check_inputs(config: Config, inputs: Inputs, net: SpeakerNet) -> None:
    """Check the lists of a run against options, each other and their files, and the disk; log what was found."""
    data = config.data
    if not (data.train_list or data.corpora):
        missing = " and ".join(f"data.{name}" for name in ("train_list", "test_list") if not getattr(data, name))
        raise ConfigError(f"no training list: set {missing}; `speakernet prepare` makes lists")
    if data.validation_list == data.test_list and chosen_by_validation(config):
        logger.warning(
            "the best checkpoint is chosen on %s, which is also the reported list; data.validation_list, "
            "data.validation_speakers or training.final_model: last avoids that",
            data.test_list,
        )
    if inputs.validation.trials.labels is None:
        raise ConfigError(f"{data.validation_list} has no labels, so it cannot choose the best checkpoint")
    if calibration_list := config.evaluation.calibration_list:
        # Read now, not after the last epoch.
        inputs.trial_input(calibration_list, config.evaluation.calibration_path or data.test_path)
    training = inputs.training.rows
    if config.evaluation.plda and len(training) == len(training.speakers):
        raise ConfigError(
            f"evaluation.plda: every speaker of {data.train_list} has one recording; expected several of some, or "
            "evaluation.plda: false"
        )
    # Often both are the same list.
    both = inputs.validation, inputs.test
    others = inputs.beside(inputs.test).values() if data.test_lists else ()
    trial_lists = {(id(one.trials), id(one.source)): one for one in (*both, *others)}.values()
    findings = quick_check(
        train_list=inputs.training.rows,
        train_source=inputs.training.source,
        trials=[(one.trials, one.source) for one in trial_lists],
        min_utterances=config.loss.min_utterances,
        max_bad_share=data.max_bad_share if data.on_bad_audio == "skip" else 0.0,
        # No length is too short here: the doctor judges that.
        min_seconds=0.0,
    )
    findings += _space_findings(config, net)
    if worst(findings) != "error":
        for one in trial_lists:
            # Audio that judges the run is decoded now, so that damage is not found after its last epoch.
            names = one.trials.names
            if one.source.lookup_table(names).seconds.sum() <= READ_AT_START_SECONDS:
                check = f"trial audio ({Path(one.trials.source).name})"
                findings += sample_findings(read_facts(one.source, names, usable_cores()), check)
    levels = {"warning": logging.WARNING, "ok": logging.DEBUG, "error": logging.DEBUG}
    for finding in findings:
        is_shown = finding.level == "ok" and finding.check in SHOWN
        logger.log(logging.INFO if is_shown else levels[finding.level], "%s", finding)
    if worst(findings) == "error":
        raise ValueError("\n".join(str(finding) for finding in findings if finding.level == "error"))
