"""Loader and training step of one's own configuration, measured on its own data."""

import dataclasses
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speakernet.assembly.checks import refuse_impossible
from speakernet.assembly.data import build_training_loader
from speakernet.assembly.inputs import Inputs, make_synthetic_corpus
from speakernet.assembly.model import build_loss, build_model
from speakernet.assembly.training import build_trainer, prepare_machine
from speakernet.config.schema import Config, replaced
from speakernet.data.loader import Batch, TrainingLoader
from speakernet.files import human_bytes
from speakernet.machine.device import choose_device, synchronize, utilisation_monitor

WARM_STEPS = {"cpu": 3, "cuda": 20}
"""Not counted: the first batches find empty queues, the first steps allocate memory and choose kernels."""


@dataclass(frozen=True)
class BatchTimes:
    """How long batches took to arrive."""

    num_batches: int
    utterances_per_second: float
    median_seconds: float
    p95_seconds: float
    slowest_seconds: float


def measure(config: Config, num_batches: int) -> dict[str, Any]:
    """Fetch batches as fast as they come, then train on as many; plain values under `loader` and `training`.

    Raises:
        ValueError: the configuration makes no loader or no trainer.
    """
    config = make_synthetic_corpus(config)
    prepare_machine(config)
    loader = build_training_loader(config, Inputs(config, choose_device(config.runtime)))
    try:
        batches = _endless(loader)
        for _ in itertools.islice(batches, WARM_STEPS[loader.device.type]):
            pass
        times = time_batches(batches, num_batches, lambda batch: len(batch.labels))
        return {"loader": dataclasses.asdict(times), "training": _measure_training(config, loader, num_batches)}
    finally:
        loader.close()


def table(figures: Mapping[str, Any]) -> str:
    """The figures of `measure` as a Markdown table."""
    batch, steps = BatchTimes(**figures["loader"]), figures["training"]
    rows = [
        ("loader alone", f"{batch.utterances_per_second:,.0f} utterances/s"),
        (
            "a batch from the loader alone",
            f"{1000 * batch.median_seconds:.2f} ms (95 % under {1000 * batch.p95_seconds:.2f} ms, "
            f"slowest {1000 * batch.slowest_seconds:.1f} ms)",
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
    return "\n".join(["| measure | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def time_batches(batches: Iterator[Any], num_batches: int, size_of: Callable[[Any], int]) -> BatchTimes:
    """Fetch batches as fast as they come.

    Args:
        batches: gives them; may end early.
        num_batches: fetched at most.
        size_of: utterances in a batch.

    Raises:
        ValueError: there was not one batch.
    """
    seconds, utterances = [], 0
    last = time.perf_counter()
    for _, batch in zip(range(num_batches), batches, strict=False):
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
        utterances += size_of(batch)
    if not seconds:
        raise ValueError("the loader gave no batch; is data.batch_size larger than the list?")
    return BatchTimes(
        len(seconds),
        utterances / sum(seconds),
        statistics.median(seconds),
        float(np.percentile(seconds, 95)),
        max(seconds),
    )


def time_steps(run_step: Callable[[], None], num_steps: int, device: torch.device) -> dict[str, float]:
    """Seconds of `num_steps` steps after the warm-up, and the mean utilisation of the GPU over them."""
    for _ in range(WARM_STEPS[device.type]):
        run_step()
    # A GPU works behind the host: the clock may start and stop only when it has caught up.
    synchronize(device)
    started = time.perf_counter()
    with utilisation_monitor(device) as utilisation:
        for _ in range(num_steps):
            run_step()
        synchronize(device)
        seconds = time.perf_counter() - started
    figures = {"step_seconds": seconds / num_steps, "steps_per_second": num_steps / seconds}
    return figures if utilisation.mean is None else {**figures, "gpu_utilisation_percent": utilisation.mean}


def _measure_training(config: Config, loader: TrainingLoader, num_steps: int) -> dict[str, Any]:
    """Real steps on real batches: seconds a step, the share of them spent waiting for data, an epoch, memory."""
    # In the middle of the timed steps `compile: auto` would decide, the log empty the window, and last.pt be written.
    steady = {"log_interval": 10**9, "save_steps": 0, "save_minutes": 0.0}
    compiling = "off" if config.runtime.compile == "auto" else config.runtime.compile
    config = replaced(config, training=steady, runtime={"compile": compiling})
    net, loss, device = build_model(config), build_loss(config, loader.num_classes), loader.device
    refuse_impossible(config, net, device)
    num_batches = len(loader)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(config, net, loss, loader, dict, Path(folder), device)
        net.train()
        loss.train()
        batches, done = _endless(loader), 0

        def run_step() -> None:
            nonlocal done
            if done == WARM_STEPS[device.type]:
                trainer.tracker.take_window()
            # An epoch without end: the trainer never sees its last batch.
            trainer.state.batch %= num_batches
            trainer.run_step(batches)
            done += 1

        timed = time_steps(run_step, num_steps, device)
        summary = {**trainer.tracker.summary(), **trainer.tracker.take_window(), **timed, "steps": num_steps}
    summary["utterances_per_second"] = summary["effective_batch"] * summary["steps_per_second"]
    steps_per_epoch = -(-num_batches // config.training.accumulation_steps)
    return {**summary, "epoch_seconds": steps_per_epoch / summary["steps_per_second"]}


def _endless(loader: TrainingLoader) -> Iterator[Batch]:
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        yield from loader
