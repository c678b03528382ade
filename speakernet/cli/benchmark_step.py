"""Measure the training step: each speed-up on and off against the step as one writes it by hand, in paired runs.

Random waveforms of the right shape; needs no data. Prints tables in Markdown.
"""

import argparse
import json
import sys

from speakernet.build.step_benchmark import VARIANTS, added_bytes, classic_config, measure_memory, measure_steps
from speakernet.config import load_config
from speakernet.files import human_bytes

TAKES_CONFIG = True
DEFAULT_VARIANTS = ["float32 + fused", "default", "default + channels_last"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Models, variants, sizes."""
    parser.add_argument(
        "--models", nargs="+", default=["ResNetSE34L"], help="networks to measure (default ResNetSE34L)"
    )
    parser.add_argument("--variants", nargs="+", default=DEFAULT_VARIANTS, help=f"any of: {', '.join(VARIANTS)}")
    parser.add_argument("--rounds", type=int, default=7, help="rounds in which every variant runs once (default 7)")
    parser.add_argument("--step_batch", type=int, default=64, help="crops of 2 s in a batch (default 64)")
    parser.add_argument("--memory", nargs="*", metavar="VARIANT", help="measure the peak memory of these instead")
    parser.add_argument("--memory_of", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Print one table a model."""
    base = load_config(arguments.config_arguments).config
    for model in arguments.models:
        config = classic_config(base, model)
        if arguments.memory_of:
            count = added_bytes(config, arguments.memory_of, arguments.step_batch)
            sys.stdout.write(json.dumps({"added_bytes": count}) + "\n")
        elif arguments.memory is not None:
            _print_memory(model, arguments.memory or ["default", "default + checkpointing"], arguments.step_batch)
        else:
            timings = measure_steps(
                config, arguments.variants, batch_size=arguments.step_batch, rounds=arguments.rounds
            )
            sys.stdout.write(f"\n{model}, {arguments.step_batch} crops of 2 s, {arguments.rounds} rounds\n\n")
            sys.stdout.write("| step | median seconds | quartile spread | of the plain step |\n|---|---|---|---|\n")
            for one in timings:
                sys.stdout.write(
                    f"| {one.name} | {one.median_seconds:.3f} | {one.quartile_spread_seconds:.3f} | {one.ratio:.3f} |\n"
                )
            sys.stdout.flush()
    return 0


def _print_memory(model: str, variants: list[str], batch_size: int) -> None:
    sys.stdout.write(f"\n{model}, {batch_size} crops of 2 s, each variant in a process of its own\n\n")
    sys.stdout.write("| step | memory added at the peak | of the first |\n|---|---|---|\n")
    counts = [measure_memory(model, variant, batch_size) for variant in variants]
    for variant, count in zip(variants, counts, strict=True):
        sys.stdout.write(f"| {variant} | {human_bytes(count)} | {count / counts[0]:.2f} |\n")
