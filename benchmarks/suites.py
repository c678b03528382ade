"""The entry points of the suites: they take command-line arguments, print tables and return plain
figures.
"""

import argparse
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.data import prepare_data
from benchmarks.epoch import compare_epochs, epoch_table, serve_epochs
from benchmarks.loader import compare_loading
from benchmarks.scoring import PARTS, measure_scoring
from benchmarks.steps import (
    BY_HAND,
    NETWORK,
    PLAIN_BF16,
    VARIANTS,
    classic_config,
    measure_steps,
    serve_steps,
)
from benchmarks.timing import markdown_table, speedup_table
from speakernet.assembly.inputs import make_synthetic_corpus
from speakernet.config import load_config
from speakernet.config.schema import with_changes
from speakernet.files import human_bytes
from speakernet.machine.facts import usable_cores
from speakernet.options import lookup

logger = logging.getLogger(__name__)

# Batches of one size, whatever the configuration has, so that figures of different recipes can be
# compared.
COMPARED_BATCH_SIZE = 64
DEFAULT_VARIANTS = (PLAIN_BF16, BY_HAND, "default")
STEP_FIGURES = ("median_seconds", "quartile_spread_seconds", "ratio")


def pipelines(arguments: argparse.Namespace) -> dict[str, Any]:
    """The loaders of both pipelines on the configuration's recordings."""
    config = make_synthetic_corpus(load_config(arguments.config_arguments).config)
    config = with_changes(config, data={"batch_size": COMPARED_BATCH_SIZE})
    # One thread for both: with different numbers of threads the comparison would be unfair.
    torch.set_num_threads(1)
    comparisons = []
    with tempfile.TemporaryDirectory(prefix="speakernet-benchmark-") as folder:
        data = prepare_data(config, Path(folder), arguments.num_utterances)
        for figures in compare_loading(config, data, arguments.num_batches, arguments.rounds):
            comparisons.append(figures)
            logger.info("%s: %.1fx", figures["measure"], figures["ratio"])
    sys.stdout.write("\n" + speedup_table(comparisons) + "\n")
    return {"comparisons": comparisons}


def scoring(arguments: argparse.Namespace) -> dict[str, Any]:
    """Scoring, score normalisation and metrics at full size, row by row as they are done."""
    # Unknown names are refused before the first part, which may take minutes.
    for part in arguments.scoring:
        lookup(PARTS, part, "part of --scoring")
    threads = arguments.threads or usable_cores()
    figures = []
    rows = []
    for part in arguments.scoring or PARTS:
        cost = measure_scoring(part, rounds=arguments.rounds, threads=threads)
        median = cost["median_seconds"]
        cells = [
            cost["name"],
            f"{cost['num_items'] / median:,.0f}/s",
            f"{median:.3g} ({cost['lowest_seconds']:.3g} to {cost['highest_seconds']:.3g})",
            human_bytes(cost["peak_bytes"]),
            f"{cost['load']:.1f}",
        ]
        logger.info("%s", ", ".join(cells))
        rows.append(cells)
        figures.append(cost)
    columns = ("operation", "rate", "seconds (lowest to highest)", "peak memory", "load")
    sys.stdout.write(f"\n{markdown_table(columns, rows)}\n")
    return {"scoring": figures}


def steps(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a training step of the classic network, against its plain definition's."""
    names = arguments.steps or DEFAULT_VARIANTS
    if names == ["all"]:
        names = list(VARIANTS)
    timings = measure_steps(
        names,
        batch_size=arguments.step_batch,
        rounds=arguments.rounds,
        arguments=arguments.config_arguments,
    )
    sys.stdout.write(
        f"\n{NETWORK}, {arguments.step_batch} crops of 2 s, {arguments.rounds} rounds\n\n"
    )
    rows = []
    for timing in timings:
        rows.append([timing["name"], *(f"{timing[key]:.3f}" for key in STEP_FIGURES)])
    columns = ("step", "median seconds", "quartile spread", "ratio to the plain definition")
    sys.stdout.write(markdown_table(columns, rows) + "\n")
    return {"steps": timings}


def epochs(arguments: argparse.Namespace) -> dict[str, Any]:
    """A whole epoch of the configuration, original and optimised."""
    figures = compare_epochs(arguments.config_arguments, arguments.num_batches, arguments.rounds)
    sys.stdout.write("\n" + epoch_table(figures) + "\n")
    return {"epochs": figures}


def be_measured(arguments: argparse.Namespace) -> None:
    """The work of a process that one of the suites above has started."""
    config = load_config(arguments.config_arguments).config
    # The measuring process has passed on its own arguments, so both load the same configuration.
    if arguments.epoch_of:
        serve_epochs(make_synthetic_corpus(config), arguments.epoch_of, arguments.num_batches)
    else:
        serve_steps(classic_config(config), arguments.step_of, arguments.step_batch)
