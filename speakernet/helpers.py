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

from speakernet.assembly.benchmark import BatchSizeFinder
from speakernet.machine import settings
from speakernet.machine.facts import describe_limits, native_bf16, system_info
from speakernet.machine.options import MachineOptions

logger = logging.getLogger(__name__)


class PerformanceTracker:
    """Logs the speed and mean loss of a loop every `log_interval` steps.

    Examples:
        >>> tracker = PerformanceTracker(log_interval=2)
        >>> for loss in (3.0, 1.0):
        ...     _ = tracker.update(batch_size=8, loss=loss)
        >>> summary = tracker.log_summary()
        >>> summary["steps"], summary["samples"], summary["mean_loss"]
        (2, 16, 2.0)
    """

    def __init__(self, log_interval: int) -> None:
        self.log_interval = log_interval
        self._began = time.perf_counter()
        self.steps = self.samples = 0
        self._losses: Any = 0.0

    def update(self, *, batch_size: int, loss: Tensor | float) -> "PerformanceTracker":
        """Count a step; a loss on a GPU is only synchronised when it is logged."""
        self.steps, self.samples = self.steps + 1, self.samples + batch_size
        self._losses += loss.detach() if isinstance(loss, Tensor) else loss
        if self.steps % self.log_interval == 0:
            self.log_summary()
        return self

    def log_summary(self) -> dict[str, float]:
        """Log and return the means over all steps so far."""
        speed = self.samples / (time.perf_counter() - self._began)
        loss = float(self._losses) / max(1, self.steps)
        logger.info("%d steps: %.1f samples/s, mean loss %.4f", self.steps, speed, loss)
        return {
            "steps": self.steps,
            "samples": self.samples,
            "samples_per_second": speed,
            "mean_loss": loss,
        }


class BatchSizeOptimizer(BatchSizeFinder):
    """Finds the batch size at which a model's steps run fastest within the free memory.

    Args:
        model: its weights and buffers end unchanged, unless `step` changes the weights.
        sample: one item as a batch, a tensor or a dictionary of tensors (keyword arguments of the
            model).
        step: trains on a batch; None computes the gradients of the summed output, or of its `loss`.

    Examples:
        >>> model = nn.Linear(4, 2)
        >>> BatchSizeOptimizer(model, {"input": torch.randn(1, 4)}).find(1, 4) in (1, 2, 4)
        True
    """

    def __init__(
        self,
        model: nn.Module,
        sample: Tensor | Mapping[str, Tensor],
        step: Callable[[Any], None] | None = None,
    ) -> None:
        named = sample if isinstance(sample, Mapping) else {"": sample}

        def make(size: int) -> Any:
            batch = {name: one[:1].repeat_interleave(size, dim=0) for name, one in named.items()}
            return batch if isinstance(sample, Mapping) else batch[""]

        super().__init__(model, make, step or self._gradients)

    def _gradients(self, batch: Any) -> None:
        output = self.net(**batch) if isinstance(batch, Mapping) else self.net(batch)
        getattr(output, "loss", output).sum().backward()


def optimize_torch_settings(**options: Any) -> dict[str, Any]:
    """Set torch's threads, kernels and memory for speed, as training does, with options of section
    `runtime`.
    """
    return settings.optimize_torch_settings(MachineOptions(**options))


def log_performance_info() -> dict[str, Any]:
    """Log and return the available optimisations of this machine and whether they are on, by
    name.
    """
    found = {
        "machine": describe_limits(),
        "processor": system_info()["cpu"],
        "gpus": [one["name"] for one in system_info()["gpus"]],
        "threads": torch.get_num_threads(),
        "bf16": native_bf16() or (torch.cuda.is_available() and torch.cuda.is_bf16_supported()),
        "compiler for torch.compile": shutil.which("c++")
        or shutil.which("g++")
        or shutil.which("clang++"),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "tf32": torch.backends.cudnn.allow_tf32 and torch.cuda.is_available(),
        "flash attention": torch.backends.cuda.flash_sdp_enabled() and torch.cuda.is_available(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    for name, value in found.items():
        logger.info("%s: %s", name, value if value not in (None, False, [], "") else "no")
    return found


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
