"""What follows training, and `--eval`: score the lists with a model file, compare it with the
initial model, write the reports, and send the figures to the trackers.
"""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from speakernet import distributed
from speakernet.assembly.evaluation import run_evaluation, scores_of_model
from speakernet.assembly.inputs import (
    Inputs,
    compared_options,
    make_synthetic_corpus,
    with_default_paths,
)
from speakernet.assembly.training import prepare_machine
from speakernet.config import Config, ConfigError, LoadedConfig
from speakernet.distributed import refuse_differences
from speakernet.evaluation.figures import compare_scores
from speakernet.evaluation.files import Evaluation
from speakernet.evaluation.further import with_earlier_lists
from speakernet.evaluation.report import write_evaluation
from speakernet.evaluation.results import Results, headline
from speakernet.files import sha256_of
from speakernet.machine.facts import system_info
from speakernet.run_folder import BEST, PLOTS, evaluation_folder
from speakernet.training.trackers import TEST_FIGURES, Trackers

PLOTS_OF_ERRORS = ("det", "scores", "llrs")
"""Plots of the report that are also sent to trackers."""

logger = logging.getLogger(__name__)


def report_training(
    config: Config,
    inputs: Inputs,
    summary: Mapping[str, Any],
    performance: dict[str, Any] | None,
    earlier: Results,
) -> Evaluation:
    """Evaluate the best model of a training run, and write and send its results.

    `earlier` is the report before the lists in `summary["changed_lists"]` changed.
    """
    run_folder = config.run_folder
    evaluation = run_evaluation(config, inputs, summary["best_path"], after_training=True)
    if config.training.initial_model:
        evaluation = compared_with_initial_model(config, inputs, summary, evaluation)
    results = dataclasses.replace(evaluation.results, performance=performance)
    if summary["changed_lists"]:
        results = with_earlier_lists(results, earlier, summary["changed_lists"])
    evaluation = dataclasses.replace(evaluation, results=results)
    if distributed.is_main():
        _write_evaluations(evaluation, run_folder, run_folder)
        _send_results(config, results, summary)
    return evaluation


def score_experiment(loaded: LoadedConfig) -> tuple[Evaluation, list[Path]]:
    """Score the test list with `training.initial_model` (or the run's best.pt); return the
    evaluation and its files.
    """
    refuse_differences({"the command": "scoring (--eval)"})
    config = loaded.config
    run_folder = config.run_folder
    model = Path(config.training.initial_model or run_folder / BEST)
    if not distributed.from_main(model.is_file):
        raise ConfigError(
            f"no model file at {model}; give one with --initial_model FILE (training writes "
            "<save_path>/best.pt), or evaluate score files with `speakernet evaluate --scores FILE "
            "--trials LIST`"
        )
    refuse_differences(compared_options(config))
    device = prepare_machine(config)
    logger.debug("machine: %s", system_info())
    config = with_default_paths(make_synthetic_corpus(config))
    inputs = Inputs(config, device)
    # On another machine, a different file may have this path.
    weights = sha256_of(model) if model.is_file() else "no such file"
    refuse_differences({**inputs.checksums(of_training=False), f"{model} (SHA-256)": weights})
    evaluation = run_evaluation(config, inputs, model)
    folder = evaluation_folder(run_folder, config.data.test_list)
    if not distributed.is_main():
        return evaluation, []
    return evaluation, _write_evaluations(evaluation, run_folder, folder)


def compared_with_initial_model(
    config: Config, inputs: Inputs, summary: Mapping[str, Any], evaluation: Evaluation
) -> Evaluation:
    """The evaluation of best.pt on the test list, with its difference from the initial model.

    Both are scored in the same way and compared on the same draws of speakers.
    """
    results = evaluation.results
    if results.eer_percent is None or evaluation.speakers is None:
        return evaluation
    path = Path(config.training.initial_model)
    before = summary.get("initial_eer_percent")
    stage = summary["best_stage"]
    stayed_best = summary["best_epoch"] == 0 and not stage
    facts: dict[str, Any] = {"file": path.name, "stayed_best": stayed_best}
    sentences = []
    warnings = []
    if stayed_best:
        # The weights are identical, so there is nothing to compare.
        if before is not None:
            warnings.append(
                "no epoch was better than the initial model on the held-out trials (EER "
                f"{before:.2f} %): best.pt is the initial model itself"
            )
            sentences += warnings
    else:
        if before is not None:
            epoch = f"epoch {summary['best_epoch']}" + (f" of the {stage}" if stage else "")
            sentences.append(
                f"held-out EER: {before:.2f} % with the initial model (epoch 0), "
                f"{summary['best_eer_percent']:.2f} % with best.pt ({epoch})"
            )
        # The ranks share the embedding, so all of them must find the file.
        if all(distributed.gather_objects(path.is_file())):
            scores = scores_of_model(config, inputs, path)
            compared, worse = _compare(config, scores, evaluation, facts)
            sentences += compared
            warnings += worse
        else:
            warnings.append(
                f"the initial model {path} no longer exists, so best.pt was not compared with it"
            )
    for warning in warnings:
        logger.warning("%s", warning)
    results = dataclasses.replace(
        results,
        initial_model={**facts, "sentences": sentences},
        warnings=[*(results.warnings or []), *warnings],
    )
    return dataclasses.replace(evaluation, results=results)


def _compare(
    config: Config, initial_scores: np.ndarray, evaluation: Evaluation, facts: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """Compare the initial model with best.pt and add the figures to `facts`.

    Returns the differences as sentences, and those in which best.pt is significantly worse.
    """
    assert evaluation.speakers is not None
    # Paired: both models are scored on the same trials, so their difference is known more precisely
    # than either error rate.
    paired = compare_scores(
        evaluation.trials,
        [initial_scores, evaluation.scores],
        evaluation.speakers,
        num_draws=config.evaluation.bootstrap_samples,
        seed=config.runtime.seed,
        options=config.evaluation,
        priors=config.evaluation.dcf_target_priors,
    )
    initial = paired.systems[0]
    differences = paired.differences[0]
    sentences = paired.sentences(["the initial model", "best.pt"])
    by_figure = {}
    worse = []
    for figure, difference, sentence in zip(headline(initial), differences, sentences, strict=True):
        by_figure[figure.name] = {"value": difference.value, "interval": difference.interval}
        # EER and costs are errors, so a positive difference is worse. One that may be chance is no
        # warning.
        if difference.value > 0 and difference.is_significant:
            worse.append(sentence)
    facts |= {
        "sha256": sha256_of(config.training.initial_model),
        "eer_percent": initial.eer_percent,
        "min_dcf": initial.min_dcf,
        "best_less_initial": by_figure,
    }
    return sentences, worse


def _write_evaluations(evaluation: Evaluation, run_folder: Path, folder: Path) -> list[Path]:
    """Write the results of the other lists, then those of the run into `folder`: their presence
    marks it as finished. Returns the files in `folder`.
    """
    for name, other in evaluation.others.items():
        write_evaluation(evaluation_folder(run_folder, name), other)
    return [folder / name for name in write_evaluation(folder, evaluation)]


def _send_results(config: Config, results: Results, summary: Mapping[str, Any]) -> None:
    """Send the figures of the test, its plots and the model to the trackers."""
    run_folder = config.run_folder
    plots = [run_folder / PLOTS / f"{name}.png" for name in PLOTS_OF_ERRORS]
    figures = {name: value for name, value in results.to_dict().items() if name in TEST_FIGURES}
    steps = int(summary["steps"])
    trackers = Trackers([*config.training.trackers], run_folder, {}, steps)
    written = [plot for plot in plots if plot.is_file()]
    trackers.results(steps, figures, written, Path(summary["best_path"]))
    trackers.close()
