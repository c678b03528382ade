"""Measure loader and training step of a configuration on its own data (`speakernet benchmark`), and
find the batch size that trains fastest within the available memory (`speakernet find-batch-size`).
"""

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from speakernet.assembly.data import build_training_loader
from speakernet.assembly.inputs import Inputs, make_synthetic_corpus
from speakernet.assembly.training import (
    Parts,
    apply_memory_options,
    build_loss,
    build_model,
    build_precision,
    build_trainer,
    prepare_machine,
    refuse_impossible,
)
from speakernet.config.schema import Config, with_changes
from speakernet.data.audio import crop_samples
from speakernet.data.batches import ReadyCrops
from speakernet.data.lists import read_training_list
from speakernet.data.loader import Batch, TrainingLoader
from speakernet.data.options import DataOptions
from speakernet.training.batch_size import BatchSizeFinder
from speakernet.training.optimizers import create_optimizer
from speakernet.training.step import TrainingStep
from speakernet.training.timing import (
    WARM_STEPS,
    arithmetic_of,
    count_flop,
    peak_flops,
    time_batches,
    time_steps,
)

DEFAULT_CLASSES = 1000
"""Classes of the head if not configured; the head is a small part of a step."""


def measure(config: Config, num_batches: int) -> dict[str, Any]:
    """Time the loader alone, then as many training steps; returns plain values under `loader` and
    `training`.
    """
    config = make_synthetic_corpus(config)
    inputs = Inputs(config, prepare_machine(config))
    with contextlib.closing(build_training_loader(config, inputs)) as loader:
        batches = _endless(loader)
        for _ in range(WARM_STEPS[loader.device.type]):
            next(batches)
        # The loader is also timed alone, to show whether a run waits for data or for the network.
        times = time_batches(batches, num_batches, lambda batch: len(batch.labels), loader.device)
        return {"loader": times, "training": _measure_training(config, loader, num_batches)}


def _measure_training(config: Config, loader: TrainingLoader, num_steps: int) -> dict[str, Any]:
    """Time real steps on real batches: seconds per step, share spent waiting for data, epoch time,
    memory.
    """
    # During the timed steps nothing may decide `compile: auto`, log (which empties the window) or
    # write last.pt.
    steady = {"log_interval": 10**9, "save_steps": 0, "save_minutes": 0.0}
    compiling = "off" if config.runtime.compile == "auto" else config.runtime.compile
    config = with_changes(config, training=steady, runtime={"compile": compiling})
    net = build_model(config)
    loss = build_loss(config, loader.num_classes)
    device = loader.device
    refuse_impossible(config, net, device)
    num_batches = len(loader)
    with tempfile.TemporaryDirectory() as folder:
        parts = Parts(net, loss, loader, device)
        trainer = build_trainer(config, parts, lambda epoch: {}, folder)
        net.train()
        loss.train()
        batches = _endless(loader)

        def run_step() -> None:
            # An endless epoch: the trainer never reaches its last batch.
            trainer.state.micro_batch %= num_batches
            trainer.run_step(batches)

        timed = time_steps(run_step, num_steps, device, trainer.speed.take_window)
        summary = {
            **trainer.speed.summary(),
            **trainer.speed.take_window(),
            **timed,
            "steps": num_steps,
        }
        # The same steps on crops that are ready: the difference is the cost of reading and
        # decoding.
        loader.maker = ReadyCrops(loader.maker)
        batches = _endless(loader)
        ready = time_steps(run_step, num_steps, device)["step_seconds"]
        flop = count_flop(run_step)
    arithmetic = arithmetic_of(summary["precision"], device)
    peak = peak_flops(device, arithmetic)
    # A GPU runs asynchronously, so the host's own waiting says little. The share is therefore how
    # much longer a step takes than one on ready crops, with the same copy, speed changes and
    # augmentation.
    summary |= {
        "host_data_share": summary["data_wait_share"],
        "data_wait_share": max(0.0, 1 - ready / summary["step_seconds"]),
        "ready_step_seconds": ready,
        "step_flop": flop,
        "arithmetic": arithmetic,
        "peak_flops": peak,
        "mfu": flop / summary["step_seconds"] / peak,
    }
    summary["utterances_per_second"] = summary["effective_batch"] * summary["steps_per_second"]
    steps_per_epoch = -(-num_batches // config.training.accumulation_steps)
    return {**summary, "epoch_seconds": steps_per_epoch / summary["steps_per_second"]}


def _endless(loader: TrainingLoader) -> Iterator[Batch]:
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        yield from loader


def find_batch_size(
    config: Config, min_batch_size: int, max_batch_size: int, memory_limit_bytes: int | None
) -> tuple[BatchSizeFinder, int]:
    """Try batch sizes (in utterances), including the configured one, with whole training steps.

    Returns:
        The finder with its measurements, and the best size.
    """
    # Whole steps and not forward passes, because training also needs memory for stored activations,
    # gradients and the optimizer's moments. Noise costs the network as much as speech and needs no
    # list.
    if not 1 <= min_batch_size <= max_batch_size:
        raise ValueError(
            f"found batch sizes {min_batch_size} to {max_batch_size}; expected 1 <= smallest <= "
            "largest"
        )
    device = prepare_machine(config)
    precision = build_precision(config, device)
    num_classes = config.data.num_classes or DEFAULT_CLASSES
    net = build_model(config).to(device).train()
    loss = build_loss(config, num_classes).to(device).train()
    apply_memory_options(config, net, device, precision)
    per_speaker = config.data.utterances_per_speaker
    step = TrainingStep(
        net,
        loss,
        create_optimizer(config.optimizer, [net, loss], device, is_float32=precision.name == "no"),
        precision,
        # Each size is tried as a whole batch.
        config.training.model_copy(update={"accumulation_steps": 1}),
        utterances_per_speaker=per_speaker,
    )
    num_samples = crop_samples(config.data.crop_frames, config.data.sample_rate)
    generator = torch.Generator().manual_seed(config.runtime.seed)

    def sample(size: int) -> Batch:
        noise = 0.1 * torch.randn(size, num_samples, generator=generator)
        labels = (torch.arange(size) // per_speaker) % num_classes
        device_labels = labels.to(device)
        return Batch(noise.to(device), device_labels, labels, (size,), 0, labels.numpy())

    def run(batch: Batch) -> None:
        step.add(batch)
        # Learning rate 0: the update takes its usual time but leaves the weights unchanged.
        step.finish(learning_rate=0.0)

    # Loads kernel code, tens of megabytes that would otherwise be charged to the first size.
    run(sample(2 * per_speaker))
    finder = BatchSizeFinder(net, sample, run, memory_limit_bytes)
    smallest, most = (
        max(1, size // per_speaker) * per_speaker for size in (min_batch_size, max_batch_size)
    )
    best = finder.find(smallest, most)
    # The configured size is the reference for speed.
    finder.measure(config.data.utterances_per_batch)
    return finder, best


def count_utterances(data: DataOptions) -> int:
    """Utterances in the training lists; 0 if one is missing."""
    if not all(path and Path(path).is_file() for path in data.train_lists):
        return 0
    return sum(len(read_training_list(path)) for path in data.train_lists)
