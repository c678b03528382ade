"""Memory of large tensors on a CPU: kept between steps and taken in pages of 2 MiB, instead of page by page every time.

The C library gives the memory of a large tensor back to the system as soon as it is freed, and the next step gets it
again zeroed in pages of 4 KiB; for large networks that takes longer than their arithmetic (docs/performance.md).
`speakernet.cli` switches huge pages on before torch is imported, which is when torch looks.
"""

import ctypes
import functools
import os
import platform
from pathlib import Path

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch's own switch: tensors of 2 MiB and more are aligned to, and advised into, transparent huge pages."""

# Parameters of mallopt(3) and what they are set to: nothing is trimmed, and only what is larger is mapped by itself.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER_TRIM = 2**31 - 1
_KEPT_BYTES = 2**30


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
    if platform.libc_ver()[0] != "glibc":
        return False, "the C library is not glibc"
    done = _mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES) and _mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)
    return (True, "the next step needs it again") if done else (False, "the C library refused")


def release_freed_memory() -> None:
    """Give freed memory back to the system now, whatever `keep_freed_memory` has set."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def _mallopt(parameter: int, value: int) -> bool:
    return bool(ctypes.CDLL(None).mallopt(parameter, value))
