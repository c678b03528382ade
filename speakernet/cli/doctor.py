"""Examine lists, audio and machine before a run; the exit code says the worst (0 ok, 1 warnings, 2 errors).

    speakernet doctor --config my.yaml
    speakernet doctor --list train.txt --root wav --trials trials.txt
    speakernet doctor                                                   the machine only

Everything is read once; --fast reads headers only.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from speakernet.checks.findings import exit_code, table
from speakernet.checks.headers import DEFAULT_MIN_SECONDS
from speakernet.config import Config, load_config
from speakernet.machine.limits import usable_cores

if TYPE_CHECKING:
    from speakernet.checks.examination import Patient

TAKES_CONFIG = True
METRIC_UTTERANCES = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to examine, and how thoroughly."""
    parser.add_argument("--list", type=Path, help="training list")
    parser.add_argument("--root", type=Path, help="folder or packed corpus that the lists' paths start from")
    parser.add_argument("--trials", type=Path, action="append", default=[], help="trial list (may be given again)")
    parser.add_argument("--trial_root", type=Path, help="root of the trial lists, if another")
    parser.add_argument("--fast", action="store_true", help="read headers only, no samples")
    parser.add_argument("--min_seconds", type=float, default=DEFAULT_MIN_SECONDS, help="shorter files are named")
    parser.add_argument("--png", type=Path, default=Path("doctor_durations.png"), help="histogram of durations")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="files read at once")


def run(arguments: argparse.Namespace) -> int:
    """Examine, print the table and the histograms, and return the worst level."""
    config = load_config(arguments.config_arguments).config if arguments.config_arguments else None
    # Late: --help and a mistyped option need neither torch nor matplotlib.
    from speakernet.assembly.checks import check_options
    from speakernet.checks.examination import examine
    from speakernet.checks.histograms import duration_histogram, write_duration_png

    patient = _patient(arguments, config)
    result = examine(patient, is_fast=arguments.fast, num_jobs=arguments.jobs)
    if config:
        result.findings.extend(check_options(config))
    out = sys.stdout
    out.write(table(result.findings) + "\n")
    for title, seconds in result.durations.items():
        out.write(f"\n{title}, durations\n{duration_histogram(seconds)}\n")
    if result.durations:
        write_duration_png(arguments.png, result.durations)
        out.write(f"\nhistograms: {arguments.png}\n")
    return exit_code(result.findings)


def _patient(arguments: argparse.Namespace, config: Config | None) -> "Patient":
    # Late: as above.
    from speakernet.checks.examination import Patient

    if config is None:
        root = arguments.trial_root or arguments.root
        return Patient(
            train_list=arguments.list,
            train_root=arguments.root,
            trials=tuple((path, root) for path in arguments.trials),
            min_seconds=arguments.min_seconds,
        )
    data = config.data
    lists = {
        (Path(path), Path(root) if root else None)
        for path, root in ((data.validation_list, data.validation_path), (data.test_list, data.test_path))
        if path
    }
    utterances = data.utterances_per_speaker
    return Patient(
        train_list=Path(data.train_list) if data.train_list else None,
        train_root=Path(data.train_path) if data.train_path else None,
        trials=tuple(sorted(lists, key=str)) + tuple((path, arguments.trial_root) for path in arguments.trials),
        save_path=Path(config.training.save_path or "exps"),
        min_utterances=utterances if isinstance(utterances, int) else METRIC_UTTERANCES,
        min_seconds=arguments.min_seconds,
        sample_rate=data.sample_rate,
    )
