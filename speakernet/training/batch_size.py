"""Find the batch size that trains fastest within the memory there is, by running real steps.

Doubling until a step does not fit, bisection between the last that fitted and the first that did not, then the size
with the best throughput. Is handed a network and a way to make a batch; knows nothing of speech.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from speakernet.files import human_bytes
from speakernet.machine.facts import usable_memory_bytes
from speakernet.machine.memory import Monitor, is_out_of_memory, process_memory_bytes, release_freed_memory

logger = logging.getLogger(__name__)

TIMED_STEPS = 3
# Of sizes that are equally fast within this share the smallest wins: it leaves memory and gives more updates.
EQUAL_SHARE = 0.03
DEFAULT_MEMORY_SHARE = 0.8


@dataclass(frozen=True)
class Measurement:
    """One batch size that was tried."""

    batch_size: int
    fits: bool
    seconds: float
    """Seconds of one step, infinite where it did not fit."""
    memory_bytes: int
    """Memory that the step added (process memory on a CPU, allocated memory on a GPU)."""

    @property
    def throughput(self) -> float:
        """Items a second."""
        return self.batch_size / self.seconds


class BatchSizeOptimizer:
    """Tries batch sizes with real training steps.

    Args:
        model: what is trained; its gradients are cleared after each try, weights and buffers are as before at the end.
        sample_batch_fn: batch size -> what the step is given (a tensor, or a tuple of arguments of the model).
        min_batch_size: the smallest size worth having.
        max_batch_size: the largest size to try.
        step: one forward and backward pass on a sample; by default the model's output (or the first of its outputs)
            is averaged and propagated back.
        memory_limit_bytes: how much a step may add on a CPU; default: 80 % of what is available. A GPU says itself.
        clock: seconds; replaceable for tests.
        read_memory: memory of this process in bytes; replaceable for tests.

    Raises:
        ValueError: sizes that make no sense, or not even the smallest one fits.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        sample_batch_fn: Callable[[int], Any],
        min_batch_size: int = 1,
        max_batch_size: int = 1024,
        step: Callable[[Any], None] | None = None,
        memory_limit_bytes: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        read_memory: Callable[[], int] = process_memory_bytes,
    ) -> None:
        if not 1 <= min_batch_size <= max_batch_size:
            raise ValueError(f"batch sizes {min_batch_size} to {max_batch_size}; expected 1 <= smallest <= largest")
        if memory_limit_bytes is not None and memory_limit_bytes <= 0:
            raise ValueError(f"memory limit of {memory_limit_bytes} bytes; expected more than 0")
        self.model = model
        self.sample_batch_fn = sample_batch_fn
        self.min_batch_size = min_batch_size
        self.max_batch_size = max_batch_size
        self.step = step or self._forward_and_backward
        self.device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        available = int(usable_memory_bytes() * DEFAULT_MEMORY_SHARE)
        self.memory_limit_bytes = memory_limit_bytes or available
        self.clock = clock
        self.read_memory = read_memory
        self.measurements: list[Measurement] = []

    @property
    def largest_batch_size(self) -> int:
        """The largest size that fitted; 0 before anything was tried."""
        return max((one.batch_size for one in self.measurements if one.fits), default=0)

    def find_optimal_batch_size(self) -> int:
        """The batch size of best throughput; of equally fast ones (within 3 %) the smallest.

        Raises:
            ValueError: not even the smallest size fits.
        """
        self.measurements = []
        with self._buffers_kept():
            first_too_large = self._double()
            if first_too_large is not None:
                self._bisect(first_too_large)
        fitting = sorted((one for one in self.measurements if one.fits), key=lambda one: one.batch_size)
        best = max(one.throughput for one in fitting)
        return next(one.batch_size for one in fitting if one.throughput >= best * (1 - EQUAL_SHARE))

    def measured(self, batch_size: int) -> Measurement:
        """What a size came to; it is tried where it was not yet."""
        found = [one for one in self.measurements if one.batch_size == batch_size]
        if found:
            return found[0]
        with self._buffers_kept():
            return self._try(batch_size)

    @contextlib.contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]
        try:
            yield
        finally:
            # Batch-norm statistics have followed the samples.
            for buffer, before in buffers:
                buffer.data.copy_(before)

    def _double(self) -> int | None:
        """Try min, 2 min, 4 min … max; returns the first size that does not fit, None where all do."""
        size = self.min_batch_size
        while True:
            if not self._try(size).fits:
                if size == self.min_batch_size:
                    limit = f" (limit {human_bytes(self.memory_limit_bytes)})" if self.device.type == "cpu" else ""
                    raise ValueError(
                        f"not even a batch of {size} fits into memory{limit}; use a smaller network, shorter crops or "
                        "gradient checkpointing"
                    )
                return size
            if size == self.max_batch_size:
                return None
            size = min(2 * size, self.max_batch_size)

    def _bisect(self, too_large: int) -> None:
        fits = self.largest_batch_size
        # finer than an eighth is not worth the steps
        while too_large - fits > max(1, fits // 8):
            middle = (fits + too_large) // 2
            if self._try(middle).fits:
                fits = middle
            else:
                too_large = middle

    def _try(self, batch_size: int) -> Measurement:
        expected = self._expected_bytes(batch_size)
        if self.device.type == "cpu" and expected > self.memory_limit_bytes:
            # Not run: the operating system would kill the process instead of raising an error.
            result = Measurement(batch_size, False, float("inf"), expected)
        else:
            result = self._run(batch_size)
        self.measurements.append(result)
        outcome = f"{result.throughput:.1f} items/s" if result.fits else "does not fit"
        logger.info("batch %d: %s, %s", batch_size, outcome, human_bytes(result.memory_bytes))
        return result

    def _expected_bytes(self, batch_size: int) -> int:
        """Memory in proportion to the largest size that fitted."""
        known = [one for one in self.measurements if one.fits]
        if not known:
            return 0
        largest = max(known, key=lambda one: one.batch_size)
        return largest.memory_bytes * batch_size // largest.batch_size

    def _run(self, batch_size: int) -> Measurement:
        # What the size before, or whatever ran in this process, left behind would hide what this one takes.
        release_freed_memory()
        seconds = float("inf")
        try:
            with Monitor(read=self.read_memory) as monitor:
                if self.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(self.device)
                sample = self.sample_batch_fn(batch_size)
                self.step(sample)  # the first step allocates and chooses kernels; it is not timed
                monitor.sample()
                # No time is wanted of a size that does not fit.
                if self._fits(monitor.peak - monitor.start):
                    seconds = sorted(self._timed_step(sample) for _ in range(TIMED_STEPS))[TIMED_STEPS // 2]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return Measurement(batch_size, False, float("inf"), self.memory_limit_bytes)
        finally:
            self.model.zero_grad(set_to_none=True)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        added = monitor.peak - monitor.start
        if self.device.type == "cuda":
            added = torch.cuda.max_memory_allocated(self.device)
        fits = self._fits(added)
        return Measurement(batch_size, fits, seconds if fits else float("inf"), added)

    def _fits(self, added_bytes: int) -> bool:
        # A GPU that has not enough raises; a CPU's system swaps or kills.
        return self.device.type == "cuda" or added_bytes <= self.memory_limit_bytes

    def _timed_step(self, sample: Any) -> float:
        start = self.clock()
        self.step(sample)
        # Without it a GPU would only have been told of the step.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock() - start

    def _forward_and_backward(self, sample: Any) -> None:
        output = self.model(*sample) if isinstance(sample, tuple) else self.model(sample)
        first: Tensor = output[0] if isinstance(output, tuple) else output
        first.float().mean().backward()
