"""Memory of large tensors: kept between steps, given back, in huge pages; counted in page faults."""

import mmap
import os
import platform
import subprocess
import sys

import pytest

from speakernet.machine.allocation import HUGE_PAGES, huge_pages


def page_faults(script: str) -> list[int]:
    """What the script prints, in a process of its own, whose memory no other test has grown.

    `faults(times, mebibytes)` makes and frees a tensor that often and counts the page faults.
    """
    begin = (
        "import resource, torch\n"
        "from speakernet.machine.allocation import keep_freed_memory, release_freed_memory, return_freed_memory\n"
        "def faults(times, mebibytes):\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    for _ in range(times):\n"
        "        torch.ones(mebibytes, 512, 512)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
    )
    # Without huge pages, each of which is one fault.
    environment = {**os.environ, HUGE_PAGES: "0"}
    result = subprocess.run(
        [sys.executable, "-c", begin + script], capture_output=True, text=True, check=True, env=environment
    )
    return [int(number) for number in result.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="memory is kept with glibc only")
def test_kept_memory_costs_no_page_faults() -> None:
    given_back, kept, released = page_faults(
        "given_back = faults(4, 64)\n"
        "assert keep_freed_memory()[0]\n"
        # Small allocations take bites out of the freed place, and the heap grows by another: up to six times was seen.
        "faults(32, 64)\n"
        "kept = faults(4, 64)\n"
        "release_freed_memory()\n"
        "print(given_back, kept, faults(1, 64))\n"
    )
    pages = 64 * 2**20 // mmap.PAGESIZE
    assert given_back >= 4 * pages and kept < pages / 4 and released > pages / 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="memory is given back with glibc only")
def test_memory_is_given_back_where_the_c_library_would_keep_it() -> None:
    """By itself it keeps tensors of up to 32 MiB once it has freed one."""
    script = "faults(8, 24)\nprint(faults(4, 24))\n"
    pages = 24 * 2**20 // mmap.PAGESIZE
    # Once it has freed one, or once more where something small kept the heap from growing in place: never each time.
    assert page_faults(script)[0] < 3 * pages
    assert page_faults("assert not return_freed_memory()[0]\n" + script)[0] >= 4 * pages


def test_huge_pages_need_their_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HUGE_PAGES, raising=False)
    assert huge_pages() == (False, "THP_MEM_ALLOC_ENABLE=1 was not set before torch was imported")
