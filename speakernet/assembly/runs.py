"""A training run, from the configuration to the report.

It first checks everything that can be refused: options, lists, files, free space.
"""

import contextlib
import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Any

from speakernet import distributed
from speakernet.assembly.fine_tuning import StagedRun, refuse_other_network
from speakernet.assembly.inputs import (
    Inputs,
    chosen_by_validation,
    cohort_of,
    compared_options,
    make_synthetic_corpus,
    with_default_paths,
)
from speakernet.assembly.training import build_model, prepare_machine, refuse_impossible
from speakernet.assembly.validation import build_validation
from speakernet.checkpoint import read_own_checkpoint
from speakernet.checks import Finding, worst
from speakernet.checks.lists import quick_check, trial_audio
from speakernet.checks.samples import read_facts, sample_findings
from speakernet.config import Config, ConfigError, LoadedConfig
from speakernet.config.schema import stages_of
from speakernet.distributed import refuse_differences
from speakernet.evaluation.files import Evaluation, earlier_report
from speakernet.files import human_bytes
from speakernet.machine.device import find_device
from speakernet.machine.facts import system_info, usable_cores
from speakernet.machine.settings import seed_everything
from speakernet.models.model_file import voices_caution
from speakernet.models.speaker_net import SpeakerNet
from speakernet.run_folder import LAST, is_reported, lock_folder
from speakernet.terminal import counted
from speakernet.training.stopping import StopRequest

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
    training = loaded.config.training
    # Before anything else, because ranks that train and ranks that score would wait for each other.
    refuse_differences({"the command": "training", "training.mirror": training.mirror})
    if not training.mirror:
        return _train_and_report(loaded.config)
    # Late: few runs have a mirror.
    from speakernet.training.mirror import fetch_run, keep_mirror

    places = training.mirror, training.save_path
    with _lock_for_all_ranks(training.save_path):
        distributed.from_main(lambda: fetch_run(*places))
    if not distributed.is_main():
        return _train_and_report(loaded.config)
    with keep_mirror(*places, with_epochs=training.average_checkpoints > 0):
        return _train_and_report(loaded.config)


def _lock_for_all_ranks(folder: str | Path) -> contextlib.AbstractContextManager[None]:
    """The lock of a run folder, which rank 0 takes for all ranks."""
    return lock_folder(folder) if distributed.is_main() else contextlib.nullcontext()


def _train_and_report(config: Config) -> TrainingOutcome:
    # A run is put together from what fails fastest to what takes longest. First the network, which
    # takes a second: with it, every option can be refused that this machine or this network does
    # not support, before a corpus is made or an audio file is opened. Then the lists and a look at
    # their audio: an hour of reading headers must not precede the news that a path is wrong, and a
    # damaged trial must not surface after the last epoch. Only then loader, loss and trainer, which
    # are built once per stage (`StagedRun`), and at the very end the evaluation, in which best.pt
    # is read from disk like anybody's model file, so the reported figures are those of the file.
    #
    # Nothing here knows whether the run is new: trainer and stages look for a last.pt themselves,
    # and the command that started a run also resumes it. With several processes, every rank comes
    # through all of these lines. They may not see the same disks, so what rank 0 alone may know
    # passes through `from_main`, and what must be the same is compared before it matters.
    run_folder = config.run_folder
    device = prepare_machine(config)
    logger.debug("machine: %s", system_info())
    # Before the network is built, because its weights are drawn from torch's global generator.
    seed_everything(config.runtime.seed)
    net = build_model(config)
    refuse_differences(compared_options(config))
    for stage in stages_of(config).values():
        refuse_impossible(stage, net, device)
    initial_model = refuse_other_network(config, net)
    config = with_default_paths(make_synthetic_corpus(config))
    inputs = Inputs(config, device)
    check_inputs(config, inputs, net)
    refuse_differences({**inputs.checksums(), **initial_model})
    million = net.num_parameters / 1e6
    epochs = counted(config.training.max_epochs, "epoch")
    what = f"{config.model.name} ({million:.2f} million parameters) for {epochs}"
    logger.info("training %s in %s; the progress bar shows the time left", what, run_folder)
    stop = StopRequest()
    validate = build_validation(config, inputs, net, stop.is_requested)
    beside = inputs.beside(inputs.test)
    now = {
        "training": inputs.training.rows.sha256,
        "validation": inputs.validation.trials.sha256,
        "trials": inputs.test.trials.sha256,
        "enrolment": inputs.enrolment,
    }
    of_others = {name: listed.trials.sha256 for name, listed in beside.items()}
    earlier, changed = distributed.from_main(lambda: earlier_report(run_folder, now, of_others))
    of_training = [name for role, name in changed if role not in ("trials", "enrolment")]
    summary = StagedRun(config, inputs, net, validate, stop, of_training).train()
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
    is_trained = summary["performance"]["steps"] > 0
    summary["changed_lists"] = [] if is_trained else of_training
    # Other trials need another report, even of a finished run.
    is_current = len(changed) == len(of_training)
    if not is_trained and distributed.from_main(lambda: is_reported(run_folder, beside)):
        if is_current:
            return TrainingOutcome(summary, None, run_folder)
        logger.info("rebuilding the report, because the test list has changed")
    # Locked as in training, so that a second start does not remove files that are still being
    # written.
    with _lock_for_all_ranks(run_folder):
        # Late: training needs none of it, and matplotlib takes half a second.
        from speakernet.assembly.reports import report_training

        # A run whose training had already finished takes no steps; its performance is in the model
        # file.
        performance = summary["performance"] if is_trained else best.get("performance")
        evaluation = report_training(config, inputs, summary, performance, earlier)
    return TrainingOutcome(summary, evaluation, run_folder)


def check_options(config: Config) -> list[Finding]:
    """Whether this machine can train with these options, as findings of the doctor."""
    try:
        device = find_device(config.runtime)
        net = build_model(config)
        for stage in stages_of(config).values():
            refuse_impossible(stage, net, device)
    except ValueError as error:
        return [Finding("error", "options", str(error))]
    can = f"{config.model.name} with {config.loss.name} can be trained on {device.type}"
    return [Finding("ok", "options", can), *_space_findings(config, net)]


def _space_findings(config: Config, net: SpeakerNet) -> list[Finding]:
    """An error if the disk lacks space for the checkpoints of a run."""
    folder = config.run_folder.absolute()
    weights = sum(weight.numel() * weight.element_size() for weight in net.parameters())
    # Weights, two optimizer moments, and the average. A lower bound, because the head comes on top.
    last = weights * (3 + (config.training.ema_decay > 0))
    # A new last.pt is written before the old one is removed.
    needed = weights + last * (1 if (folder / LAST).exists() else 2)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free >= needed:
        return []
    message = (
        f"{human_bytes(free)} free in {existing}; checkpoints of {config.model.name} need "
        f"{human_bytes(needed)}"
    )
    return [Finding("error", "free space", message, "free some or choose another --save_path")]


def check_inputs(config: Config, inputs: Inputs, net: SpeakerNet) -> None:
    """Check the lists of a run against options, each other and their files, and check the disk; log
    the findings.
    """
    _refuse_unusable_lists(config, inputs)
    data = config.data
    # Validation and test list are often the same.
    trial_lists = {}
    for trial_list in inputs.trial_lists():
        trial_lists[id(trial_list.trials), id(trial_list.source)] = trial_list
    findings = quick_check(
        train_list=inputs.training.rows,
        train_source=inputs.training.source,
        trials=list(trial_lists.values()),
        min_utterances=config.loss.min_utterances,
        max_bad_share=data.max_bad_share if data.on_bad_audio == "skip" else 0.0,
        # Only the doctor reports short files.
        min_seconds=0.0,
    )
    findings += _space_findings(config, net)
    if worst(findings) != "error":
        for trials, source in trial_lists.values():
            # Evaluation audio is decoded here, so that damage is not found after the last epoch.
            if source.lookup_table(trials.recordings).seconds.sum() <= READ_AT_START_SECONDS:
                facts = read_facts(source, trials.recordings, usable_cores())
                findings += sample_findings(facts, trial_audio(trials))
    errors = [finding for finding in findings if finding.level == "error"]
    for finding in findings:
        level = logging.WARNING if finding.level == "warning" else logging.DEBUG
        if finding.level == "ok" and finding.check in SHOWN:
            level = logging.INFO
        logger.log(level, "%s", finding)
    if errors:
        # All at once, so that they can be corrected together.
        raise ValueError("\n".join(map(str, errors)))


def _refuse_unusable_lists(config: Config, inputs: Inputs) -> None:
    """Refuse lists that are missing or do not suit the options, before any audio is read."""
    data = config.data
    evaluation = config.evaluation
    if not (data.train_list or data.corpora):
        missing = "data.train_list" if data.test_list else "data.train_list and data.test_list"
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
    if evaluation.calibration_list:
        # Read here, so that errors do not surface after the last epoch.
        folder = evaluation.calibration_path or data.test_path
        inputs.trial_input(evaluation.calibration_list, folder)
    if evaluation.score_norm != "none":
        cohort_of(config, inputs)
    training = inputs.training.rows
    if evaluation.plda and len(training) == len(training.speakers):
        raise ConfigError(
            f"evaluation.plda is on, but every speaker of {data.train_list} has only one "
            "recording; add more for some speakers, or set evaluation.plda: false"
        )
