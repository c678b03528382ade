"""Find the batch size that runs fastest within the memory there is, and say what it would do to training.

Runs real steps on random waveforms of the configured length, eagerly (compiling every size would take hours), a
micro-batch where steps are accumulated; reads the training list, no audio, and touches no run folder.
"""

import argparse
import math
import sys

from speakernet.cli.defaults import load_configuration

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
    """Print every size that was tried and the best one."""
    config = load_configuration(arguments.config_arguments).config
    gib = arguments.memory_limit_gib
    if gib is not None and not 2**-20 <= gib < math.inf:
        raise ValueError(f"--memory_limit_gib: {gib:g}; expected a number of GiB above 0")
    limit = None if gib is None else int(gib * 2**30)
    # Late: options are read, and refused, without torch.
    from speakernet.assembly.batch_size import advice, find_batch_size, planned_run

    run_of_it = planned_run(config)
    finder, best = find_batch_size(config, arguments.min_batch_size, arguments.max_batch_size, limit)
    for one in sorted(finder.measurements, key=lambda one: one.batch_size):
        outcome = (
            f"{one.throughput:8.1f} utterances/s, {one.memory_bytes / 2**20:8.0f} MiB" if one.fits else "does not fit"
        )
        sys.stdout.write(f"{one.batch_size:6d}  {outcome}\n")
    sys.stdout.write(
        f"fastest: {best} utterances in a batch; the largest tried that fits: {finder.largest_batch_size}\n"
    )
    sys.stdout.write("".join(f"{line}\n" for line in advice(config, finder, best, run_of_it)))
    return 0
