"""Find the batch size that runs fastest within the available memory.

Runs real steps on random waveforms of the configured length, without compiling (every size would take minutes), a
micro-batch at a time if steps are accumulated; reads the training list, no audio, and writes nothing.
"""

import argparse
import math
import sys

from speakernet.cli import load_configuration

TAKES_CONFIG = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The range of sizes, and how much memory a CPU may use."""
    parser.add_argument("--min_batch_size", type=int, default=8, help="smallest size worth having (default 8)")
    parser.add_argument("--max_batch_size", type=int, default=512, help="largest size to try (default 512)")
    parser.add_argument(
        "--memory_limit_gib",
        type=float,
        help="memory that a step may add on a CPU (default: 80 %% of what is free)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print every size that was tried, the best one and a recommendation."""
    config = load_configuration(arguments.config_arguments).config
    gib = arguments.memory_limit_gib
    if gib is not None and not 2**-20 <= gib < math.inf:
        raise ValueError(f"--memory_limit_gib: {gib:g}; expected a number of GiB above 0")
    limit = None if gib is None else int(gib * 2**30)
    # Late: torch takes two seconds, and a mistyped option should not wait for it.
    from speakernet.assembly.benchmark import configured_batch_size, find_batch_size, recommendation

    finder, best = find_batch_size(config, arguments.min_batch_size, arguments.max_batch_size, limit)
    for size, one in sorted(finder.tried.items()):
        figures = f"{one.throughput:8.1f} utterances/s, {one.memory_bytes / 2**20:8.0f} MiB"
        sys.stdout.write(f"{size:6d}  {figures if one.fits else 'does not fit'}\n")
    sys.stdout.write(f"fastest: {best} utterances in a batch; the largest tried that fits: {finder.largest}\n")
    advice = recommendation(config, finder.tried[configured_batch_size(config)], finder.tried[best])
    sys.stdout.write(f"recommendation: {advice}\n")
    return 0
