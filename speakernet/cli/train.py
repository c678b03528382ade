"""Train a model or, with --eval, score a trial list with one.

The same command resumes a run that was stopped.
"""

import argparse
import contextlib
import logging
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speakernet import distributed
from speakernet.cli import load_configuration
from speakernet.distributed import find_place
from speakernet.files import open_text, own_command
from speakernet.run_folder import BEST, CONFIG, LOG, REPORT, RESULTS, LogFile, refuse_unusable
from speakernet.terminal import counted, duration

if TYPE_CHECKING:
    from speakernet.assembly.runs import TrainingOutcome

TAKES_CONFIG = True
ARGUMENTS = {
    "--json": {
        "action": "store_true",
        "help": "print the results as a JSON object, as in results.json",
    }
}
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"

logger = logging.getLogger(__name__)


def run(arguments: argparse.Namespace) -> int | list[str]:
    """Train or score; return the results and the next commands."""
    loaded = load_configuration(arguments.config_arguments)
    config = loaded.config
    plugins = [word for one in arguments.plugin for word in ("--plugin", one)]
    is_alone = find_place(os.environ, config.runtime.port) is None
    # Late: a mistyped option should not wait for torch to be imported.
    from speakernet.parallel import group

    if config.runtime.distributed and is_alone and (count := group.num_gpus(config.runtime)) > 1:
        return group.launch(
            count, config.runtime.port, ["train", *plugins, *arguments.config_arguments]
        )
    with group.joined(config.runtime):
        distributed.from_main(lambda: refuse_unusable(config.training.save_path))
        # Late: every rank imports it after the process group exists.
        from speakernet.assembly.runs import score_experiment, train_experiment

        with (
            contextlib.nullcontext()
            if loaded.evaluate_only
            else _log_file(Path(config.training.save_path) / LOG)
        ):
            # A file in sections gets speakernet's defaults, as everybody expects.
            level = logging.DEBUG if loaded.files and not loaded.is_classic else logging.INFO
            logger.log(level, "options not given have the defaults of %s", loaded.defaults)
            if loaded.assumed:
                logger.info("assumed: %s", loaded.assumed)
            if loaded.evaluate_only:
                evaluation, written = score_experiment(loaded)
                lines = [*evaluation.lines(), written_line(written)]
                results = next((one for one in written if one.name == RESULTS), Path())
            else:
                outcome = train_experiment(loaded)
                lines = _training_lines(
                    outcome,
                    plugins,
                    max_epochs=config.training.max_epochs,
                    has_stages=bool(config.training.stages),
                    final_model=config.training.final_model,
                )
                results = outcome.run_folder / RESULTS
            # The results go to standard output and to log.txt.
            logger.debug("%s", "\n".join(lines))
            if arguments.json and distributed.is_main():
                lines = [results.read_text(encoding="utf-8")]
            return lines if distributed.is_main() else 0


@contextlib.contextmanager
def _log_file(path: Path) -> Iterator[None]:
    """Write all log records, including DEBUG, to the run folder once it exists."""
    handler = LogFile(path) if distributed.is_main() else logging.NullHandler()
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def written_line(files: Sequence[Path]) -> str:
    return f"written: {files[0].parent}/{', '.join(one.name for one in files)}" if files else ""


def _training_lines(
    outcome: "TrainingOutcome",
    plugins: Sequence[str],
    *,
    max_epochs: int,
    has_stages: bool,
    final_model: str,
) -> list[str]:
    summary = outcome.summary
    folder = outcome.run_folder
    quoted = shlex.quote(str(folder))
    # The run's copy of the configuration also has the options of the command line.
    command = " ".join(
        [
            own_command("train"),
            *map(shlex.quote, plugins),
            "--config",
            shlex.quote(str(folder / CONFIG)),
        ]
    )
    stage = f" of the {summary['best_stage']}" if summary["best_stage"] else ""
    kind = "last model" if final_model == "last" else "best model"
    best = f"{kind}: {folder / BEST} (epoch {summary['best_epoch']}{stage})"
    if outcome.evaluation is None:
        epochs = summary["epochs"]
        return [
            f"this run is finished: {counted(epochs, 'epoch')}, best held-out EER "
            f"{summary['best_eer_percent']:.2f} %",
            best,
            "to start another run, give a different folder with --save_path",
        ]
    with open_text(folder / LOG) as log:
        warnings = sum(" WARNING " in line for line in log)
    return [
        # Marked "test", because the figures logged during training are of the validation list.
        *(
            f"test {line}" if line.startswith("EER") else line
            for line in outcome.evaluation.lines()
        ),
        *(outcome.evaluation.results.initial_model or {}).get("sentences", ()),
        *filter(None, [summary["performance_sentence"]]),
        f"time: {duration(summary['seconds'])} for {counted(summary['epochs'], 'epoch')}",
        best,
        f"report: {folder / REPORT}",
        *([f"warnings: {warnings}, in {folder / LOG}"] if warnings else []),
        "next:",
        f"  {command} --eval --initial_model {shlex.quote(str(folder / BEST))}    score a trial "
        "list with it",
        f"  tensorboard --logdir {quoted}    show the curves"
        if has_stages
        else f"  {command} --max_epoch {2 * max_epochs}    continue training",
        *([f"note: {summary['caution']}"] if summary["caution"] else []),
    ]
