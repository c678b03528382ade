"""Profile some training steps: traces for Perfetto, the most expensive operations, the share of each phase.

The trainer marks its phases with `phase(name)` and calls `step()` once an optimizer step; without profiling both do
nothing, so the trainer has one code path.
"""

import contextlib
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from speakernet.machine.facts import measuring
from speakernet.training.options import RuntimeOptions

logger = logging.getLogger(__name__)

PHASE_PREFIX = "speakernet."
PHASES = ("data", "forward", "backward", "optimizer")
NUM_OPERATIONS = 10


class NoProfiler:
    """Used when nothing is profiled."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Nothing to mark."""
        return contextlib.nullcontext()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to pause."""
        return contextlib.nullcontext()

    def step(self) -> None:
        """Nothing to count."""

    def close(self) -> None:
        """Nothing to write."""


class StepProfiler:
    """Records some optimizer steps after as many of warm-up."""

    def __init__(self, options: RuntimeOptions, folder: str | Path, device: torch.device) -> None:
        self.folder = Path(folder)
        self.num_steps = num_steps = options.profile_steps
        self.is_on_gpu = device.type == "cuda"
        self.table = ""
        self.shares: dict[str, float] = {}
        self._activities = [torch.profiler.ProfilerActivity.CPU]
        if self.is_on_gpu:
            self._activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=self._activities,
            schedule=torch.profiler.schedule(wait=0, warmup=num_steps, active=num_steps, repeat=1),
            on_trace_ready=self._report,
            profile_memory=True,
        )
        self._is_running = True
        self._steps = 0
        # Profilers fail in ways of their own on some drivers, here and below; none of them may end a run.
        with measuring("the profile"):
            self._profiler.start()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a phase of the step: data, forward, backward or optimizer."""
        with torch.profiler.record_function(PHASE_PREFIX + name):
            yield

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block (an evaluation between two steps) nothing is recorded."""
        is_recording = self._is_running and self.num_steps <= self._steps < 2 * self.num_steps
        if is_recording:
            self._collect(False)
        try:
            yield
        finally:
            if is_recording:
                self._collect(True)

    def step(self) -> None:
        """One optimizer step is over."""
        if self._is_running:
            self._steps += 1
            with measuring("the profile"):
                self._profiler.step()

    def close(self) -> None:
        """Stop; a run shorter than the recording reports what there is."""
        if self._is_running:
            self._is_running = False
            if self._steps <= self.num_steps:
                logger.warning(
                    "nothing was profiled: %d steps, and the first %d only warm up; lower runtime.profile_steps",
                    self._steps,
                    self.num_steps,
                )
            with measuring("the profile"):
                self._profiler.stop()

    def _collect(self, is_on: bool) -> None:
        with measuring("the profile"):
            self._profiler.toggle_collection_dynamic(is_on, self._activities)

    def _report(self, profiler: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Called when the recording is full or the run ends, whichever comes first.
        recorded = max(1, min(self.num_steps, self._steps - self.num_steps))
        trace = self.folder / "steps.pt.trace.json"
        profiler.export_chrome_trace(str(trace))
        averages = profiler.key_averages()
        order = "self_device_time_total" if self.is_on_gpu else "self_cpu_time_total"
        self.shares = phase_shares({event.key: event.cpu_time_total for event in averages})
        self.table = averages.table(sort_by=order, row_limit=NUM_OPERATIONS, max_name_column_width=56)
        logger.info("trace of %d steps in %s (open it at ui.perfetto.dev)", recorded, trace)
        logger.info("time by phase: %s", ", ".join(f"{name} {share:.0%}" for name, share in self.shares.items()))
        logger.info("most expensive operations:\n%s", self.table)


def peak_tensor_bytes(run: Callable[[], None]) -> int:
    """The most memory that tensors made by `run()` hold at one time on the CPU, as torch's allocator counts it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    # Events of the GPU have other device types.
    changes = [
        event["args"] for event in events if event.get("name") == "[memory]" and not event["args"]["Device Type"]
    ]
    if not changes:
        return 0
    before = changes[0]["Total Allocated"] - changes[0]["Bytes"]
    return max(0, max(change["Total Allocated"] for change in changes) - before)


def phase_shares(totals: dict[str, float]) -> dict[str, float]:
    """Share of each phase in the time of all phases.

    >>> phase_shares({"speakernet.data": 1.0, "speakernet.forward": 3.0, "aten::conv2d": 2.0})
    {'data': 0.25, 'forward': 0.75, 'backward': 0.0, 'optimizer': 0.0}
    """
    times = {name: totals.get(PHASE_PREFIX + name, 0.0) for name in PHASES}
    whole = sum(times.values())
    return {name: value / whole if whole else 0.0 for name, value in times.items()}
