"""From a configuration to the batch size that trains fastest: real steps of network and loss on random waveforms."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speakernet.assembly.model import build_loss, build_model
from speakernet.assembly.training import (
    apply_memory_options,
    build_precision,
    prepare_machine,
)
from speakernet.config.schema import Config
from speakernet.data.audio import crop_samples
from speakernet.data.lists import read_training_list
from speakernet.machine.device import choose_device
from speakernet.training.batch_advice import PlannedRun, batch_size_advice
from speakernet.training.batch_size import BatchSizeOptimizer
from speakernet.training.optimizers import create_optimizer
from speakernet.training.profiler import NoProfiler
from speakernet.training.step import TrainingStep

# Classes of the head where the configuration does not say; the head is a small part of a step.
DEFAULT_CLASSES = 1000


class _Sample:
    """A batch of noise."""

    def __init__(self, waveforms: torch.Tensor, labels: torch.Tensor) -> None:
        self.waveforms = waveforms
        self.labels = labels
        self.indices = labels.cpu()
        self.shares = (len(labels),)
        self.draw_key = 0
        self.warps = np.zeros(len(labels), dtype=np.int64)


def find_batch_size(
    config: Config, min_batch_size: int, max_batch_size: int, memory_limit_bytes: int | None = None
) -> tuple[BatchSizeOptimizer, int]:
    """Try batch sizes (utterances in a batch) with whole training steps.

    Args:
        config: network, loss, optimizer, precision and crop length.
        min_batch_size: the smallest size worth having.
        max_batch_size: the largest size to try.
        memory_limit_bytes: what a step may add on a CPU; None: 80 % of what is free.

    Returns:
        The finder with everything it measured, and the best size.

    Raises:
        ValueError: not even the smallest size fits, sizes without sense, or the configuration makes no trainer.
    """
    if not 1 <= min_batch_size <= max_batch_size:
        raise ValueError(f"batch sizes {min_batch_size} to {max_batch_size}; expected 1 <= smallest <= largest")
    prepare_machine(config)
    device = choose_device(config.runtime)
    precision = build_precision(config, device)
    num_classes = config.data.num_classes or DEFAULT_CLASSES
    net, loss = build_model(config).to(device).train(), build_loss(config, num_classes).to(device).train()
    apply_memory_options(config, net, device, precision)
    per_speaker = config.data.utterances_per_speaker
    step = TrainingStep(
        net,
        loss,
        create_optimizer(config.optimizer, [net, loss], device, is_float32=precision.name == "no"),
        precision,
        config.training,
        profiler=NoProfiler(),
        utterances_per_speaker=per_speaker,
        # Each size is tried as a whole batch.
        gradient_cache=False,
    )
    sample = _sampler(config, num_classes, device)

    def run(batch: Any) -> None:
        step.add(batch)
        # Learning rate 0: the update costs what it costs, and the weights stay.
        step.finish(learning_rate=0.0)

    # Loads the kernels' code, tens of megabytes that would count for the first size.
    run(sample(2 * per_speaker))
    finder = BatchSizeOptimizer(
        model=net,
        sample_batch_fn=sample,
        min_batch_size=_whole_speakers(min_batch_size, per_speaker),
        max_batch_size=_whole_speakers(max_batch_size, per_speaker),
        step=run,
        memory_limit_bytes=memory_limit_bytes,
    )
    best = finder.find_optimal_batch_size()
    # Speed means nothing but against that of the configuration.
    finder.measured(configured_batch_size(config))
    return finder, best


def configured_batch_size(config: Config) -> int:
    """Utterances in a batch of the configuration."""
    return config.data.batch_size * config.data.utterances_per_speaker


def planned_run(config: Config) -> PlannedRun:
    """What a batch size is looked for; the training list is read where it is there, no audio is.

    Raises:
        ValueError: it is no training list.
    """
    data, training = config.data, config.training
    is_there = bool(data.train_list) and Path(data.train_list).is_file()
    return PlannedRun(
        num_utterances=len(read_training_list(data.train_list)) if is_there else 0,
        num_epochs=training.max_epochs,
        learning_rate=config.optimizer.learning_rate,
        accumulation_steps=training.accumulation_steps,
        can_accumulate=not config.loss.is_metric,
    )


def advice(config: Config, finder: BatchSizeOptimizer, best: int, run: PlannedRun) -> list[str]:
    """What the best size is worth beside the configured one, in lines."""
    configured = finder.measured(configured_batch_size(config))
    # data.batch_size counts speakers, as voxceleb_trainer's does.
    return batch_size_advice(configured, finder.measured(best), run, config.data.utterances_per_speaker)


def _sampler(config: Config, num_classes: int, device: torch.device) -> Callable[[int], _Sample]:
    """From a number of utterances to a batch of noise on the device."""
    per_speaker = config.data.utterances_per_speaker
    num_samples = crop_samples(config.data.crop_frames, config.data.sample_rate)
    generator = torch.Generator().manual_seed(config.runtime.seed)

    def sample(batch_size: int) -> _Sample:
        batch_size = _whole_speakers(batch_size, per_speaker)
        noise = 0.1 * torch.randn(batch_size, num_samples, generator=generator)
        labels = (torch.arange(batch_size) // per_speaker) % num_classes
        return _Sample(noise.to(device), labels.to(device))

    return sample


def _whole_speakers(batch_size: int, per_speaker: int) -> int:
    return max(1, batch_size // per_speaker) * per_speaker
