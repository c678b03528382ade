"""Find the batch size that runs fastest within the available memory.

Runs real steps on random waveforms of the configured length, uncompiled (compiling each size would
take minutes), one micro-batch at a time if steps are accumulated. It reads the training list but no
audio, and writes nothing.
"""

import argparse
import functools
import math

from speakernet.cli.shared import load_configuration

TAKES_CONFIG = True


ARGUMENTS = {
    "--min_batch_size": {"type": int, "default": 8, "help": "smallest size to try (default 8)"},
    "--max_batch_size": {"type": int, "default": 512, "help": "largest size to try (default 512)"},
    "--memory_limit_gib": {
        "type": float,
        "default": 0.0,
        "help": "memory that a step may use on a CPU (default: 80 %% of free memory)",
    },
}


def run(arguments: argparse.Namespace) -> list[str]:
    """Return every size tried, the fastest, and a recommendation."""
    config = load_configuration(arguments.config_arguments).config
    # Written so that NaN is refused too; neither it nor infinity becomes an integer below.
    if not 0 <= arguments.memory_limit_gib < math.inf:
        raise ValueError(
            f"--memory_limit_gib: {arguments.memory_limit_gib:g}; expected 0 (the default) or more "
            "GiB"
        )
    # Late: torch takes two seconds to import, and a mistyped option should not wait for it.
    from speakernet.assembly.benchmark import count_utterances, find_batch_size
    from speakernet.training.batch_size import recommendation

    limit = int(arguments.memory_limit_gib * 2**30)
    # The fastest size is often not the largest that fits, so every size is timed. The advice
    # compares the fastest with the configured one.
    finder, best = find_batch_size(
        config, arguments.min_batch_size, arguments.max_batch_size, limit
    )
    lines = []
    for size, trial in sorted(finder.tried.items()):
        figures = f"{trial.throughput:8.1f} utterances/s, {trial.memory_bytes / 2**20:8.0f} MiB"
        lines.append(f"{size:6d}  {figures if trial.fits else 'does not fit'}")
    data = config.data
    advice = recommendation(
        finder.tried[data.utterances_per_batch],
        finder.tried[best],
        config.training,
        utterances_per_speaker=data.utterances_per_speaker,
        is_metric=config.loss.is_metric,
        count_utterances=functools.partial(count_utterances, data),
    )
    largest = f"largest tried that fits: {finder.largest}"
    return [*lines, f"fastest: {best} utterances per batch; {largest}", f"recommendation: {advice}"]
