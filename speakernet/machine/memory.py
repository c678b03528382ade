"""Memory that this process holds: now, at its peak so far, and at the peak of a block."""

import sys
import threading
from collections.abc import Callable
from types import TracebackType

import psutil

from speakernet.machine.measuring import measuring

# A peak that is shorter than this may be missed.
SAMPLE_SECONDS = 0.01


def process_memory_bytes() -> int:
    """Memory of this process in RAM now (resident set size)."""
    return int(psutil.Process().memory_info().rss)


def process_peak_bytes() -> int:
    """The most memory that this process has held in RAM so far."""
    # Windows counts it beside the rest, psutil shows it there alone.
    counted = getattr(psutil.Process().memory_info(), "peak_wset", None)
    if counted is not None:
        return int(counted)
    # Late: Windows has no such module.
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, Linux KiB.
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


class MemoryMonitor:
    """Samples this process's memory in a thread while the block runs.

    Attributes:
        start_bytes: resident memory at the beginning.
        peak_bytes: the most that was seen.
    """

    def __init__(self, sample_seconds: float = SAMPLE_SECONDS, read: Callable[[], int] = process_memory_bytes) -> None:
        self._sample_seconds = sample_seconds
        self._read = read
        self._stop = threading.Event()
        self.start_bytes = self.peak_bytes = 0

    def __enter__(self) -> "MemoryMonitor":
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.start_bytes = self.peak_bytes = 0
        self.sample()
        self.start_bytes = self.peak_bytes
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.sample()

    @property
    def added_bytes(self) -> int:
        """How much the peak lies above the beginning."""
        return self.peak_bytes - self.start_bytes

    def _watch(self) -> None:
        while not self._stop.wait(self._sample_seconds):
            self.sample()

    def sample(self) -> None:
        """Look now, where a peak would fall between two samples."""
        with measuring("memory of the process"):
            self.peak_bytes = max(self.peak_bytes, self._read())
