"""What work takes, as the device that does it counts: the host may be far ahead of a GPU when it looks at the clock."""

import itertools
import time
from typing import Any

import torch


class DeviceClock:
    """Seconds between marks that are set in the device's own work.

    Setting one costs a GPU nothing and lets nobody wait; reading them waits for the last one, once.

    Args:
        device: that works; anything but a GPU works while the host waits, and is timed by the clock on the wall.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def __len__(self) -> int:
        """Stretches of time between the marks."""
        return max(0, len(self._marks) - 1)

    def mark(self) -> None:
        """Here one stretch ends and the next begins."""
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    def take(self) -> list[float]:
        """Seconds of the stretches, which are forgotten but for the last mark."""
        marks, self._marks = self._marks, self._marks[-1:]
        if self._device.type != "cuda":
            return [after - before for before, after in itertools.pairwise(marks)]
        if marks:
            marks[-1].synchronize()
        # In milliseconds.
        return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]
