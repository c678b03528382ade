"""Measure loader and training step of a configuration, or, with --compare, our pipeline and the
original.

    python benchmark_performance.py --config exp01.yaml --num_batches 100
    python benchmark_performance.py --config exp01.yaml --compare --rounds 3 --json figures.json
    python benchmark_performance.py --config exp01.yaml --loading --num_batches 20 --rounds 4
    python benchmark_performance.py --scoring [PART …]
    python benchmark_performance.py --steps [all | VARIANT …]

All alternate (A B A B …) and print medians. --compare trains and evaluates whole epochs of the
configuration, each in a separate process; --loading reads the configuration's recordings in every
format, in this process. The first command is the same as `speakernet benchmark`, which needs no
checkout.
"""

import argparse

from speakernet.cli import benchmark

TAKES_CONFIG = True
ARGUMENTS = {
    **benchmark.ARGUMENTS,
    "--compare": {
        "action": "store_true",
        "help": "measure an epoch by the original pipeline and by ours",
    },
    "--loading": {
        "action": "store_true",
        "help": "measure loading by the original pipeline and by ours",
    },
    "--rounds": {
        "type": int,
        "default": 5,
        "help": "rounds of every suite (default %(default)s)",
    },
    "--num_utterances": {
        "type": int,
        "default": 200,
        "help": "with --loading: number of recordings (default %(default)s)",
    },
    "--scoring": {
        "nargs": "*",
        "metavar": "PART",
        "help": "measure scoring, score normalisation and metrics, or only these parts of them",
    },
    "--threads": {
        "type": int,
        "default": 0,
        "help": "with --scoring: torch threads (default: one per core)",
    },
    "--steps": {
        "nargs": "*",
        "metavar": "VARIANT",
        "help": "measure a step of ResNetSE34L against its plain definition in torch; `all`: with "
        "every speed-up on and off",
    },
    "--step_batch": {
        "type": int,
        "default": 64,
        "help": "with --steps: crops of 2 s per step (default %(default)s)",
    },
    # With these the suites start the processes that they measure.
    "--step_of": {"default": "", "help": argparse.SUPPRESS},
    "--epoch_of": {"default": "", "help": argparse.SUPPRESS},
}


def run(arguments: argparse.Namespace) -> list[str] | int:
    """Measure, print and write the figures."""
    for name in ("num_batches", "rounds", "num_utterances", "step_batch"):
        benchmark.refuse_below_one(name, getattr(arguments, name))
    # Imported late: help and errors for the options above need no torch.
    from benchmarks import suites

    # Two of the suites measure settings of a whole process, so they start this command again with
    # one of these two arguments, once for each thing to measure.
    if arguments.step_of or arguments.epoch_of:
        suites.be_measured(arguments)
        return 0
    if arguments.scoring is not None:
        figures = suites.scoring(arguments)
    elif arguments.steps is not None:
        figures = suites.steps(arguments)
    elif arguments.compare:
        figures = suites.epochs(arguments)
    elif arguments.loading:
        figures = suites.pipelines(arguments)
    else:
        return benchmark.run(arguments)
    benchmark.write_figures(arguments.json, figures)
    return 0
