"""Measure loader and training step of a configuration, or, with --compare, our pipeline and the
original.

    python benchmark_performance.py --config exp01.yaml --num_batches 100
    python benchmark_performance.py --config exp01.yaml --compare --rounds 3 --json figures.json
    python benchmark_performance.py --config exp01.yaml --loading --num_batches 20 --rounds 4
    python benchmark_performance.py --scoring [--scoring_trials veri_test.txt] [--recordings FOLDER]
    python benchmark_performance.py --steps ResNetSE34L VGGVox [--variants all | NAME …] [--memory]
    python benchmark_performance.py --models [NAME …] [--step_batch 16] [--rounds 5] [--compiled]
    python benchmark_performance.py --runtimes CAMPPlus ECAPA_TDNN
    python benchmark_performance.py --serving exps/exp01/best.pt [--clients 200] [--rounds 5]

All alternate (A B A B …) and print medians. --compare trains and evaluates whole epochs of the
configuration, each in a separate process; --loading reads the configuration's recordings in every
format, in this process. The first command is the same as `speakernet benchmark`, which needs no
checkout.
"""

import argparse
from pathlib import Path

from speakernet.cli import benchmark

TAKES_CONFIG = True
ARGUMENTS = benchmark.ARGUMENTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--compare",
        action="store_true",
        help="measure an epoch by the original pipeline and by ours, and the effect of each "
        "measure alone",
    )
    parser.add_argument(
        "--loading",
        action="store_true",
        help="measure loading and embedding by the original pipeline and by ours",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds of every suite (default %(default)s)"
    )
    parser.add_argument(
        "--num_utterances",
        type=int,
        default=200,
        help="with --loading, --recordings: number of recordings (default %(default)s)",
    )
    parser.add_argument(
        "--scoring",
        nargs="*",
        metavar="PART",
        help="measure scoring, score normalisation and metrics, or only these parts of them",
    )
    parser.add_argument(
        "--scoring_trials", default="", metavar="LIST", help="with --scoring: trials to score"
    )
    parser.add_argument(
        "--recordings",
        type=Path,
        metavar="FOLDER",
        help="with --scoring: also embed these recordings",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=0,
        help="with --scoring: torch threads (default: one per core)",
    )
    parser.add_argument(
        "--steps",
        nargs="*",
        metavar="MODEL",
        help="measure a step of these networks (default ResNetSE34L) against their plain "
        "definitions in torch",
    )
    parser.add_argument(
        "--variants", nargs="+", metavar="NAME", help="with --steps: speed-ups on and off, or `all`"
    )
    parser.add_argument(
        "--step_batch",
        type=int,
        default=64,
        help="with --steps, --models: crops of 2 s per step (default %(default)s)",
    )
    parser.add_argument(
        "--models",
        nargs="*",
        metavar="NAME",
        help="measure training step and embedding of these networks (default: the smallest of each "
        "family)",
    )
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="with --models: alternate eager and compiled steps, and measure the time to compile",
    )
    parser.add_argument(
        "--memory",
        nargs="*",
        metavar="NAME",
        help="with --steps: the peak memory of these variants, instead of time",
    )
    parser.add_argument(
        "--runtimes",
        nargs="+",
        metavar="NAME",
        help="measure real-time factors of these networks in torch and ONNX Runtime, on one and "
        "two threads",
    )
    parser.add_argument(
        "--serving",
        type=Path,
        metavar="MODEL",
        help="measure the latency of a server with this model",
    )
    parser.add_argument(
        "--clients", type=int, default=200, help="with --serving: its clients (default %(default)s)"
    )
    # Arguments with which the measured processes are started.
    for name in ("--step_of", "--memory_of", "--epoch_of", "--embedding_of"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> list[str] | int:
    """Measure, print and write the figures."""
    for name in ("num_batches", "rounds", "num_utterances", "step_batch", "clients"):
        benchmark.refuse_below_one(name, getattr(arguments, name))
    # Imported late: help and errors for the options above need no torch.
    from benchmarks import suites

    if arguments.step_of or arguments.memory_of or arguments.epoch_of or arguments.embedding_of:
        suites.be_measured(arguments)
        return 0
    if arguments.scoring is not None:
        figures = suites.scoring(arguments)
    elif arguments.memory is not None:
        figures = suites.memory(arguments)
    elif arguments.models is not None:
        figures = suites.models(arguments)
    elif arguments.steps is not None:
        figures = suites.steps(arguments)
    elif arguments.runtimes is not None:
        figures = suites.runtimes(arguments)
    elif arguments.serving is not None:
        figures = suites.serving(arguments)
    elif arguments.compare:
        figures = suites.epochs(arguments)
    elif arguments.loading:
        figures = suites.pipelines(arguments)
    else:
        return benchmark.run(arguments)
    benchmark.write_figures(arguments.json, figures)
    return 0
