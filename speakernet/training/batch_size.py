"""Find the batch size at which training steps run fastest within the available memory."""

import logging
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from speakernet.files import human_bytes
from speakernet.machine.device import synchronize
from speakernet.machine.facts import usable_memory_bytes
from speakernet.machine.memory import (
    Monitor,
    is_out_of_memory,
    process_memory_bytes,
    release_freed_memory,
)
from speakernet.training.options import TrainingOptions

logger = logging.getLogger(__name__)

TIMED_STEPS = 3
EQUAL_SHARE = 0.03
"""Among sizes that differ in speed by less than this share, the smallest wins: less memory, and
more updates."""
DEFAULT_MEMORY_SHARE = 0.8
WORTHWHILE_GAIN = 0.15
"""Smaller gains in speed are within timing noise and not worth retuning a recipe."""
MIN_STEPS = 10_000
"""Runs with fewer steps lack updates, not speed. A guess between exp01 (720 steps; with 360 it
learned next to nothing in half of its epochs) and the recipes for VoxCeleb (100,000 and more)."""


class Measurement(NamedTuple):
    """A batch size that was tried: seconds per step (infinite if it does not fit) and the memory it
    added.
    """

    batch_size: int
    seconds: float
    memory_bytes: int

    @property
    def fits(self) -> bool:
        """Whether it fits into memory."""
        return self.seconds < math.inf

    @property
    def throughput(self) -> float:
        """Items per second."""
        return self.batch_size / self.seconds


# The search doubles the size until it no longer fits, then halves the gap, because memory can only
# be learned by running out of it. On a GPU that is an error which the process survives. On a CPU
# the kernel kills the process instead, so a size is only tried if the memory of the largest one so
# far, in proportion, leaves space for it. The fastest size is seldom the largest: once a device is
# busy, a larger batch only takes longer, and fewer updates are made.
class BatchSizeFinder:
    """Tries batch sizes with real training steps of any kind.

    `sample` makes a batch of a given size and `step` runs on it. The buffers of `net` are restored
    afterwards; weights that `step` changes are not. On a CPU, a step may use `limit_bytes`
    (default: 80 % of free memory).
    """

    def __init__(
        self,
        net: nn.Module,
        sample: Callable[[int], Any],
        step: Callable[[Any], None],
        limit_bytes: int | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        read_memory: Callable[[], int] = process_memory_bytes,
    ) -> None:
        self.net = net
        self._sample = sample
        self._step = step
        self._clock = clock
        self._read_memory = read_memory
        self.device = next(
            (parameter.device for parameter in net.parameters()), torch.device("cpu")
        )
        self.limit_bytes = limit_bytes or int(usable_memory_bytes() * DEFAULT_MEMORY_SHARE)
        self.tried: dict[int, Measurement] = {}

    @property
    def largest(self) -> int:
        """The largest size tried so far that fits; 0 if there is none."""
        return max((size for size, tried in self.tried.items() if tried.fits), default=0)

    def find(self, smallest: int, most: int) -> int:
        """The batch size with the best throughput; among equally fast sizes (within 3 %), the
        smallest.
        """
        # Doubling finds the limit within a factor of two in few steps.
        size = smallest
        while self.measure(size).fits and size < most:
            size = min(2 * size, most)
        if not self.largest:
            limit = f" (limit {human_bytes(self.limit_bytes)})" if self.device.type == "cpu" else ""
            raise ValueError(
                f"not even a batch of {smallest} fits into memory{limit}; use a smaller network, "
                "shorter crops or gradient checkpointing"
            )
        too_large = 0 if self.tried[size].fits else size
        # Searching finer than an eighth is not worth the steps.
        while too_large - self.largest > max(1, self.largest // 8):
            middle = (self.largest + too_large) // 2
            too_large = too_large if self.measure(middle).fits else middle
        speeds = {size: tried.throughput for size, tried in self.tried.items() if tried.fits}
        enough = max(speeds.values()) * (1 - EQUAL_SHARE)
        return min(size for size, speed in speeds.items() if speed >= enough)

    def measure(self, size: int) -> Measurement:
        """The measurement of a size; each size is tried only once."""
        if size not in self.tried:
            # Steps update batch-norm statistics.
            buffers = {name: buffer.detach().clone() for name, buffer in self.net.named_buffers()}
            try:
                measurement = self._run(size)
            finally:
                for name, buffer in self.net.named_buffers():
                    buffer.data.copy_(buffers[name])
            self.tried[size] = measurement
            outcome = "does not fit"
            if measurement.fits:
                outcome = f"{measurement.throughput:.1f} utterances/s"
            logger.info("batch %d: %s, %s", size, outcome, human_bytes(measurement.memory_bytes))
        return self.tried[size]

    def _run(self, size: int) -> Measurement:
        fitted = self.tried.get(self.largest)
        is_gpu = self.device.type == "cuda"
        expected = fitted.memory_bytes * size // fitted.batch_size if fitted else 0
        if not is_gpu and expected > self.limit_bytes:
            # Not tried, because the operating system would kill the process instead of raising an
            # error.
            return Measurement(size, math.inf, expected)
        # Memory left over from earlier work would hide how much this size takes.
        release_freed_memory()
        seconds: list[float] = []
        try:
            with Monitor(self._read_memory) as monitor:
                if is_gpu:
                    torch.cuda.reset_peak_memory_stats(self.device)
                sample = self._sample(size)
                # The first step does not count: it allocates memory and chooses kernels.
                for _ in range(1 + TIMED_STEPS):
                    start = self._clock()
                    self._step(sample)
                    synchronize(self.device)
                    seconds.append(self._clock() - start)
                    monitor.sample()
                    if not is_gpu and monitor.peak - monitor.start > self.limit_bytes:
                        break
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # What it needs is unknown, only that it is more than there is.
            return Measurement(size, math.inf, self.limit_bytes)
        finally:
            self.net.zero_grad(set_to_none=True)
            if is_gpu:
                torch.cuda.empty_cache()
        added = int(monitor.peak - monitor.start)
        if is_gpu:
            added = torch.cuda.max_memory_allocated(self.device)
        elif added > self.limit_bytes:
            return Measurement(size, math.inf, added)
        return Measurement(size, statistics.median(seconds[1:]), added)


def recommendation(
    configured: Measurement,
    best: Measurement,
    options: TrainingOptions,
    *,
    utterances_per_speaker: int,
    is_metric: bool,
    count_utterances: Callable[[], int],
) -> str:
    """Advice, in one sentence, on whether to use the fastest size in a run with these options.

    `count_utterances` returns the utterances of an epoch, 0 if unknown.
    """
    # data.batch_size counts speakers.
    keep, take = (
        f"--batch_size {max(measured.batch_size // utterances_per_speaker, 1)}"
        for measured in (configured, best)
    )
    if configured.batch_size == best.batch_size:
        return f"keep {keep}, which is the fastest"
    if not configured.fits:
        several = -(-configured.batch_size // best.batch_size) * options.accumulation_steps
        accumulate = "" if is_metric else f" --training.accumulation_steps {several}"
        return (
            f"use {take}{accumulate}: a batch of {configured.batch_size} does not fit into memory"
        )
    gain = best.throughput / configured.throughput - 1
    if gain < WORTHWHILE_GAIN:
        # The configured size is measured last and may be the faster one by a little.
        return (
            f"keep {keep}; no size is clearly faster ({best.batch_size} by "
            f"{max(0, round(100 * gain))} %)"
        )
    # A larger batch means fewer steps in an epoch, which a short run cannot spare.
    utterances = count_utterances()
    steps = utterances // (best.batch_size * options.accumulation_steps) * options.max_epochs
    if utterances and best.batch_size > configured.batch_size and steps < MIN_STEPS:
        return (
            f"keep {keep}: a batch of {best.batch_size} runs {100 * gain:.0f} % faster, but "
            f"leaves only {steps:,} steps"
        )
    return f"use {take} ({100 * gain:.0f} % faster) and retune the learning rate"
