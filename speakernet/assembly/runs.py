"""The two runs of `trainSpeakerNet.py`: train an experiment to its report, and score a trial list with a model.

This file is a table of contents; what it calls is built in the other files of this package.
"""

import contextlib
import dataclasses
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

import speakernet
from speakernet.assembly.checks import check_inputs, refuse_impossible
from speakernet.assembly.data import build_training_loader, loading_facts, reserved_for_training
from speakernet.assembly.evaluation import build_validation, run_evaluation
from speakernet.assembly.initial_model import (
    begin_with_initial_model,
    compared_with_initial_model,
    initial_model_checksum,
    refuse_other_network,
)
from speakernet.assembly.inputs import (
    Inputs,
    chooser_of,
    make_synthetic_corpus,
    with_default_paths,
)
from speakernet.assembly.large_margin import train_large_margin_stage
from speakernet.assembly.model import build_loss, build_model
from speakernet.assembly.training import (
    Validate,
    build_trainer,
    prepare_machine,
)
from speakernet.checkpoint import read_own_checkpoint
from speakernet.config import Config, ConfigError, LoadedConfig
from speakernet.config.schema import config_to_dict
from speakernet.evaluation.evaluate import Evaluation
from speakernet.evaluation.run_data import read_results
from speakernet.files import FileError, sha256_of
from speakernet.machine.device import choose_device
from speakernet.machine.facts import log_system_info
from speakernet.models.speaker_net import SpeakerNet
from speakernet.parallel import distributed
from speakernet.parallel.distributed import refuse_differences
from speakernet.random import seed_everything
from speakernet.run_folder import (
    BEST,
    EVALUATION_FILES,
    LAST,
    PLOTS,
    RESULTS,
    SECOND_STAGE,
    evaluation_folder,
    held,
)
from speakernet.training.mirror import fetch_run, mirrored
from speakernet.training.progress import data_wait_advice
from speakernet.training.state import Stage, StopRequest, best_of_run

PLOTS_OF_ERRORS = ("det", "scores", "llrs", "thresholds", "calibration")
"""Plots of the report that TensorBoard shows too."""

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
    # First: ranks that train and ranks that score would wait for each other.
    refuse_differences({"the command": "training"})
    training = loaded.config.training
    address = training.mirror if distributed.is_main() else ""

    def fetch() -> None:
        if address:
            with held(training.save_path):
                fetch_run(address, training.save_path)

    distributed.from_main(fetch)
    with mirrored(address, training.save_path, with_epochs=training.average_checkpoints > 0):
        return _train_and_report(loaded)


def _train_and_report(loaded: LoadedConfig) -> TrainingOutcome:
    run_folder = Path(loaded.config.training.save_path)
    log_system_info()
    prepare_machine(loaded.config)
    device = choose_device(loaded.config.runtime)
    # Before the network is made: its first weights are drawn from torch's global generator.
    seed_everything(loaded.config.runtime.seed)
    net = build_model(loaded.config)
    refuse_differences(_comparable(loaded.config))
    # An impossible option should not wait for a corpus to be made or decoded.
    refuse_impossible(loaded.config, net, device)
    refuse_other_network(loaded.config, net)
    config = with_default_paths(make_synthetic_corpus(loaded.config))
    inputs = Inputs(config, device)
    check_inputs(config, inputs, net)
    refuse_differences({**inputs.checksums(), **initial_model_checksum(config)})
    stop = StopRequest()
    validate = build_validation(config, inputs, net, stop.is_requested)
    loss, summary = _train_first_stage(config, inputs, net, validate, stop)
    if config.training.large_margin_epochs:
        train_large_margin_stage(
            config,
            net,
            loss,
            inputs,
            validate,
            run_folder,
            int(summary["steps"]),
            stop=stop,
            chosen_by=chooser_of(config, inputs),
        )
    # Only rank 0 writes best.pt, and every rank scores with it.
    best = distributed.from_main(lambda: read_own_checkpoint(summary["best_path"])["training_summary"])
    summary |= best_of_run(best)
    if not summary["performance"]["steps"] and distributed.from_main(lambda: _is_reported(run_folder)):
        return TrainingOutcome(summary, None, run_folder)
    # Held as while training: a start removes half-written files of a killed run, and none of a running one.
    with held(run_folder) if distributed.is_main() else contextlib.nullcontext():
        evaluation = run_evaluation(config, inputs, summary["best_path"], after_training=True)
        evaluation = compared_with_initial_model(config, inputs, summary, evaluation)
        # A run that was finished before took no step: what it came to is in its model.
        performance = summary["performance"] if summary["performance"]["steps"] else best.get("performance")
        results = dataclasses.replace(evaluation.results, performance=performance)
        evaluation = dataclasses.replace(evaluation, results=results)
        if distributed.is_main():
            evaluation.write(run_folder)
            _add_to_events(run_folder, int(summary["steps"]), evaluation)
    return TrainingOutcome(summary, evaluation, run_folder)


def _train_first_stage(
    config: Config, inputs: Inputs, net: SpeakerNet, validate: Validate, stop: StopRequest
) -> tuple[nn.Module, dict[str, Any]]:
    """Loss and summary; loader, optimizer and averages are freed at the end, for the memory of the next stage."""
    run_folder = Path(config.training.save_path)
    reserved = reserved_for_training(config, net, inputs.device)
    loader = build_training_loader(config, inputs, reserved_bytes=reserved)
    try:
        loss = build_loss(config, loader.num_classes)
        given = begin_with_initial_model(config, net, loss, loader.identity["speakers"])
        trainer = build_trainer(
            config,
            net,
            loss,
            loader,
            validate,
            run_folder,
            inputs.device,
            stage=Stage(given=given, chosen_by=chooser_of(config, inputs)),
            # Asked for in the end: how fast the disk is shows while training reads.
            advise=lambda share: data_wait_advice(share, loading_facts(loader)),
            stop=stop,
        )
        return loss, trainer.train()
    finally:
        loader.close()


def _add_to_events(run_folder: Path, step: int, evaluation: Evaluation) -> None:
    """Give TensorBoard the figures and plots of the final evaluation."""
    # Late: tensorboard takes a second, and scoring does not need it.
    from speakernet.training.tensorboard import add_test_results

    plots = [run_folder / PLOTS / f"{name}.png" for name in PLOTS_OF_ERRORS]
    drawn = [path for path in plots if path.is_file()]
    add_test_results(run_folder, step, evaluation.results.to_dict(), drawn)


def _is_reported(run_folder: Path) -> bool:
    """Whether there are results, scores and a report that are newer than the last checkpoint and the best model."""
    trained = [run_folder / BEST, run_folder / LAST, run_folder / SECOND_STAGE / LAST]
    latest = max(file.stat().st_mtime_ns for file in trained if file.exists())
    written = [run_folder / name for name in EVALUATION_FILES]
    if not all(file.exists() and file.stat().st_mtime_ns >= latest for file in written):
        return False
    try:
        return read_results(run_folder / RESULTS) is not None
    except FileError as error:
        logger.warning("%s; it is made again", error)
        return False


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
    log_system_info()
    prepare_machine(config)
    config = with_default_paths(make_synthetic_corpus(config))
    inputs = Inputs(config, choose_device(config.runtime))
    weights = sha256_of(model) if model.is_file() else "no such file"
    refuse_differences({**inputs.test_checksums(), f"{model} (SHA-256)": weights})
    evaluation = run_evaluation(config, inputs, model)
    folder = evaluation_folder(run_folder, config.data.test_list)
    written = evaluation.write(folder) if distributed.is_main() else []
    return evaluation, [folder / name for name in written]


def _comparable(config: Config) -> dict[str, Any]:
    """What must be the same on all ranks: every option except paths, which may differ between machines."""
    values = config_to_dict(config)
    options = {f"{section}.{name}": value for section, fields in values.items() for name, value in fields.items()}
    # Lists are compared by their content, once they are read.
    places = ("_path", "_list", "_corpus", ".speaker_table", ".initial_model")
    versions = {"the version of speakernet": speakernet.__version__, "the version of torch": str(torch.__version__)}
    return {**{name: value for name, value in options.items() if not name.endswith(places)}, **versions}
