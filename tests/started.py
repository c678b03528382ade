"""Commands with several real processes: started, watched, signalled and ended, leaving nothing
behind.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from speakernet.checkpoint import read_own_checkpoint

REPOSITORY = Path(__file__).resolve().parents[1]
PATIENCE_SECONDS = 240
"""Time limit for each wait, even on a busy machine."""
SHARED_MEMORY = "/dev/shm/"
PORT = "--master_port={}"


def free_port():
    """A port on which nothing listens."""
    with socket.socket() as trial:
        trial.bind(("localhost", 0))
        return int(trial.getsockname()[1])


def own_environment():
    """This environment without variables of an outer torchrun, with the checkout importable."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")
    }
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}


def torchrun(*options, count=2):
    """The command up to the script; on a free port unless the options give a rendezvous."""
    meet = () if any(word.startswith("--rdzv") for word in options) else (PORT.format(free_port()),)
    start = f"{sys.executable} -m torch.distributed.run --nproc_per_node={count}"
    return [*start.split(), *meet, *options]


class Started:
    """A command that runs inside the block, in its own process group, with its output in one
    file.
    """

    def __init__(self, command, output):
        self._path = output
        with output.open("ab") as file:
            self._begin = file.tell()
            self.process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=own_environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Tests that run in the background have Ctrl-C turned off.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        self._seen = {}
        self._shared = set()

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        for process in self._look():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def output(self):
        """The output so far."""
        with self._path.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace")

    def ranks(self):
        """The living rank processes, by rank."""
        ranks = {}
        for process in self._look():
            with contextlib.suppress(psutil.Error, KeyError):
                # The loader's workers inherit the variables too.
                if process.ppid() == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    ranks[int(process.environ()["RANK"])] = process
        return ranks

    def until(self, is_so, what):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_so():
            is_alive = self.process.poll() is None and time.monotonic() < deadline
            assert is_alive, f"no {what}: {self.output[-3000:]}"
            self._look()
            time.sleep(0.1)

    def end(self, seconds=PATIENCE_SECONDS, lingering=0.0):
        """The status, within `seconds`; no process (after `lingering` more) and no shared memory
        may be left.
        """
        self._look()
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(
                f"it did not end in {seconds:g} s: {self.output[-3000:]}"
            ) from error
        deadline = time.monotonic() + lingering
        while (left := self._living()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, f"left behind: {left}"
        # A file removed while in use has a suffix that says so.
        kept = [name for name in self._shared if Path(name).exists()]
        assert not kept, f"left in shared memory: {kept}"
        return status

    def _living(self):
        return [
            process
            for process in self._seen.values()
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        ]

    def _look(self):
        """All descendants of the first process; records them and their shared memory."""
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self._seen.setdefault(process.pid, process)
        for number in self._seen:
            with contextlib.suppress(OSError):
                areas = Path(f"/proc/{number}/maps").read_text().splitlines()
                self._shared |= {
                    area[area.index(SHARED_MEMORY) :] for area in areas if SHARED_MEMORY in area
                }
        return list(self._seen.values())


def steps_of(run):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def saved_step(run):
    return int(read_own_checkpoint(run / "last.pt")["training"]["state"]["step"])
