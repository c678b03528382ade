"""Measure loader and training step of a configuration, and with --compare ours against the classic pipeline.

    speakernet benchmark --config exp01.yaml --num_batches 100
    speakernet benchmark --config exp01.yaml --num_batches 30 --compare --json figures.json
    speakernet benchmark --scoring [--scoring_trials veri_test.txt] [--recordings FOLDER]
    speakernet benchmark --steps ResNetSE34L VGGVox [--variants all | NAME …] [--memory]
    speakernet benchmark --epoch --config speechocean.yaml --augment True [--rounds 3]

--compare runs both pipelines in turn (A B A B …) on the same recordings, taken from the configuration's corpus, in this
very process, and prints medians and their ratio.
"""

import argparse
import dataclasses
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

TAKES_CONFIG = True

logger = logging.getLogger(__name__)

COMPARED_BATCH_SIZE = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How much to measure, and where to write it."""
    parser.add_argument(
        "--num_batches", type=int, default=100, help="batches (and steps) a measure (default %(default)s)"
    )
    parser.add_argument("--compare", action="store_true", help="the classic pipeline against ours, instead")
    parser.add_argument(
        "--rounds", type=int, default=5, help="with --compare, --scoring, --steps: rounds (default %(default)s)"
    )
    parser.add_argument(
        "--num_utterances",
        type=int,
        default=200,
        help="with --compare, --recordings: recordings to take (default %(default)s)",
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
    parser.add_argument("--step_batch", type=int, default=64, help="with --steps: crops of 2 s (default %(default)s)")
    parser.add_argument(
        "--memory", nargs="*", metavar="NAME", help="with --steps: the peak memory of these variants, instead of time"
    )
    parser.add_argument(
        "--epoch", action="store_true", help="a whole epoch (loading, steps, evaluation), classic and ours, instead"
    )
    parser.add_argument("--epoch_of", help=argparse.SUPPRESS)
    parser.add_argument("--step_of", help=argparse.SUPPRESS)
    parser.add_argument("--memory_of", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to a file")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, write."""
    from speakernet.assembly.data import make_synthetic_corpus
    from speakernet.config import load_config
    from speakernet.files import atomic_write
    from speakernet.machine.settings import system_info

    for name in ("num_batches", "rounds", "num_utterances", "step_batch"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name}: {getattr(arguments, name)}; expected at least 1")
    if arguments.scoring is not None:
        figures = _scoring(arguments)
    elif arguments.steps is not None or arguments.memory is not None:
        from benchmarks.training import measure_training_steps

        figures = measure_training_steps(arguments)
    elif arguments.epoch or arguments.epoch_of:
        from benchmarks.training import measure_whole_epochs

        figures = measure_whole_epochs(arguments)
    else:
        config = make_synthetic_corpus(load_config(arguments.config_arguments).config)
        figures = _compare(config, arguments) if arguments.compare else _measure(config, arguments.num_batches)
    if arguments.json:
        with atomic_write(arguments.json) as file:
            json.dump({"system": system_info(), **figures}, file, indent=1)
        logger.info("figures written to %s", arguments.json)
    return 0


def _measure(config: Any, num_batches: int) -> dict[str, Any]:
    from benchmarks.loader import measure_loader, measure_training
    from speakernet.assembly.data import build_training_loader
    from speakernet.assembly.training import choose_device, prepare_machine
    from speakernet.files import human_bytes

    prepare_machine(config)
    loader = build_training_loader(config, choose_device(config))
    try:
        times = measure_loader(loader, num_batches)
        steps = measure_training(config, loader, num_batches)
    finally:
        loader.close()
    rows = [
        ("loader alone", f"{times.utterances_per_second:,.0f} utterances/s"),
        (
            "a batch from the loader alone",
            f"{1000 * times.median_seconds:.2f} ms (95 % under {1000 * times.p95_seconds:.2f} ms, "
            f"slowest {1000 * times.slowest_seconds:.1f} ms)",
        ),
        ("training", f"{steps['utterances_per_second']:,.0f} utterances/s, precision {steps['precision']}"),
        ("a step", f"{1000 / steps['steps_per_second']:.1f} ms"),
        ("waiting for data", f"{100 * steps['data_wait_share']:.1f} % of the step"),
        ("an epoch", f"{steps['epoch_seconds']:.1f} s"),
    ]
    for name, key in (("peak memory", "process_peak_bytes"), ("peak GPU memory", "device_peak_bytes")):
        if key in steps:
            rows.append((name, human_bytes(steps[key])))
    if "gpu_utilisation_percent" in steps:
        rows.append(("GPU utilisation", f"{steps['gpu_utilisation_percent']:.0f} %"))
    sys.stdout.write("\n| measure | value |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows))
    return {"loader": dataclasses.asdict(times), "training": steps}


def _compare(config: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    from benchmarks.data import prepare_data
    from benchmarks.loader import compare_evaluation, compare_loading, measure_worker_memory
    from benchmarks.timing import as_plain, comparison_table

    # A core is a core: more threads in one pipeline than in the other would compare something else.
    torch.set_num_threads(1)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=COMPARED_BATCH_SIZE))
    done = []
    with tempfile.TemporaryDirectory(prefix="speakernet-benchmark-") as folder:
        # Lookup tables of recordings that are gone in a minute are not worth keeping.
        os.environ["SPEAKERNET_CACHE"] = str(Path(folder) / "cache")
        data = prepare_data(config, Path(folder), arguments.num_utterances)
        for comparison in compare_loading(config, data, arguments.num_batches, arguments.rounds):
            done.append(comparison)
            logger.info("%s: %.1f times (%g wanted)", comparison.measure, comparison.ratio, comparison.wanted)
        done += compare_evaluation(config, data, min(12, arguments.num_utterances), arguments.rounds)
        memory = measure_worker_memory(config, data)
    sys.stdout.write("\n" + comparison_table(done) + "\n\n" + _memory_line(memory) + "\n")
    return {"comparisons": [as_plain(one) for one in done], "worker_memory": memory}


def _scoring(arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.scoring import PARTS, compare_embedding, measure_scoring
    from benchmarks.timing import as_plain, comparison_table
    from speakernet.files import human_bytes
    from speakernet.machine.limits import usable_cores

    unknown = [part for part in arguments.scoring if part not in PARTS]
    if unknown:
        raise ValueError(f"--scoring: unknown part {unknown[0]!r}; expected some of {', '.join(PARTS)}")
    threads, rounds = arguments.threads or usable_cores(), arguments.rounds
    done = []
    parts = arguments.scoring or ([] if arguments.recordings else list(PARTS))
    if parts:
        sys.stdout.write("| operation | rate | seconds (lowest to highest) | CPU seconds | peak memory | load |\n")
        sys.stdout.write("|---|---|---|---|---|---|\n")
    for part in parts:
        one = measure_scoring(part, rounds=rounds, threads=threads, trials=arguments.scoring_trials)
        sys.stdout.write(
            f"| {one.name} | {one.num_items / one.median_seconds:,.0f}/s | {one.median_seconds:.3g} "
            f"({one.lowest_seconds:.3g} to {one.highest_seconds:.3g}) | {one.cpu_seconds:.3g} "
            f"| {human_bytes(one.peak_bytes)} | {one.load:.1f} |\n"
        )
        sys.stdout.flush()
        done.append(dataclasses.asdict(one))
    figures: dict[str, Any] = {"scoring": done}
    if arguments.recordings:
        embedding = compare_embedding(arguments.recordings, arguments.num_utterances, rounds, threads)
        sys.stdout.write("\n" + comparison_table([embedding]) + "\n")
        figures["embedding"] = as_plain(embedding)
    return figures


def _memory_line(memory: dict[str, Any]) -> str:
    from speakernet.files import human_bytes

    bare = memory["bare_interpreter_bytes"]
    parts = [f"an interpreter with torch: {human_bytes(bare)}"]
    if "fork_bytes" in memory:
        # A forked worker shares the interpreter itself, so all that it has alone was added.
        parts.append(f"forked worker: {human_bytes(max(memory['fork_bytes']))} in all")
    if "spawn_bytes" in memory:
        most = max(memory["spawn_bytes"])
        parts.append(f"spawned worker: {human_bytes(most)}, {human_bytes(max(0, most - bare))} beyond the interpreter")
    return f"Unique memory of a worker, list of {memory['num_rows']:,} rows: " + "; ".join(parts)
