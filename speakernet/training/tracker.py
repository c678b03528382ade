"""Counts what a training run does with its time: speed, waiting for data, memory. Arithmetic, no measuring of its own.

The trainer hands in the times; the tracker keeps a window since the last summary and totals since the start.
"""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import torch

from speakernet.files import human_bytes
from speakernet.machine.measuring import measuring
from speakernet.machine.memory import process_peak_bytes

logger = logging.getLogger(__name__)

PARTS = ("data", "forward_backward", "optimizer")


@dataclasses.dataclass
class Window:
    """Sums over some steps; seconds and counts."""

    steps: int = 0
    utterances: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    losses: int = 0
    parts: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def add(self, seconds: float, utterances: int, loss: float | None, parts: dict[str, float]) -> None:
        """Count one step."""
        self.steps += 1
        self.utterances += utterances
        self.seconds += seconds
        if loss is not None:
            self.loss_sum += loss
            self.losses += 1
        for name, value in parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + value

    def summary(self) -> dict[str, float]:
        """Rates and shares; empty while no time has passed.

        >>> window = Window()
        >>> window.add(0.5, 64, 2.0, {"data": 0.1})
        >>> summary = window.summary()
        >>> summary["utterances_per_second"], summary["data_wait_share"], summary["loss"]
        (128.0, 0.2, 2.0)
        """
        if self.steps == 0 or self.seconds <= 0:
            return {}
        measured = sum(self.parts.values())
        result = {
            "steps_per_second": self.steps / self.seconds,
            "utterances_per_second": self.utterances / self.seconds,
            "step_seconds": self.seconds / self.steps,
            "effective_batch": self.utterances / self.steps,
            "data_wait_share": self.parts["data"] / self.seconds,
            "forward_backward_share": self.parts["forward_backward"] / self.seconds,
            "optimizer_share": self.parts["optimizer"] / self.seconds,
            "overhead_share": max(0.0, self.seconds - measured) / self.seconds if measured else 0.0,
        }
        if self.losses:
            result["loss"] = self.loss_sum / self.losses
        return result


class PerformanceTracker:
    """Speed and memory of a run, over the last `log_interval` steps and in all.

    Args:
        log_interval: steps after which `update` logs a summary by itself; 0 never does.
        precision: shown in the summary.
        accumulation_steps: micro-batches per step, shown in the summary.
        device: whose memory and utilisation are reported; the CPU when None.

    Raises:
        ValueError: a negative interval, or no micro-batch a step.
    """

    def __init__(
        self,
        log_interval: int = 100,
        *,
        precision: str = "no",
        accumulation_steps: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        if log_interval < 0 or accumulation_steps < 1:
            raise ValueError(
                f"log_interval {log_interval}, accumulation_steps {accumulation_steps}; expected at least 0 and 1"
            )
        self.log_interval = log_interval
        self.precision = precision
        self.accumulation_steps = accumulation_steps
        self.device = torch.device(device or "cpu")
        self.total = Window()
        self.window = Window()

    def update(
        self,
        step_time: float,
        batch_size: int = 1,
        loss: float | None = None,
        parts: dict[str, float] | None = None,
    ) -> None:
        """Count one optimizer step.

        Args:
            step_time: seconds from the end of the step before to the end of this one.
            batch_size: utterances in all micro-batches of the step.
            loss: its loss, where it is known without asking the device.
            parts: seconds in `data`, `forward_backward` and `optimizer`.
        """
        for window in (self.total, self.window):
            window.add(step_time, batch_size, loss, parts or {})
        if self.log_interval and self.total.steps % self.log_interval == 0:
            self.log_summary()

    def take_window(self) -> dict[str, float]:
        """The summary since the last call, which then begins anew."""
        summary = self.window.summary()
        self.window = Window()
        return summary

    def summary(self) -> dict[str, Any]:
        """Everything since the start, with memory, utilisation and precision."""
        return {
            **self.total.summary(),
            "steps": self.total.steps,
            "precision": self.precision,
            "accumulation_steps": self.accumulation_steps,
            # The extra passes that accumulation makes inside one step.
            "accumulation_share": (self.accumulation_steps - 1) / self.accumulation_steps,
            **memory_summary(self.device),
        }

    def log_summary(self) -> dict[str, Any]:
        """Write the summary to the log and return it."""
        summary = self.summary()
        if "utterances_per_second" not in summary:
            logger.info("performance: no step counted yet")
            return summary
        logger.info(
            "performance: %.2f steps/s, %.1f utterances/s (effective batch %.0f, accumulation %d), "
            "waiting for data %.1f %%, precision %s%s%s",
            summary["steps_per_second"],
            summary["utterances_per_second"],
            summary["effective_batch"],
            self.accumulation_steps,
            100 * summary["data_wait_share"],
            self.precision,
            f", process peak {human_bytes(summary['process_peak_bytes'])}" if "process_peak_bytes" in summary else "",
            f", device peak {human_bytes(summary['device_peak_bytes'])}" if "device_peak_bytes" in summary else "",
        )
        return summary


def memory_summary(device: torch.device) -> dict[str, float]:
    """Peak memory of the process, and of the device with its utilisation where there is a GPU; as far as they tell."""
    readings: dict[str, tuple[str, Callable[[], float]]] = {
        "process_peak_bytes": ("peak memory of the process", process_peak_bytes)
    }
    if device.type == "cuda":
        readings |= {
            "device_peak_bytes": ("peak memory of the GPU", lambda: torch.cuda.max_memory_allocated(device)),
            "device_reserved_bytes": ("reserved memory of the GPU", lambda: torch.cuda.max_memory_reserved(device)),
            # Needs nvidia-ml-py, and a GPU that is not shared out.
            "gpu_utilisation_percent": ("utilisation of the GPU", lambda: torch.cuda.utilization(device)),
        }
    summary: dict[str, float] = {}
    for name, (what, read) in readings.items():
        with measuring(what):
            summary[name] = read()
    return summary
