"""The entry points of the suites: they take command-line arguments, print tables and return plain
figures.
"""

import argparse
import dataclasses
import json
import logging
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.data import prepare_data
from benchmarks.embedding import compare_embedding, serve_embedding
from benchmarks.epoch import compare_epochs, epoch_tables, serve_epochs
from benchmarks.families import SMALLEST, load_now, measure_compiled, measure_models
from benchmarks.loader import compare_evaluation, compare_loading, measure_worker_memory
from benchmarks.plain_models import PLAIN_MODELS
from benchmarks.scoring import PARTS, measure_scoring
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
from benchmarks.timing import Timing, as_plain, speedup_table
from speakernet.assembly.inputs import make_synthetic_corpus
from speakernet.config import load_config
from speakernet.config.schema import Config, replaced
from speakernet.files import human_bytes
from speakernet.machine.facts import usable_cores
from speakernet.models.options import MODELS
from speakernet.options import lookup

logger = logging.getLogger(__name__)

COMPARED_BATCH_SIZE = 64
MAX_EMBEDDED = 12
"""Recordings that `--loading` embeds; each takes about a second."""
DEFAULT_MODEL = "ResNetSE34L"
DEFAULT_VARIANTS = (PLAIN_BF16, BY_HAND, "default")
DEFAULT_MEMORY_VARIANTS = ("default", "default + checkpointing")


def pipelines(arguments: argparse.Namespace) -> dict[str, Any]:
    """Loader, embedding and scoring of both pipelines on the configuration's recordings."""
    config = make_synthetic_corpus(load_config(arguments.config_arguments).config)
    config = replaced(config, data={"batch_size": COMPARED_BATCH_SIZE})
    # One thread for both: with different numbers of threads the comparison would be unfair.
    torch.set_num_threads(1)
    done = []
    with tempfile.TemporaryDirectory(prefix="speakernet-benchmark-") as folder:
        data = prepare_data(config, Path(folder), arguments.num_utterances)
        for one in compare_loading(config, data, arguments.num_batches, arguments.rounds):
            done.append(one)
            logger.info("%s: %.1f times (%g wanted)", one.measure, one.ratio, one.wanted)
        done += compare_evaluation(
            config, data, min(MAX_EMBEDDED, arguments.num_utterances), arguments.rounds
        )
        workers = measure_worker_memory(config, data)
    sys.stdout.write("\n" + speedup_table(done) + "\n\n" + _memory_line(workers) + "\n")
    return {"comparisons": [as_plain(one) for one in done], "worker_memory": workers}


def scoring(arguments: argparse.Namespace) -> dict[str, Any]:
    """Scoring, score normalisation and metrics at full size, row by row as they are done;
    optionally embedding.
    """
    for part in arguments.scoring:
        lookup(PARTS, part, "part of --scoring")
    threads = arguments.threads or usable_cores()
    rounds = arguments.rounds
    parts = arguments.scoring or ([] if arguments.recordings else list(PARTS))
    done = []
    if parts:
        _begin_table(
            "operation", "rate", "seconds (lowest to highest)", "CPU seconds", "peak memory", "load"
        )
    for part in parts:
        one = measure_scoring(part, rounds=rounds, threads=threads, trials=arguments.scoring_trials)
        _row(
            one.name,
            f"{one.num_items / one.median_seconds:,.0f}/s",
            f"{one.median_seconds:.3g} ({one.lowest_seconds:.3g} to {one.highest_seconds:.3g})",
            f"{one.cpu_seconds:.3g}",
            human_bytes(one.peak_bytes),
            f"{one.load:.1f}",
        )
        done.append(dataclasses.asdict(one))
    figures: dict[str, Any] = {"scoring": done}
    if arguments.recordings:
        embedding = compare_embedding(
            arguments.recordings, arguments.num_utterances, rounds, threads
        )
        sys.stdout.write("\n" + speedup_table([embedding]) + "\n")
        figures["embedding"] = as_plain(embedding)
    return figures


def steps(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a training step against the plain definition's, one table per model."""
    models = arguments.steps or [DEFAULT_MODEL]
    for model in models:
        lookup(PLAIN_MODELS, model, "plain definition")
    names = (
        list(VARIANTS) if arguments.variants == ["all"] else arguments.variants or DEFAULT_VARIANTS
    )
    figures = {}
    for model in models:
        timings = measure_steps(
            model,
            names,
            batch_size=arguments.step_batch,
            rounds=arguments.rounds,
            arguments=arguments.config_arguments,
        )
        sys.stdout.write(
            f"\n{model}, {arguments.step_batch} crops of 2 s, {arguments.rounds} rounds\n\n"
        )
        _timing_table("step", "ratio to the plain definition", timings)
        figures[model] = [dataclasses.asdict(one) for one in timings]
    return {"steps": figures}


def models(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a training step and of an embedding for each network, with its parameters and
    operations.
    """
    config = load_config(arguments.config_arguments).config
    before = load_now()
    batch_size = arguments.step_batch
    if arguments.compiled:
        return _compiled(config, arguments)
    done = measure_models(
        config, arguments.models or SMALLEST, batch_size=batch_size, rounds=arguments.rounds
    )
    _begin_table(
        "network",
        "parameters",
        "MACs",
        f"training step of {batch_size} crops, s",
        "embedding of 2 s, ms",
    )
    for one in done:
        published: Any = MODELS[one.name].options.published
        _row(
            f"`{one.name}`",
            f"{published.parameters / 1e6:.2f} M",
            f"{published.macs / 1e9:.2f} G",
            f"{one.step_seconds:.3f} ({one.step_spread_seconds:.3f})",
            f"{1000 * one.embedding_seconds:.1f} ({1000 * one.embedding_spread_seconds:.1f})",
        )
    threads = torch.get_num_threads()
    after = load_now()
    sys.stdout.write(
        f"\nMedians of {arguments.rounds} alternating rounds (interquartile range), {threads} "
        f"threads, load {before:.1f} before and {after:.1f} after\n"
    )
    return {
        "models": [dataclasses.asdict(one) for one in done],
        "threads": threads,
        "load": [before, after],
    }


def _compiled(config: Config, arguments: argparse.Namespace) -> dict[str, Any]:
    before = load_now()
    batch_size = arguments.step_batch
    done = []
    _begin_table(
        "network",
        f"training step of {batch_size} crops, s",
        "compiled, s",
        "ratio",
        "compiling, s",
        "loss difference",
    )
    for one in measure_compiled(
        config, arguments.models or SMALLEST, batch_size=batch_size, rounds=arguments.rounds
    ):
        _row(
            f"`{one.name}`",
            f"{one.eager_seconds:.3f}",
            f"{one.compiled_seconds:.3f}",
            f"{one.ratio:.2f}",
            f"{one.compile_seconds:.0f}",
            f"{one.loss_difference:.1e}",
        )
        done.append(dataclasses.asdict(one))
    sys.stdout.write(
        f"\nMedians of {arguments.rounds} alternating rounds, {torch.get_num_threads()} threads, "
        f"load {before:.1f} before and {load_now():.1f} after\n"
    )
    return {"compiled": done}


def memory(arguments: argparse.Namespace) -> dict[str, Any]:
    """Peak memory of a training step, one table per model."""
    models = arguments.steps or [DEFAULT_MODEL]
    for model in models:
        lookup(MODELS, model, "model")
    figures = {}
    for model in models:
        sys.stdout.write(
            f"\n{model}, {arguments.step_batch} crops of 2 s, each variant in a separate "
            "process\n\n"
        )
        found = {
            variant: measure_memory(
                model, variant, arguments.step_batch, arguments.config_arguments
            )
            for variant in arguments.memory or DEFAULT_MEMORY_VARIANTS
        }
        _begin_table(
            "step",
            "peak of tensors",
            "ratio to the first",
            "growth of the process",
            "ratio to the first",
        )
        first = next(iter(found.values()))
        for variant, one in found.items():
            _row(
                variant,
                human_bytes(one.tensor_bytes),
                f"{one.tensor_bytes / first.tensor_bytes:.2f}",
                human_bytes(one.process_bytes),
                f"{one.process_bytes / first.process_bytes:.2f}",
            )
        figures[model] = {variant: dataclasses.asdict(one) for variant, one in found.items()}
    return {"steps": figures}


def epochs(arguments: argparse.Namespace) -> dict[str, Any]:
    """A whole epoch of the configuration, original and optimised, and the effect of each measure
    alone.
    """
    figures = compare_epochs(arguments.config_arguments, arguments.num_batches, arguments.rounds)
    sys.stdout.write("\n" + epoch_tables(figures) + "\n")
    return {"epochs": figures}


def runtimes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Real-time factors of networks in torch and ONNX Runtime, one recording at a time."""
    # Imported late: only these two suites need the extras `export` and `serve`.
    from benchmarks.inference import AUDIO_SECONDS, measure_runtimes

    before = load_now()
    done = []
    _begin_table("network", "runtime", "threads", "real-time factor (interquartile range)")
    for name in arguments.runtimes:
        for one in measure_runtimes(name, arguments.rounds):
            _row(
                f"`{one.name}`",
                one.runtime,
                str(one.threads),
                f"{one.real_time_factor:.4f} ({one.spread:.4f})",
            )
            done.append(dataclasses.asdict(one))
    sys.stdout.write(
        f"\nMedians of {arguments.rounds} alternating rounds, recordings of {AUDIO_SECONDS:g} s, "
        f"load {before:.1f} before and {load_now():.1f} after\n"
    )
    return {"runtimes": done}


def serving(arguments: argparse.Namespace) -> dict[str, Any]:
    """Latency of a server for many parallel clients."""
    from benchmarks.inference import PERCENTILE, measure_serving  # late: see above

    before = load_now()
    one = measure_serving(arguments.serving, arguments.clients, arguments.rounds)
    _begin_table(
        "clients", "answers", "median s", f"{PERCENTILE} % within s", "answers/s", "clips per batch"
    )
    _row(
        str(one.clients),
        str(one.answers),
        f"{one.median_seconds:.3f}",
        f"{one.high_seconds:.3f}",
        f"{one.answers_a_second:.1f}",
        f"{one.clips_a_batch:.1f}",
    )
    sys.stdout.write(f"\nload {before:.1f} before and {load_now():.1f} after\n")
    return {"serving": dataclasses.asdict(one)}


def be_measured(arguments: argparse.Namespace) -> None:
    """The work of a process that one of the suites above has started."""
    config = load_config(arguments.config_arguments).config
    if arguments.embedding_of:
        recordings = arguments.recordings
        threads = arguments.threads
        serve_embedding(
            config, recordings, arguments.num_utterances, threads, arguments.embedding_of
        )
        return
    if arguments.epoch_of:
        serve_epochs(make_synthetic_corpus(config), arguments.epoch_of, arguments.num_batches)
        return
    config = classic_config(config, arguments.steps[0])
    if arguments.step_of:
        serve_steps(config, arguments.step_of, arguments.step_batch)
    else:
        taken = step_memory(config, arguments.memory_of, arguments.step_batch)
        sys.stdout.write(json.dumps(dataclasses.asdict(taken)) + "\n")


def _timing_table(what: str, reference: str, timings: Sequence[Timing]) -> None:
    _begin_table(what, "median seconds", "quartile spread", reference)
    for one in timings:
        _row(
            one.name,
            f"{one.median_seconds:.3f}",
            f"{one.quartile_spread_seconds:.3f}",
            f"{one.ratio:.3f}",
        )


def _begin_table(*columns: str) -> None:
    _row(*columns)
    sys.stdout.write("|" + "---|" * len(columns) + "\n")


def _row(*cells: str) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    # A suite takes minutes; flushing shows each row at once in a file or pipe.
    sys.stdout.flush()


def _memory_line(memory: Mapping[str, Any]) -> str:
    bare = memory["bare_interpreter_bytes"]
    parts = [f"an interpreter with torch: {human_bytes(bare)}"]
    if "fork_bytes" in memory:
        # A forked worker shares the interpreter, so all of its unique memory is its own.
        parts.append(f"forked worker: {human_bytes(max(memory['fork_bytes']))} in total")
    if "spawn_bytes" in memory:
        most = max(memory["spawn_bytes"])
        parts.append(
            f"spawned worker: {human_bytes(most)}, {human_bytes(max(0, most - bare))} beyond the "
            "interpreter"
        )
    return f"Unique memory of a worker, list of {memory['num_rows']:,} rows: " + "; ".join(parts)
