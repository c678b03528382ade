"""A callable in a separate process that runs on request, for comparing settings of a process.

The two ends exchange lines: every line of input requests one run, and the answer is a line with its
figures as JSON.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.timing import finish_device
from speakernet.machine.memory import HUGE_PAGES

SCRIPT = Path(__file__).resolve().parents[1] / "benchmark_performance.py"


def own_command(*arguments: str) -> list[str]:
    """The command that starts this benchmark with other arguments."""
    return [sys.executable, str(SCRIPT), *arguments]


def own_environment(*, huge_pages: bool) -> dict[str, str]:
    """This process's environment with torch's huge pages on or off, which torch reads only when it
    is imported.
    """
    return {**os.environ, HUGE_PAGES: "1" if huge_pages else "0"}


def serve(run: Callable[[], Mapping[str, float] | None]) -> None:
    """In the separate process: call `run` for every line of input."""
    # The loop ends with the input, so a requesting process that dies leaves no orphans behind.
    for _ in sys.stdin:
        figures = run()
        finish_device()
        sys.stdout.write(json.dumps(figures or {}) + "\n")
        sys.stdout.flush()


# Why processes and a pipe. Memory settings, threads and huge pages belong to a process and are read
# when torch is imported, so variants cannot share one. Starting a process for each run would
# measure imports and cold caches; so each variant has one that stays, and is asked for a run when
# its turn comes. A line on a pipe costs microseconds, a step tenths of a second.
class ServedProcess:
    """The requesting end: starts the process; `run` makes it run once and waits.

    Args:
        name: name of the work, for messages.
        command: command to start.
        environment: environment of the process.

    Attributes:
        figures: the figures of each run.
    """

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str]) -> None:
        self.name = name
        self.figures = list[dict[str, float]]()
        # A file, not a pipe: it is not read while the process runs, and a full pipe would block.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )

    def run(self, prepared: None = None) -> int:
        """Run once; returns 1, the number of items done.

        Raises:
            ValueError: the process ended; the message has the last part of its errors.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        # The process may be gone already. The missing answer says so, with its errors.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        try:
            self.figures.append(json.loads(self._process.stdout.readline()))
        except ValueError:
            status = self._process.wait()
            self._errors.seek(0)
            errors = self._errors.read().strip()[-500:]
            raise ValueError(f"{self.name!r} failed (status {status}): {errors}") from None
        return 1

    def close(self) -> None:
        """End the process by closing its input; kill it if that is not enough."""
        try:
            # Closes the input, at which the loop of `serve` ends.
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._errors.close()
