"""A callable in a process of its own that runs when it is told to, so that settings of a process can be compared.

The two ends talk in lines: every line that comes in means "once more", and is answered when it is done.
"""

import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence

DONE = "done\n"


def serve(run: Callable[[], None]) -> None:
    """In the process: call `run` for every line that comes in, until no more come."""
    for _ in sys.stdin:
        run()
        sys.stdout.write(DONE)
        sys.stdout.flush()


class ServedProcess:
    """The other end: starts the process; `run` makes it run once and waits.

    Args:
        name: of what it does, for messages.
        command: what to start.
        environment: of the process; None takes this one's.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=None if environment is None else dict(environment),
        )

    def run(self) -> None:
        """Once more.

        Raises:
            ValueError: the process ended, with the last that it said.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        if self._process.stdout.readline() != DONE:
            status = self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().strip()[-500:]
            if status == -signal.SIGKILL:
                said += "\nThe system killed the process: out of memory? Compare fewer at once, or smaller batches."
            raise ValueError(f"{self.name!r} failed (status {status}): {said}")

    def close(self) -> None:
        """End the process: it sees the end of its input, and is killed where that is not enough."""
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._errors.close()
