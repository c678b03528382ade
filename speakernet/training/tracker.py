"""Counts what a training run does with its time: speed, waiting for data, memory. Arithmetic, no measuring of its own.

The trainer hands in the times; the tracker keeps a window since the last summary and totals since the start.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from speakernet.machine.facts import measuring
from speakernet.machine.memory import process_peak_bytes

PARTS = ("data", "forward_backward", "optimizer")


@dataclasses.dataclass
class Window:
    """Sums over some steps; seconds and counts."""

    steps: int = 0
    utterances: int = 0
    seconds: float = 0.0
    parts: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def add(self, seconds: float, utterances: int, parts: Mapping[str, float]) -> None:
        """Count one step."""
        self.steps += 1
        self.utterances += utterances
        self.seconds += seconds
        for name, value in parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + value

    def summary(self) -> dict[str, float]:
        """Rates and shares; empty while no time has passed.

        >>> window = Window()
        >>> window.add(0.5, 64, {"data": 0.1})
        >>> summary = window.summary()
        >>> summary["utterances_per_second"], summary["data_wait_share"]
        (128.0, 0.2)
        """
        if self.steps == 0 or self.seconds <= 0:
            return {}
        measured = sum(self.parts.values())
        return {
            "steps_per_second": self.steps / self.seconds,
            "utterances_per_second": self.utterances / self.seconds,
            "step_seconds": self.seconds / self.steps,
            "effective_batch": self.utterances / self.steps,
            "data_wait_share": self.parts["data"] / self.seconds,
            "forward_backward_share": self.parts["forward_backward"] / self.seconds,
            "optimizer_share": self.parts["optimizer"] / self.seconds,
            # What lies between the parts; rounding of the clock may make it negative.
            "overhead_share": max(0.0, self.seconds - measured) / self.seconds if measured else 0.0,
        }


class PerformanceTracker:
    """Speed and memory of a run, since the last window was taken and in all.

    Args:
        precision: shown in the summary.
        accumulation_steps: micro-batches per step, shown in the summary.
        device: whose memory and utilisation are reported.
    """

    def __init__(self, precision: str, accumulation_steps: int, device: torch.device) -> None:
        self.precision = precision
        self.accumulation_steps = accumulation_steps
        self.device = device
        self.total = Window()
        self.window = Window()

    def update(self, seconds: float, utterances: int, parts: Mapping[str, float]) -> None:
        """Count one optimizer step.

        Args:
            seconds: from the end of the step before to the end of this one.
            utterances: in all micro-batches of the step.
            parts: seconds in `data`, `forward_backward` and `optimizer`.
        """
        for window in (self.total, self.window):
            window.add(seconds, utterances, parts)

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
