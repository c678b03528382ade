"""Processes that run something when told to: answers, failures, the end."""

import contextlib
import os
import sys

import pytest

from benchmarks.served import ServedProcess, time_processes

SCRIPT = """
from benchmarks.served import serve
left = [3]
def run():
    left[0] -= 1
    if left[0] == 0:
        raise SystemExit("nothing left")
serve(run)
"""


def test_it_runs_once_for_every_call_and_says_why_it_ended() -> None:
    process = ServedProcess("counter", [sys.executable, "-c", SCRIPT])
    with contextlib.closing(process):
        process.run()
        process.run()
        for _ in range(2):
            with pytest.raises(ValueError, match=r"'counter' failed \(status 1\): nothing left"):
                process.run()


def test_processes_are_timed_and_ended() -> None:
    script = "from benchmarks.served import serve\nserve(lambda: None)\n"
    command = [sys.executable, "-c", script]
    plain, fast = time_processes({"plain": (command, os.environ), "fast": (command, os.environ)}, rounds=2)
    assert (plain.name, fast.name, plain.ratio) == ("plain", "fast", 1.0) and fast.median_seconds > 0
    with pytest.raises(ValueError, match="'broken' failed"):
        time_processes({"plain": (command, os.environ), "broken": ([sys.executable, "-c", "1 / 0"], {})}, rounds=1)
