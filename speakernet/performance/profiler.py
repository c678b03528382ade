"""Profiles some steps of a run: traces for TensorBoard and Perfetto, the ten dearest operations, shares by part.

The trainer marks its parts with `part` and the end of each step with `step`; without profiling, `NoProfiler` does nothing.
"""

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

NUM_OPERATIONS = 10


class NoProfiler:
    """Does nothing, at no cost."""

    def part(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A part of the step."""
        return contextlib.nullcontext()

    def step(self) -> None:
        """The end of a step."""

    def close(self) -> None:
        """The end of the run."""


class StepProfiler:
    """Records `num_steps` steps after `warmup` of warm-up, once, then steps aside.

    Args:
        folder: traces go into `<folder>/profile/`.
        num_steps: steps recorded.
        warmup: steps before the recording (the first ones compile, allocate, fill caches).
    """

    def __init__(self, folder: str | Path, *, num_steps: int = 5, warmup: int = 5) -> None:
        self.folder = Path(folder) / "profile"
        self.num_steps = num_steps
        self.table = ""
        self.shares: dict[str, float] = {}
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._is_open = True
        self._profiler = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=max(0, warmup - 1), warmup=1, active=num_steps, repeat=1),
            on_trace_ready=self._finish,
            record_shapes=True,
            profile_memory=True,
        )
        self._profiler.start()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Mark a part of the step (data, forward_backward, optimizer) in the trace."""
        if not self._is_open:
            yield
            return
        with torch.profiler.record_function(f"part: {name}"):
            yield

    def step(self) -> None:
        """The end of a step."""
        if self._is_open:
            self._profiler.step()

    def close(self) -> None:
        """Stop, also when fewer steps came than were to be recorded."""
        if self._is_open:
            self._is_open = False
            self._profiler.stop()

    def _finish(self, profiler: Any) -> None:
        self._is_open = False
        self.folder.mkdir(parents=True, exist_ok=True)
        # The name that TensorBoard's plug-in looks for; Perfetto (ui.perfetto.dev) and chrome://tracing open it too.
        path = self.folder / f"speakernet.{time.time_ns()}.pt.trace.json"
        profiler.export_chrome_trace(str(path))
        averages = profiler.key_averages()
        by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        self.table = averages.table(sort_by=by, row_limit=NUM_OPERATIONS)
        self.shares = part_shares({one.key: one.cpu_time_total for one in averages})
        (self.folder / "operations.txt").write_text(self.table + "\n", encoding="utf-8")
        logger.info("the %d dearest operations over %d steps:\n%s", NUM_OPERATIONS, self.num_steps, self.table)
        logger.info("time by part: %s", ", ".join(f"{key} {value:.1%}" for key, value in self.shares.items()))
        logger.info("trace: %s (open it at ui.perfetto.dev, or with TensorBoard)", path)


def part_shares(microseconds: dict[str, float]) -> dict[str, float]:
    """From the profiler's times by name to the share of each part; `backward` is torch's own name for its engine.

    >>> part_shares({"part: data": 10.0, "part: forward_backward": 70.0, "part: optimizer": 20.0, "aten::add": 5.0})
    {'data': 0.1, 'forward_backward': 0.7, 'optimizer': 0.2}
    """
    parts = {key.removeprefix("part: "): value for key, value in microseconds.items() if key.startswith("part: ")}
    total = sum(value for key, value in parts.items() if key not in ("forward", "backward")) or 1.0
    return {key: value / total for key, value in parts.items()}
