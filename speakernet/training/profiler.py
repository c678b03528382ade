"""Profiles some training steps: a trace for Perfetto, the most expensive operations, the share of
each phase.

The step marks its phases with `torch.profiler.record_function`, which costs nothing unless a
profiler records.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from speakernet.training.options import RuntimeOptions

logger = logging.getLogger(__name__)

PHASES = ("data", "forward", "backward", "optimizer")
NUM_OPERATIONS = 10


class StepProfiler:
    """Records some optimizer steps after as many warm-up steps."""

    def __init__(self, options: RuntimeOptions, folder: str | Path, device: torch.device) -> None:
        self.folder = Path(folder)
        self.num_steps = options.profile_steps
        self.device = device
        self._activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(torch.profiler.ProfilerActivity.CUDA)
        # The profiler's own start takes time, which its warm-up steps keep out of the first trace.
        self._profiler = torch.profiler.profile(
            activities=self._activities,
            schedule=torch.profiler.schedule(
                wait=0, warmup=self.num_steps, active=self.num_steps, repeat=1
            ),
            on_trace_ready=self._report,
            profile_memory=True,
        )
        self._steps = 0
        self._profiler.start()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Record nothing inside the block (an evaluation between two steps)."""
        # An evaluation would add thousands of operations that are not part of a step, and make the
        # trace too large to open.
        is_recording = self.num_steps <= self._steps < 2 * self.num_steps
        if is_recording:
            self._profiler.toggle_collection_dynamic(False, self._activities)
        try:
            yield
        finally:
            if is_recording:
                self._profiler.toggle_collection_dynamic(True, self._activities)

    def step(self) -> None:
        """Called after each optimizer step."""
        self._steps += 1
        self._profiler.step()

    def close(self) -> None:
        """Stop recording; a run that ends early reports the steps recorded so far."""
        if self._steps <= self.num_steps:
            logger.warning(
                "nothing was profiled: the run had %d steps and the first %d are warm-up; lower "
                "runtime.profile_steps",
                self._steps,
                self.num_steps,
            )
        self._profiler.stop()

    def _report(self, profiler: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Called when the recording is complete or the run ends, whichever comes first.
        recorded = max(1, min(self.num_steps, self._steps - self.num_steps))
        trace = self.folder / "steps.pt.trace.json"
        profiler.export_chrome_trace(str(trace))
        averages = profiler.key_averages()
        times = dict.fromkeys(PHASES, 0.0)
        # The phases are the ranges that `step.py` marks. On a GPU these are times of the host,
        # which runs ahead of the device; the table below has the device's times.
        for event in averages:
            phase = event.key.removeprefix("speakernet.")
            if phase in times:
                times[phase] = event.cpu_time_total
        whole = sum(times.values()) or 1.0
        shares = ", ".join(f"{phase} {time / whole:.0%}" for phase, time in times.items())
        logger.info("trace of %d steps in %s (open it at ui.perfetto.dev)", recorded, trace)
        logger.info("time by phase: %s", shares)
        order = "self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        table = averages.table(sort_by=order, row_limit=NUM_OPERATIONS, max_name_column_width=56)
        logger.info("most expensive operations:\n%s", table)
