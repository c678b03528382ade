"""Memory of this process: how much it uses, and when the C library returns it to the system.

The C library returns the memory of a large tensor as soon as it is freed, and the next step gets it
back, zeroed, in pages of 4 KiB; for large networks that takes longer than the arithmetic
(benchmarks/measurements.md). `speakernet.cli` enables huge pages before torch is imported, because
torch checks only then; no torch is imported here.
"""

import ctypes
import os
import platform
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

from speakernet.machine.facts import measuring

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch's switch: tensors of 2 MiB or more are aligned for, and advised to use, transparent huge
pages."""

# Parameters of mallopt(3): free bytes at the heap's end above which they are returned; size above
# which a block is mapped separately.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

KEPT_SHAPES = 64
"""Compiled convolutions; with fewer than a thousand, no network of this package is slower."""


def process_memory_bytes() -> int:
    """Current memory of this process in RAM (resident set size)."""
    return int(psutil.Process().memory_info().rss)


def process_peak_bytes() -> int:
    """Peak memory of this process in RAM so far."""
    # psutil reports the peak only on Windows.
    counted = getattr(psutil.Process().memory_info(), "peak_wset", None)
    if counted is not None:
        return int(counted)
    # Imported late: Windows does not have this module.
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # In bytes on macOS, in KiB on Linux.
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


class Monitor:
    """Samples a quantity regularly, in a thread, while the block runs; `what` names it if sampling
    fails.

    Without `read` it does nothing.

    >>> with Monitor(lambda: 7, "a constant") as monitor:
    ...     pass
    >>> monitor.start, monitor.peak, monitor.mean
    (7, 7, 7.0)
    """

    def __init__(
        self,
        read: Callable[[], float] | None = process_memory_bytes,
        what: str = "the memory of the process",
        *,
        sample_seconds: float = 0.01,
    ) -> None:
        self._read = read
        self._what = what
        self._sample_seconds = sample_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._count = 0
        self._sum = 0.0
        self.start: float = 0
        self.peak: float = 0

    def __enter__(self) -> "Monitor":
        if self._read is not None:
            # Before the block runs, so that `start` is what it began with.
            self.sample()
            self.start = self.peak
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._read is not None:
            self._stop.set()
            self._thread.join()
            self.sample()

    @property
    def mean(self) -> float | None:
        """Mean of all samples; None if there are none."""
        return self._sum / self._count if self._count else None

    def sample(self) -> None:
        """Take a sample now."""
        with measuring(self._what):
            value = self._read()  # type: ignore[misc]
            self.peak = max(self.peak, value)
            self._count += 1
            self._sum += value

    def _watch(self) -> None:
        while not self._stop.wait(self._sample_seconds):
            self.sample()


def huge_pages() -> bool:
    """Whether torch uses huge pages in this process: both Linux's switch and torch's own must allow
    them.
    """
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return (
        os.environ.get(HUGE_PAGES) == "1"
        and mode.exists()
        and "[never]" not in mode.read_text(encoding="ascii")
    )


def keep_freed_memory(*, keeps: bool) -> bool:
    """Let the C library keep freed memory for the next step, or return every large tensor when it
    is freed.

    Returns whether the library supports such settings.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    # Keeping: a plain step of ResNetSE34V2 had 3.5 million page faults, which took 10 of its 28
    # processor seconds; with this and huge pages the default step has under 1,000. Returning: the
    # threshold of 3 MiB is a compromise. ResNetSE34L's process grows by 152 to 181 MiB at 1.01 to
    # 1.05 s per step, and by 270 MiB at 0.81 s if memory is kept (benchmarks/measurements.md).
    mapped_from, trimmed_from = (2**30, 2**31 - 1) if keeps else (3 * 2**20, 2**24)
    set_option = ctypes.CDLL(None).mallopt
    return bool(
        set_option(_M_MMAP_THRESHOLD, mapped_from) and set_option(_M_TRIM_THRESHOLD, trimmed_from)
    )


def bound_compiled_shapes() -> None:
    """Limit what torch keeps for every new length of audio on a CPU, before its first convolution.

    oneDNN compiles each convolution for each input shape and keeps a thousand. With this limit
    300 lengths add 64 MB instead of 327 and rising (CAM++), at the same speed
    (benchmarks/measurements.md).
    """
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(variable, str(KEPT_SHAPES))


def release_freed_memory() -> None:
    """Return freed memory to the system now, regardless of `keep_freed_memory`."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out: Python's, a GPU's or torch's CPU allocator's.

    >>> is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    True
    >>> is_out_of_memory(RuntimeError("shape mismatch"))
    False
    """
    # Recognised by text: torch raises RuntimeErrors, and the command line does not import torch.
    text = str(error).casefold()
    if isinstance(error, RuntimeError):
        return "out of memory" in text or "can't allocate memory" in text
    return isinstance(error, MemoryError)
