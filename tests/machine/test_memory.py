"""Memory of the process: its peak on every system, and the peak of a block."""

import sys
import types

import pytest

from speakernet.machine import memory
from speakernet.machine.memory import Monitor, process_memory_bytes, process_peak_bytes


def test_memory_monitor_sees_the_peak() -> None:
    readings = iter([100, 300, 900, 200] + [200] * 10_000)
    seen: list[int] = []

    def read() -> int:
        seen.append(next(readings))
        return seen[-1]

    with Monitor(sample_seconds=0.001, read=read) as monitor:
        while len(seen) < 5:
            pass
    assert monitor.peak == 900
    assert monitor.peak - monitor.start == 800


def test_the_peak_is_about_what_is_held_now_or_more() -> None:
    """Linux adds pages to the two counts at different moments, some hundreds of KiB apart."""
    assert 10 << 20 < 0.9 * process_memory_bytes() < process_peak_bytes() < 1 << 40


def test_the_peak_where_windows_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """There psutil has it, and there is no module `resource`."""
    process = types.SimpleNamespace(memory_info=lambda: types.SimpleNamespace(rss=3, peak_wset=7))
    monkeypatch.setattr(memory.psutil, "Process", lambda: process)
    monkeypatch.setitem(sys.modules, "resource", None)
    assert process_peak_bytes() == 7


@pytest.mark.parametrize(("platform", "expected"), [("linux", 5 * 1024), ("darwin", 5)])
def test_the_peak_in_the_units_of_the_system(platform: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = types.SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: types.SimpleNamespace(ru_maxrss=5))
    monkeypatch.setitem(sys.modules, "resource", usage)
    monkeypatch.setattr(memory.sys, "platform", platform)
    assert process_peak_bytes() == expected
