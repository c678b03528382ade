"""Helpers for your own training loops: speed, batch size, torch settings, timing.

`speakernet train` does not need them, because it measures, sets and logs the same things itself.
"""

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from speakernet.machine import settings
from speakernet.machine.facts import describe_limits, native_bf16, system_info
from speakernet.machine.options import MachineOptions
from speakernet.training.batch_size import BatchSizeFinder
from speakernet.training.progress import RunSpeed

logger = logging.getLogger(__name__)


class PerformanceTracker:
    """Logs the speed and mean loss of a loop every `log_interval` steps.

    Examples:
        >>> tracker = PerformanceTracker(log_interval=10)
        >>> for loss in (3.0, 1.0):
        ...     tracker.update(0.5, batch_size=8, loss=loss)
        >>> summary = tracker.log_summary()
        >>> summary["steps"], summary["utterances_per_second"], summary["mean_loss"]
        (2, 16.0, 2.0)
    """

    def __init__(self, log_interval: int) -> None:
        self.log_interval = log_interval
        # Measured as in training, so that the figures can be compared.
        self._speed = RunSpeed("", 1, torch.device("cpu"))
        self._updated_at = time.perf_counter()
        self._loss_sum: Any = 0.0

    def update(
        self, step_time: float | None = None, *, batch_size: int, loss: Tensor | float = 0.0
    ) -> None:
        """Count a step.

        Args:
            step_time: seconds; None: since the previous update.
            batch_size: utterances in the step.
            loss: a loss on a GPU is only synchronised when it is logged.
        """
        # Losses are added up on their device; reading each one would wait for the GPU.
        now = time.perf_counter()
        seconds = now - self._updated_at if step_time is None else step_time
        # Data loading counts too if no time is given, as in a loop that calls this once per step.
        self._updated_at = now
        self._speed.update(seconds, batch_size, {})
        self._loss_sum += loss.detach() if isinstance(loss, Tensor) else loss
        if self._speed.total["steps"] % self.log_interval == 0:
            self.log_summary()

    def log_summary(self) -> dict[str, Any]:
        """Log and return the speed, memory and mean loss of all steps so far."""
        summary = self._speed.summary()
        steps = summary["steps"]
        # The only place that waits for the GPU, once for many steps.
        summary["mean_loss"] = float(self._loss_sum) / max(1, steps)
        speed = summary.get("utterances_per_second", 0.0)
        logger.info(
            "%d steps: %.1f utterances/s, mean loss %.4f", steps, speed, summary["mean_loss"]
        )
        return summary


class BatchSizeOptimizer(BatchSizeFinder):
    """Finds the batch size at which a model's steps run fastest within the free memory.

    Args:
        model: its weights and buffers end unchanged, unless `step` changes the weights.
        sample_batch_fn: makes a batch of a given size, a tensor or a dictionary of tensors
            (keyword arguments of the model).
        min_batch_size: the smallest size to try.
        max_batch_size: the largest size to try.
        step: trains on a batch; None computes the gradients of the summed output, or of its `loss`.

    Examples:
        >>> finder = BatchSizeOptimizer(
        ...     model=nn.Linear(4, 2),
        ...     sample_batch_fn=lambda size: torch.randn(size, 4),
        ...     min_batch_size=1,
        ...     max_batch_size=4,
        ... )
        >>> finder.find_optimal_batch_size() in (1, 2, 4)
        True
    """

    def __init__(
        self,
        model: nn.Module,
        sample_batch_fn: Callable[[int], Any],
        min_batch_size: int = 1,
        max_batch_size: int = 512,
        step: Callable[[Any], None] | None = None,
    ) -> None:
        if not 1 <= min_batch_size <= max_batch_size:
            raise ValueError(
                f"min_batch_size is {min_batch_size} and max_batch_size {max_batch_size}; "
                "expected 1 <= min_batch_size <= max_batch_size"
            )
        # Only running steps shows whether a batch fits and how fast it is, because kernels and
        # fragmentation depend on its shape. The search is that of `speakernet find-batch-size`.
        self._bounds = (min_batch_size, max_batch_size)
        super().__init__(model, sample_batch_fn, step or self._gradients)

    def find_optimal_batch_size(self) -> int:
        """The fastest batch size within the bounds that fits into memory.

        Raises:
            ValueError: not even the smallest size fits.
        """
        return self.find(*self._bounds)

    def _gradients(self, batch: Any) -> None:
        output = self.net(**batch) if isinstance(batch, Mapping) else self.net(batch)
        # Models of the transformers library return an object that holds the loss.
        getattr(output, "loss", output).sum().backward()


def optimize_torch_settings(**options: Any) -> dict[str, Any]:
    """Set torch's threads, kernels and memory for speed, as training does, with options of section
    `runtime`.
    """
    return settings.optimize_torch_settings(MachineOptions(**options))


def log_system_info() -> dict[str, Any]:
    """Log and return the available optimisations of this machine and whether they are on, by
    name.
    """
    facts = {
        "machine": describe_limits(),
        "processor": system_info()["cpu"],
        "gpus": [gpu["name"] for gpu in system_info()["gpus"]],
        "threads": torch.get_num_threads(),
        # Other machines emulate bf16 in software, slower than float32.
        "bf16": native_bf16() or (torch.cuda.is_available() and torch.cuda.is_bf16_supported()),
        "compiler for torch.compile": shutil.which("c++")
        or shutil.which("g++")
        or shutil.which("clang++"),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "tf32": torch.backends.cudnn.allow_tf32 and torch.cuda.is_available(),
        "flash attention": torch.backends.cuda.flash_sdp_enabled() and torch.cuda.is_available(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    # One line each, so that a log can be searched for them.
    for name, value in facts.items():
        logger.info("%s: %s", name, value if value not in (None, False, [], "") else "no")
    return facts


log_performance_info = log_system_info
"""Its name in version 0.3.0."""


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Log how long a block takes, or, as `@timed("…")`, each call of a function.

    Examples:
        >>> with timed("reading"):
        ...     pass
    """
    start = time.perf_counter()
    try:
        yield
    finally:
        if torch.cuda.is_available():
            # Count kernels that the block has launched but not finished.
            torch.cuda.synchronize()
        logger.info("%s: %.3f s", what, time.perf_counter() - start)
