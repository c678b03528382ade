"""Memory of large tensors on a CPU: kept between steps and taken in pages of 2 MiB, instead of page by page every time.

The C library gives the memory of a large tensor back to the system as soon as it is freed, and the next step gets it
again zeroed in pages of 4 KiB; for large networks that takes longer than their arithmetic (docs/performance.md).
`speakernet.cli` switches huge pages on before torch is imported, which is when torch looks; no torch is imported here.
"""

import ctypes
import os
import platform
from pathlib import Path

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch's own switch: tensors of 2 MiB and more are aligned to, and advised into, transparent huge pages."""

# Parameters of mallopt(3): bytes free at the heap's end that are given back; bytes of a block that is mapped by itself.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def huge_pages() -> tuple[bool, str]:
    """Whether this process's torch uses huge pages, and why (not)."""
    if os.environ.get(HUGE_PAGES) != "1":
        return False, f"{HUGE_PAGES}=1 was not set before torch was imported"
    try:
        mode = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        return False, "this system has no transparent huge pages"
    if "[never]" in mode:
        return False, "switched off in /sys/kernel/mm/transparent_hugepage/enabled"
    return True, "large tensors then cost fewer page faults"


def keep_freed_memory() -> tuple[bool, str]:
    """Let the C library keep freed memory for the next step; returns whether it does, and why (not)."""
    # A plain step of ResNetSE34V2 had 3.5 million page faults, 10 of its 28 processor seconds; with this and huge pages
    # the default step has under 1,000.
    problem = _set_thresholds(mapped_from=2**30, trimmed_from=2**31 - 1)
    return (False, problem) if problem else (True, "the next step needs it again")


def return_freed_memory() -> tuple[bool, str]:
    """Let the C library give back every large tensor when it is freed, so that none leaves a hole in the heap.

    Returns False (freed memory is not kept) and the reason, as `keep_freed_memory` does.
    """
    # A compromise: from 3 MiB on ResNetSE34L's process grows by 152 to 181 MiB at 1.01 to 1.05 s a step, with memory
    # kept by 270 MiB at 0.81 s (docs/performance.md).
    problem = _set_thresholds(mapped_from=3 * 2**20, trimmed_from=2**24)
    return False, problem or "gradient checkpointing: memory goes before time"


def release_freed_memory() -> None:
    """Give freed memory back to the system now, whatever `keep_freed_memory` has set."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _set_thresholds(*, mapped_from: int, trimmed_from: int) -> str:
    """Set both; returns what prevented it, or nothing."""
    if platform.libc_ver()[0] != "glibc":
        return "the C library is not glibc"
    set_option = ctypes.CDLL(None).mallopt
    done = set_option(_M_MMAP_THRESHOLD, mapped_from) and set_option(_M_TRIM_THRESHOLD, trimmed_from)
    return "" if done else "the C library refused"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out: Python's, a GPU's or that of torch's CPU allocator.

    Told by its words, since torch's are RuntimeErrors and the command line does without torch.

    >>> is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    True
    >>> is_out_of_memory(RuntimeError("shape mismatch"))
    False
    """
    if isinstance(error, MemoryError):
        return True
    said = str(error).casefold()
    return isinstance(error, RuntimeError) and ("out of memory" in said or "can't allocate memory" in said)
