"""Memory of large tensors: kept between steps, given back, in huge pages; counted in page faults."""

import json
import mmap
import os
import platform
import subprocess
import sys

import pytest

from speakernet.machine.memory import HUGE_PAGES, huge_pages

SCRIPTS = {
    "kept": "given_back = faults(4, 64)\n"
    "assert keep_freed_memory()[0]\n"
    # Small allocations take bites out of the freed place, and the heap grows by another: up to six times was seen.
    "faults(32, 64)\n"
    "kept = faults(4, 64)\n"
    "release_freed_memory()\n"
    "print(given_back, kept, faults(1, 64))\n",
    "given back": "assert not return_freed_memory()[0]\nfaults(8, 24)\nprint(faults(4, 24))\n",
}
"""`faults(times, mebibytes)` makes and frees a tensor that often and counts the page faults."""

OWNER = """
import json, os, resource, sys, torch
from speakernet.machine.memory import keep_freed_memory, release_freed_memory, return_freed_memory

def faults(times, mebibytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.ones(mebibytes, 512, 512)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for script in json.loads(sys.argv[1]):
    process = os.fork()
    if not process:
        exec(script)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
"""


@pytest.fixture(scope="module")
def page_faults() -> dict[str, list[int]]:
    """What each script prints in a copy of a process whose memory no test has grown."""
    # Without huge pages, each of which is one fault.
    environment = {**os.environ, HUGE_PAGES: "0"}
    command = [sys.executable, "-c", OWNER, json.dumps(list(SCRIPTS.values()))]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    lines = result.stdout.splitlines()
    return {name: [int(number) for number in line.split()] for name, line in zip(SCRIPTS, lines, strict=True)}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="memory is kept with glibc only")
def test_kept_memory_costs_no_page_faults(page_faults: dict[str, list[int]]) -> None:
    given_back, kept, released = page_faults["kept"]
    pages = 64 * 2**20 // mmap.PAGESIZE
    assert given_back >= 4 * pages and kept < pages / 4 and released > pages / 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="memory is given back with glibc only")
def test_memory_is_given_back_where_the_c_library_would_keep_it(page_faults: dict[str, list[int]]) -> None:
    """By itself it usually keeps tensors of up to 32 MiB once it has freed one."""
    pages = 24 * 2**20 // mmap.PAGESIZE
    assert page_faults["given back"][0] >= 4 * pages


def test_huge_pages_need_their_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HUGE_PAGES, raising=False)
    assert huge_pages() == (False, "THP_MEM_ALLOC_ENABLE=1 was not set before torch was imported")
