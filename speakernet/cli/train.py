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
from speakernet.cli.shared import load_configuration
from speakernet.distributed import find_place
from speakernet.files import open_text, own_command
from speakernet.run_folder import BEST, CONFIG, LOG, REPORT, RESULTS, LogFile, refuse_unusable
from speakernet.terminal import counted, duration

if TYPE_CHECKING:
    from speakernet.assembly.runs import TrainingOutcome
    from speakernet.training.options import TrainingOptions

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
    plugins = [word for path in arguments.plugin for word in ("--plugin", path)]
    place = find_place(os.environ, config.runtime.port)
    ranks: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if place is not None or config.runtime.distributed:
        # Late: only several processes need it.
        from speakernet.parallel import group

        # Started by hand on a machine with several GPUs, this process starts one rank for each and
        # waits. Under torchrun or srun it is one of the ranks.
        count = group.num_gpus(config.runtime) if place is None else 0
        if count > 1:
            command = ["train", *plugins, *arguments.config_arguments]
            return group.launch(count, config.runtime.port, command)
        ranks = group.join_ranks(config.runtime)
    # From here on every rank does the same. An error of one has to become an error of all, or the
    # others would wait in a collective; `from_main` and the group take care of that.
    with ranks:
        folder = Path(config.training.save_path)
        distributed.from_main(lambda: refuse_unusable(config.training.save_path))
        with contextlib.nullcontext() if loaded.evaluate_only else _log_file(folder / LOG):
            # A file in sections gets speakernet's defaults, as everybody expects.
            level = logging.DEBUG if loaded.files and not loaded.is_classic else logging.INFO
            logger.log(level, "options not given have the defaults of %s", loaded.defaults)
            if loaded.assumed:
                logger.info("assumed: %s", loaded.assumed)
            if loaded.evaluate_only:
                # Late: every rank imports it after the process group exists.
                from speakernet.assembly.reports import score_experiment

                evaluation, written = score_experiment(loaded)
                lines = [*evaluation.lines(), written_line(written)]
                results = [path for path in written if path.name == RESULTS]
            else:
                # Late: as above.
                from speakernet.assembly.runs import train_experiment

                outcome = train_experiment(loaded)
                lines = _training_lines(outcome, plugins, config.training)
                results = [outcome.run_folder / RESULTS]
            # The results also go to log.txt, the only output of a run in the background.
            logger.debug("%s", "\n".join(lines))
            if not distributed.is_main():
                return 0
            if arguments.json:
                return [path.read_text(encoding="utf-8") for path in results]
            return lines


@contextlib.contextmanager
def _log_file(path: Path) -> Iterator[None]:
    """Write all log records, including DEBUG, to the run folder once it exists."""
    # Only one rank writes, because lines of several would interleave and say the same.
    handler = LogFile(path) if distributed.is_main() else logging.NullHandler()
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def written_line(files: Sequence[Path]) -> str:
    if not files:
        return ""
    return f"written: {files[0].parent}/{', '.join(file.name for file in files)}"


def _training_lines(
    outcome: "TrainingOutcome", plugins: Sequence[str], training: "TrainingOptions"
) -> list[str]:
    summary = outcome.summary
    folder = outcome.run_folder
    best = folder / BEST
    epochs = counted(summary["epochs"], "epoch")
    kind = "last model" if training.final_model == "last" else "best model"
    stage = f" of the {summary['best_stage']}" if summary["best_stage"] else ""
    model = f"{kind}: {best} (epoch {summary['best_epoch']}{stage})"
    if outcome.evaluation is None:
        eer = f"{summary['best_eer_percent']:.2f} %"
        lines = [f"this run is finished: {epochs}, best held-out EER {eer}"]
        if summary["changed_lists"]:
            names = " and ".join(summary["changed_lists"])
            lines.append(f"its model and report use {names} as it was before the change")
        return [*lines, model, "to start another run, give a different folder with --save_path"]
    # Marked "test", because the figures logged during training are of the validation list.
    lines = [
        f"test {line}" if line.startswith("EER") else line for line in outcome.evaluation.lines()
    ]
    lines += (outcome.evaluation.results.initial_model or {}).get("sentences", ())
    if summary["performance_sentence"]:
        lines.append(summary["performance_sentence"])
    lines += [
        f"time: {duration(summary['seconds'])} for {epochs}",
        model,
        f"report: {folder / REPORT}",
    ]
    with open_text(folder / LOG) as log:
        num_warnings = sum(" WARNING " in line for line in log)
    if num_warnings:
        lines.append(f"warnings: {num_warnings}, in {folder / LOG}")
    # The run's copy of the configuration also has the options of the command line.
    words = [*plugins, "--config", str(folder / CONFIG)]
    command = f"{own_command('train')} {shlex.join(words)}"
    # The commands are complete: the run's own copy of its configuration works from any folder.
    lines += [
        "next:",
        f"  {command} --eval --initial_model {shlex.quote(str(best))}    score a trial "
        "list with it",
    ]
    if training.stages:
        lines.append(f"  tensorboard --logdir {shlex.quote(str(folder))}    show the curves")
    else:
        lines.append(f"  {command} --max_epoch {2 * training.max_epochs}    continue training")
    if summary["caution"]:
        lines.append(f"note: {summary['caution']}")
    return lines
