"""Measure the loader and the training step of a configuration: batch rate, step time, and time
spent waiting for data.

    speakernet benchmark --config exp01.yaml --num_batches 100 [--json figures.json]

Comparisons with other pipelines are in the checkout: `python benchmark_performance.py --help`.
"""

import argparse
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speakernet.cli.shared import load_configuration, output_path
from speakernet.files import atomic_write
from speakernet.machine.facts import system_info

TAKES_CONFIG = True

logger = logging.getLogger(__name__)


ARGUMENTS = {
    "--num_batches": {
        "type": int,
        "default": 100,
        "help": "batches and steps to measure (default %(default)s)",
    },
    "--json": {"type": output_path, "metavar": "FILE", "help": "write all figures to a file"},
}


def run(arguments: argparse.Namespace) -> list[str]:
    """Measure, write, return the table."""
    refuse_below_one("num_batches", arguments.num_batches)
    config = load_configuration(arguments.config_arguments).config
    # Late: bad options are refused before torch is imported.
    from speakernet.assembly.benchmark import measure
    from speakernet.training.timing import table

    # The loader is measured alone and with the step, to show which of the two limits the speed.
    figures = measure(config, arguments.num_batches)
    write_figures(arguments.json, figures)
    return ["", table(figures)]


def refuse_below_one(name: str, value: int) -> None:
    """Refuse a count below one."""
    if value < 1:
        raise ValueError(f"--{name}: {value}; expected at least 1")


def write_figures(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Write the figures and a description of the machine; do nothing without a path."""
    if path is None:
        return
    with atomic_write(path) as file:
        json.dump({"system": system_info(), **figures}, file, indent=1)
    logger.info("figures written to %s", path)
