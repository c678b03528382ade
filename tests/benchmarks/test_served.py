"""Processes that run something when told to: answers, failures, the end."""

import contextlib
import sys

import pytest

from benchmarks.served import ServedProcess

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
