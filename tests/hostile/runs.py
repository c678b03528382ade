"""Small runs that are killed or whose disk fails, and the outcome they must still have."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from targets import tiny_voice_corpus

from tests.outcomes import differences, outcome_of
from tests.tiny_recipe import EVERY_STAGE, write_recipe

HERE = Path(__file__).parent
END_SECONDS = 120
LINES_ARE_LOST = re.compile(r"lines are dropped|they will appear twice")
"""Printed by a run if its log, metrics or curves cannot be written."""

BEST_IS_LOST, LAST_IS_LOST = (
    re.compile(rf"could not write \S+/{name}\.pt") for name in ("best", "last")
)

FEWER_TO_AVERAGE = re.compile(r"\d checkpoints to average, found \d")


def tiny_run(folder: Path, workers: int) -> Path:
    """Writes the configuration of a run into `folder`/run with the corpus beside it."""
    paths = (folder / "run.yaml", folder.parent / "corpus", folder / "run")
    return write_recipe(*paths, EVERY_STAGE, {"data": {"num_workers": workers}})


def printed(folder: Path) -> str:
    """The end of the output of a folder's runs."""
    return (folder / "output.txt").read_text(errors="replace")[-1500:]


def fault(
    folder: Path, call: int, error: int, lasts: bool, count: Path | str = ""
) -> dict[str, Any]:
    """Arguments of `hostile_arm` in failing_disk.c: which call below a folder fails; call 0 only
    counts calls.
    """
    return {
        "folder": str(folder),
        "call": call,
        "error": error,
        "lasts": int(lasts),
        "count": str(count),
    }


class Starter:
    """A warm process that forks commands (`forked.py`); `shim` is the library of the failing
    disk.
    """

    def __init__(self, folder: Path, shim: Path | None = None) -> None:
        self.folder = folder
        self.can_fail = shim is not None
        tiny_voice_corpus(folder / "corpus")
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "SPEAKERNET_CACHE": str(folder / "cache"),
        }
        if shim is not None:
            environment["LD_PRELOAD"] = str(shim)
        command = [sys.executable, str(HERE / "forked.py")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, env=environment, text=True, **pipes)  # type: ignore[call-overload]
        assert self._answer() == "ready"

    def __enter__(self) -> "Starter":
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()

    def start(self, arguments: Sequence[str], folder: Path, **order: Any) -> int:
        """Start a command with its output in the folder's `output.txt`; returns its process. `end`
        must follow.
        """
        whole = {"arguments": list(arguments), "output": str(folder / "output.txt"), **order}
        self._process.stdin.write(json.dumps(whole) + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def end(self) -> int:
        """Wait for the started command; returns its status."""
        return int(self._answer())

    def command(self, arguments: Sequence[str], folder: Path, **order: Any) -> int:
        """Run a command to its end; one that takes too long is killed."""
        process = self.start(arguments, folder, **order)
        watch = subprocess.Popen(
            ["sh", "-c", f"sleep {END_SECONDS}; kill -9 -{process}"], start_new_session=True
        )
        try:
            return self.end()
        finally:
            os.killpg(watch.pid, signal.SIGKILL)
            watch.wait()

    def run(self, recipe: Path, **order: Any) -> int:
        return self.command(["train", "--config", str(recipe)], recipe.parent, **order)

    def _answer(self) -> str:
        return self._process.stdout.readline().strip()


class Kills:
    """Kills runs at random moments, a few times in each folder, and compares the final outcomes."""

    def __init__(self, starter: Starter, workers: int, seed: int) -> None:
        self.starter = starter
        self.workers = workers
        self.draw = random.Random(seed)
        self.num_kills = 0
        folder = starter.folder / f"straight{workers}"
        begin = time.monotonic()
        assert starter.run(tiny_run(folder, workers)) == 0, printed(folder)
        self.seconds = time.monotonic() - begin
        self.expected = outcome_of(folder / "run")

    def round(self, most_kills: int) -> list[str]:
        """One folder: kills while any are left, then a run to its end; returns problems in
        words.
        """
        folder = self.starter.folder / f"killed{self.workers}"
        shutil.rmtree(folder, ignore_errors=True)
        recipe = tiny_run(folder, self.workers)
        problems = []
        for _ in range(most_kills):
            process = self.starter.start(["train", "--config", str(recipe)], folder)
            # A resumed run is shorter, so the kills cover all of it.
            time.sleep(self.draw.uniform(0, 0.6 * self.seconds))
            # The whole group, as when a container ends, or only the process, as when memory runs
            # out.
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if self.draw.random() < 0.5 else os.kill)(process, signal.SIGKILL)
            status = self.starter.end()
            self.num_kills += status == -signal.SIGKILL
            if status not in (0, -signal.SIGKILL):
                problems.append(f"status {status}: {printed(folder)}")
        status = self.starter.run(recipe)
        if status:
            return [*problems, f"status {status} at the last: {printed(folder)}"]
        return problems + [
            f"{name} differs" for name in differences(outcome_of(folder / "run"), self.expected)
        ]


def build_shim(folder: Path) -> Path | None:
    """The library of the failing disk; None without a compiler or on other systems than Linux."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    library = folder / "failing_disk.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", library, HERE / "failing_disk.c", "-ldl"],
        check=True,
    )
    return library


class DiskFaults:
    """Makes one disk-changing call of a run fail, and compares the outcome of the next run."""

    def __init__(self, starter: Starter) -> None:
        self.starter = starter
        folder = starter.folder / "whole"
        count = starter.folder / "count.txt"
        recipe = tiny_run(folder, 0)
        assert starter.run(recipe, fault=fault(folder / "run", 0, 0, False, count)) == 0, printed(
            folder
        )
        self.num_calls = int(count.read_text())
        self.expected = outcome_of(folder / "run")

    def case(self, call: int, error: int, *, lasts: bool) -> list[str]:
        """Run with the fault and, if that fails, again without; returns problems in words."""
        folder = self.starter.folder / "failing"
        shutil.rmtree(folder, ignore_errors=True)
        recipe = tiny_run(folder, 0)
        status = self.starter.run(recipe, fault=fault(folder / "run", call, error, lasts))
        words = (folder / "output.txt").read_text(errors="replace")
        problems = []
        if "Traceback" in words or status not in (0, 1):
            problems.append(f"status {status}: {words[-1500:]}")
        if status and self.starter.run(recipe):
            return [*problems, f"did not resume: {printed(folder)}"]
        found = outcome_of(folder / "run")
        expected = dict(self.expected)
        if LAST_IS_LOST.search(words):
            # The next one has no predecessor.
            for one in (found, expected):
                one["files"] = [
                    name for name in one["files"] if not name.endswith("/last.previous.pt")
                ]
        names = differences(found, expected)
        if BEST_IS_LOST.search(words):
            # The last model takes its place; the training is the same.
            names = [name for name in names if name == "large_margin/last.pt"]
        # An average of fewer checkpoints starts the next stage from other weights.
        if FEWER_TO_AVERAGE.search(words):
            names = [
                name
                for name in names
                if not name.startswith(("large_margin/last.pt", "numbers", "files"))
            ]
        # Lines reported as dropped are missing; everything else is the same.
        if LINES_ARE_LOST.search(words):
            names = [name for name in names if name not in ("numbers", "files", "report")]
        return problems + [f"{name} differs" for name in names]
