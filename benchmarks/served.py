"""A callable in a process of its own that runs on request, so that settings of a process can be compared.

The two ends exchange lines: every line that comes in asks for one run, which is answered by its figures as JSON.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.timing import Timing, Way, finish_device, run_in_turn, timings
from speakernet.machine.memory import HUGE_PAGES

SCRIPT = Path(__file__).resolve().parents[1] / "benchmark_performance.py"


def own_command(*arguments: str) -> list[str]:
    """This very benchmark with other arguments, as a command to start."""
    return [sys.executable, str(SCRIPT), *arguments]


def own_environment(*, huge_pages: bool) -> dict[str, str]:
    """This process's environment, with torch's huge pages on or off: torch reads it once, when it is imported."""
    return {**os.environ, HUGE_PAGES: "1" if huge_pages else "0"}


def serve(run: Callable[[], Mapping[str, float] | None]) -> None:
    """In the process: call `run` for every line that comes in, until no more come."""
    for _ in sys.stdin:
        figures = run()
        finish_device()
        sys.stdout.write(json.dumps(figures or {}) + "\n")
        sys.stdout.flush()


class ServedProcess:
    """The other end: starts the process; `run` makes it run once and waits.

    Args:
        name: of what it does, for messages.
        command: what to start.
        environment: of the process; None takes this one's.

    Attributes:
        figures: what each run answered.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.name, self.figures = name, list[dict[str, float]]()
        # A file, not a pipe: nobody reads it while the process runs, and a full pipe would block it.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=None if environment is None else dict(environment),
        )

    def run(self, prepared: None = None) -> int:
        """Once more; the run that was done counts as one item.

        Raises:
            ValueError: the process ended; with the end of its errors.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        try:
            self.figures.append(json.loads(self._process.stdout.readline()))
        except ValueError:
            status = self._process.wait()
            self._errors.seek(0)
            errors = self._errors.read().strip()[-500:]
            # Windows has no such signal, and no negative status.
            if status < 0 and status == -getattr(signal, "SIGKILL", 0):
                errors += "\nThe system killed the process: out of memory? Compare smaller batches."
            raise ValueError(f"{self.name!r} failed (status {status}): {errors}") from None
        return 1

    def close(self) -> None:
        """End the process: it sees the end of its input, and is killed where that is not enough."""
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._errors.close()


def time_processes(
    commands: Mapping[str, tuple[Sequence[str], Mapping[str, str]]], *, rounds: int, warmup: int = 1, settle: int = 0
) -> list[Timing]:
    """Start all processes and time a run of each in turn; the first is the reference.

    Args:
        commands: name -> what to start, and its environment.
        rounds: as `run_in_turn` takes it, and so the rest.
        warmup: runs of each before anything counts.
        settle: runs before each one that counts.

    Raises:
        ValueError: a process failed; with the end of its errors.
    """
    with contextlib.ExitStack() as stack:
        ways = {}
        for name, (command, environment) in commands.items():
            process = stack.enter_context(contextlib.closing(ServedProcess(name, command, environment)))
            ways[name] = Way(process.run)
        return timings(run_in_turn(ways, rounds=rounds, warmup=warmup, settle=settle))
