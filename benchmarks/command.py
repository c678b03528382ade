"""Measure loader and training step of a configuration, and with --compare ours against the original pipeline.

    python benchmark_performance.py --config exp01.yaml --num_batches 100
    python benchmark_performance.py --config exp01.yaml --compare --rounds 3 --json figures.json
    python benchmark_performance.py --config exp01.yaml --loading --num_batches 20 --rounds 4
    python benchmark_performance.py --scoring [--scoring_trials veri_test.txt] [--recordings FOLDER]
    python benchmark_performance.py --steps ResNetSE34L VGGVox [--variants all | NAME …] [--memory]
    python benchmark_performance.py --models [NAME …] [--step_batch 16] [--rounds 5] [--compiled]
    python benchmark_performance.py --runtimes CAMPPlus ECAPA_TDNN
    python benchmark_performance.py --serving exps/exp01/best.pt [--clients 200] [--rounds 5]

All run in turn (A B A B …) and print medians. --compare trains and evaluates whole epochs of the configuration, a
process each; --loading reads the configuration's recordings in every form, in this process. The first line is
`speakernet benchmark`, which needs no checkout.
"""

import argparse
from pathlib import Path

from speakernet.cli import benchmark

TAKES_CONFIG = True
ARGUMENTS = benchmark.ARGUMENTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How much to measure, and where to write it."""
    parser.add_argument(
        "--compare",
        action="store_true",
        help="an epoch of the configuration by the original pipeline and by ours, and each measure alone, instead",
    )
    parser.add_argument(
        "--loading", action="store_true", help="loading and embedding, the original pipeline's against ours, instead"
    )
    parser.add_argument("--rounds", type=int, default=5, help="with all but the first: rounds (default %(default)s)")
    parser.add_argument(
        "--num_utterances",
        type=int,
        default=200,
        help="with --loading, --recordings: recordings to take (default %(default)s)",
    )
    parser.add_argument(
        "--scoring",
        nargs="*",
        metavar="PART",
        help="scoring, score normalisation and metrics (or parts of it), instead",
    )
    parser.add_argument("--scoring_trials", default="", metavar="LIST", help="with --scoring: list to take pairs from")
    parser.add_argument("--recordings", type=Path, metavar="FOLDER", help="with --scoring: also embed files from here")
    parser.add_argument("--threads", type=int, default=0, help="with --scoring: of torch (default: one a core)")
    parser.add_argument(
        "--steps",
        nargs="*",
        metavar="MODEL",
        help="a step of these networks (default ResNetSE34L) against their plain definitions in torch, instead",
    )
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="with --steps: speed-ups on and off, or `all`")
    parser.add_argument(
        "--step_batch", type=int, default=64, help="with --steps, --models: crops of 2 s (default %(default)s)"
    )
    parser.add_argument(
        "--models",
        nargs="*",
        metavar="NAME",
        help="training step and embedding of these networks (default: the smallest of each family), instead",
    )
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="with --models: steps eager and compiled in turn, and the seconds of compiling, instead",
    )
    parser.add_argument(
        "--memory", nargs="*", metavar="NAME", help="with --steps: the peak memory of these variants, instead of time"
    )
    parser.add_argument(
        "--runtimes",
        nargs="+",
        metavar="NAME",
        help="real-time factors of these networks in torch and ONNX Runtime, on one and two threads, instead",
    )
    parser.add_argument("--serving", type=Path, metavar="MODEL", help="the latency of a server of this model, instead")
    parser.add_argument("--clients", type=int, default=200, help="with --serving: at once (default %(default)s)")
    # What a process that is measured was started with.
    for name in ("--step_of", "--memory_of", "--epoch_of", "--embedding_of"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> list[str] | int:
    """Measure, print, write."""
    for name in ("num_batches", "rounds", "num_utterances", "step_batch", "clients"):
        benchmark.refuse_below_one(name, getattr(arguments, name))
    # Late: the options above are explained, and refused, without torch.
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
