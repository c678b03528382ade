"""The part of `speakernet benchmark` that measures training: steps with speed-ups on and off, memory, whole epochs.

Steps run on random waveforms of the right shape, epochs on the configuration's data. Prints tables in Markdown.
"""

import argparse
import dataclasses
import json
import sys
from typing import Any

from benchmarks.epoch import measure_epochs, serve_epochs
from benchmarks.paired import Timing
from benchmarks.plain_models import PLAIN_MODELS
from benchmarks.steps import (
    BY_HAND,
    PLAIN_BF16,
    VARIANTS,
    classic_config,
    measure_memory,
    measure_steps,
    serve_steps,
    step_memory,
)
from speakernet.assembly.data import make_synthetic_corpus
from speakernet.config import load_config
from speakernet.files import human_bytes
from speakernet.models import MODELS
from speakernet.registry import lookup

DEFAULT_VARIANTS = (PLAIN_BF16, BY_HAND, "default")


def measure_training_steps(arguments: argparse.Namespace) -> dict[str, Any]:
    """Print one table a model; returns the figures."""
    if arguments.step_of or arguments.memory_of:
        _be_measured(arguments)
        return {}
    figures: dict[str, Any] = {}
    models = arguments.steps or ["ResNetSE34L"]
    known = MODELS if arguments.memory is not None else PLAIN_MODELS
    for model in models:
        lookup(known, model, "model" if known is MODELS else "plain definition")
    for model in models:
        if arguments.memory is not None:
            figures[model] = _measure_memory(model, arguments)
        else:
            figures[model] = _measure_speed(model, arguments)
        sys.stdout.flush()
    return {"steps": figures}


def measure_whole_epochs(arguments: argparse.Namespace) -> dict[str, Any]:
    """Print the table of whole epochs; returns the figures."""
    if arguments.epoch_of:
        serve_epochs(make_synthetic_corpus(load_config(arguments.config_arguments).config), arguments.epoch_of)
        return {}
    timings = measure_epochs(arguments.config_arguments, arguments.rounds)
    sys.stdout.write("\n| epoch with evaluation | median seconds | quartile spread | of the classic one |\n")
    sys.stdout.write("|---|---|---|---|\n")
    _write_rows(timings)
    return {"epochs": [dataclasses.asdict(one) for one in timings]}


def _write_rows(timings: list[Timing]) -> None:
    for one in timings:
        sys.stdout.write(
            f"| {one.name} | {one.median_seconds:.3f} | {one.quartile_spread_seconds:.3f} | {one.ratio:.3f} |\n"
        )


def _measure_speed(model: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    names = list(VARIANTS) if arguments.variants == ["all"] else arguments.variants or DEFAULT_VARIANTS
    timings = measure_steps(
        model, names, batch_size=arguments.step_batch, rounds=arguments.rounds, arguments=arguments.config_arguments
    )
    sys.stdout.write(f"\n{model}, {arguments.step_batch} crops of 2 s, {arguments.rounds} rounds\n\n")
    sys.stdout.write("| step | median seconds | quartile spread | of the plain definition |\n|---|---|---|---|\n")
    _write_rows(timings)
    return [dataclasses.asdict(one) for one in timings]


def _measure_memory(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    variants = arguments.memory or ["default", "default + checkpointing"]
    sys.stdout.write(f"\n{model}, {arguments.step_batch} crops of 2 s, each variant in a process of its own\n\n")
    sys.stdout.write("| step | tensors at the peak | of the first | the process grew by | of the first |\n")
    sys.stdout.write("|---|---|---|---|---|\n")
    found = {
        variant: measure_memory(model, variant, arguments.step_batch, arguments.config_arguments)
        for variant in variants
    }
    first = found[variants[0]]
    for variant, one in found.items():
        sys.stdout.write(
            f"| {variant} | {human_bytes(one.tensor_bytes)} | {one.tensor_bytes / first.tensor_bytes:.2f} "
            f"| {human_bytes(one.process_bytes)} | {one.process_bytes / first.process_bytes:.2f} |\n"
        )
    return {variant: dataclasses.asdict(one) for variant, one in found.items()}


def _be_measured(arguments: argparse.Namespace) -> None:
    """What runs in a variant's own process."""
    config = classic_config(load_config(arguments.config_arguments).config, arguments.steps[0])
    if arguments.step_of:
        serve_steps(config, arguments.step_of, arguments.step_batch)
    else:
        memory = step_memory(config, arguments.memory_of, arguments.step_batch)
        sys.stdout.write(json.dumps(dataclasses.asdict(memory)) + "\n")
