"""Memory of the process: its peak on every system, readings of a block, page faults of large tensors."""

import json
import mmap
import os
import platform
import subprocess
import sys
import types

import pytest

from speakernet.machine import memory
from speakernet.machine.memory import HUGE_PAGES, Monitor, huge_pages, process_memory_bytes, process_peak_bytes

SCRIPTS = [
    "given_back = faults(4, 64)\n"
    "assert keep_freed_memory()\n"
    # Small allocations take bites out of the freed place, and the heap grows by another: up to six times was seen.
    "faults(32, 64)\n"
    "kept = faults(4, 64)\n"
    "release_freed_memory()\n"
    "print(given_back, kept, faults(1, 64))\n",
    "assert return_freed_memory()\nfaults(8, 24)\nprint(faults(4, 24))\n",
]
"""Memory that is kept, and given back; `faults(times, mebibytes)` counts the page faults of tensors made and freed."""

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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="memory is kept and given back with glibc only")
def test_page_faults() -> None:
    """In copies of a process whose memory no test has grown, without huge pages, each of which is one fault."""
    command = [sys.executable, "-c", OWNER, json.dumps(SCRIPTS)]
    environment = {**os.environ, HUGE_PAGES: "0"}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    (given_back, kept, released), (returned,) = (
        [int(number) / (2**20 // mmap.PAGESIZE) for number in line.split()] for line in result.stdout.splitlines()
    )
    assert given_back >= 4 * 64 and kept < 64 / 4 and released > 64 / 2
    # By itself the C library usually keeps tensors of up to 32 MiB once it has freed one.
    assert returned >= 4 * 24


def test_huge_pages_need_their_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HUGE_PAGES, raising=False)
    assert not huge_pages()


def test_monitor() -> None:
    readings = iter([100, 300, 900, 200, *[200] * 10_000])
    seen: list[int] = []

    def read() -> int:
        seen.append(next(readings))
        return seen[-1]

    with Monitor(read, sample_seconds=0.001) as monitor:
        while len(seen) < 5:
            pass
    assert (monitor.start, monitor.peak, monitor.mean) == (100, 900, pytest.approx(sum(seen) / len(seen)))
    with Monitor(None) as idle:
        pass
    assert idle.mean is None


def test_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux adds pages to the two counts at different moments; on Windows psutil has the peak."""
    assert 10 << 20 < 0.9 * process_memory_bytes() < process_peak_bytes() < 1 << 40
    for name, expected in (("linux", 5 * 1024), ("darwin", 5)):
        usage = types.SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: types.SimpleNamespace(ru_maxrss=5))
        monkeypatch.setitem(sys.modules, "resource", usage)
        monkeypatch.setattr(memory.sys, "platform", name)
        assert process_peak_bytes() == expected
    process = types.SimpleNamespace(memory_info=lambda: types.SimpleNamespace(rss=3, peak_wset=7))
    monkeypatch.setattr(memory.psutil, "Process", lambda: process)
    monkeypatch.setitem(sys.modules, "resource", None)
    assert process_peak_bytes() == 7
