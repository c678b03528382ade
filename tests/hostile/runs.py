"""Small runs that are killed or whose disk fails, and what they must come to all the same."""

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
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from targets import tiny_voice_corpus

from tests.outcomes import came_to, differences
from tests.tiny_recipe import EVERY_STAGE, write_recipe

HERE = Path(__file__).parent
END_SECONDS = 120
LINES_ARE_LOST = re.compile(r"lines are dropped|they will appear twice")
"""What a run says of its log, metrics and curves when the disk does not take them."""
PHASES = (
    ("evaluation", r"EER .* best|written:|report:"),
    ("large-margin stage", r"large-margin stage"),
    ("averaging", r"averaged the last"),
    ("training", r"epoch \d"),
)


def tiny_run(folder: Path, workers: int) -> Path:
    """The configuration of a run into `folder`/run, over the corpus beside it."""
    paths = (folder / "run.yaml", folder.parent / "corpus", folder / "run")
    return write_recipe(*paths, EVERY_STAGE, {"data": {"num_workers": workers}})


class Starter:
    """A warm process that starts runs; see `forked.py`.

    Args:
        folder: where everything lies; the corpus is made here.
        shim: the library of the failing disk, where faults are to be injected.
    """

    def __init__(self, folder: Path, shim: Path | None = None) -> None:
        self.folder = folder
        if not (folder / "corpus").exists():
            tiny_voice_corpus(folder / "corpus")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "SPEAKERNET_CACHE": str(folder / "cache")}
        environment["HOSTILE_DRAWINGS"] = str(folder / "drawings")
        if shim is not None:
            environment["LD_PRELOAD"] = str(shim)
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "forked.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        assert self._answer() == "ready"

    def __enter__(self) -> "Starter":
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()

    def start(self, recipe: Path, **order: Any) -> int:
        """Begin a run; its process. `end` must follow."""
        return self._begin(["train", "--config", str(recipe)], recipe.parent, order)

    def _begin(self, arguments: Sequence[str], folder: Path, order: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        whole = {"arguments": list(arguments), "said": str(folder / "said.txt"), **order}
        self._process.stdin.write(json.dumps(whole) + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def end(self) -> int:
        """Wait for the run that was begun; its status."""
        return int(self._answer())

    def run(self, recipe: Path, **order: Any) -> int:
        """A run from its beginning to its end; one that takes too long is killed, which its status says."""
        return self.command(["train", "--config", str(recipe)], recipe.parent, **order)

    def command(self, arguments: Sequence[str], folder: Path, **order: Any) -> int:
        """Any command in the same way; what it says is added to `said.txt` in the folder."""
        process = self._begin(arguments, folder, order)
        watch = subprocess.Popen(["sh", "-c", f"sleep {END_SECONDS}; kill -9 -{process}"], start_new_session=True)
        try:
            return self.end()
        finally:
            os.killpg(watch.pid, signal.SIGKILL)
            watch.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def phase(run: Path) -> str:
    """What a run was about when it ended, by the last words of its log."""
    if not (run / "log.txt").exists():
        return "start"
    lines = (run / "log.txt").read_text(errors="replace").splitlines()
    for line in reversed(lines):
        for name, pattern in PHASES:
            if re.search(pattern, line):
                return name
    return "start"


class Kills:
    """Kills runs at random moments, a few in each folder, and compares what they come to in the end.

    Args:
        starter: starts them.
        workers: of the loader.
        seed: of the moments.
    """

    def __init__(self, starter: Starter, workers: int, seed: int) -> None:
        self.starter, self.workers = starter, workers
        self.draw = random.Random(seed)
        self.phases: Counter[str] = Counter()
        self.num_kills = 0
        self._straight()
        self.expected = came_to(starter.folder / f"straight{workers}" / "run")

    def _straight(self) -> float:
        """Seconds of a run that nothing disturbs."""
        folder = self.starter.folder / f"straight{self.workers}"
        shutil.rmtree(folder, ignore_errors=True)
        begin = time.monotonic()
        assert self.starter.run(tiny_run(folder, self.workers)) == 0, said(folder)
        return time.monotonic() - begin

    def round(self, most_kills: int) -> list[str]:
        """One folder: kills while there are any left, then a run to its end; what went wrong, in words."""
        # Anew each time: the machine may be busier than before.
        seconds = self._straight()
        folder = self.starter.folder / f"killed{self.workers}"
        shutil.rmtree(folder, ignore_errors=True)
        recipe, problems = tiny_run(folder, self.workers), []
        for _ in range(most_kills):
            process = self.starter.start(recipe)
            # A run that goes on is shorter: so the moments fall over all of it, a few kills after another.
            time.sleep(self.draw.uniform(0, 0.6 * seconds))
            # The whole group, as a container ends it, or the process alone, as a system without memory does.
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if self.draw.random() < 0.5 else os.kill)(process, signal.SIGKILL)
            status = self.starter.end()
            if status != -signal.SIGKILL:
                problems += [] if status == 0 else [f"status {status}: {said(folder)}"]
                continue
            self.num_kills += 1
            self.phases[phase(folder / "run")] += 1
        status = self.starter.run(recipe)
        if status:
            return [*problems, f"status {status} at the last: {said(folder)}"]
        return problems + [f"{name} differs" for name in differences(came_to(folder / "run"), self.expected)]


def said(folder: Path) -> str:
    """The end of what the runs of a folder said."""
    return (folder / "said.txt").read_text(errors="replace")[-1500:]


def build_shim(folder: Path) -> Path | None:
    """The library of the failing disk; None where there is no compiler, or no Linux."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    library = folder / "failing_disk.so"
    source = HERE / "failing_disk.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


class DiskFaults:
    """Lets one call that changes the disk fail in a run, and looks at what the run says and the next one comes to."""

    def __init__(self, starter: Starter) -> None:
        self.starter = starter
        folder = starter.folder / "whole"
        count = starter.folder / "count.txt"
        # Twice: the first draws the pictures, and a slow run says more.
        for _ in range(2):
            shutil.rmtree(folder, ignore_errors=True)
            recipe = tiny_run(folder, 0)
            assert starter.run(recipe, fault=self._fault(folder, 0, 0, False, count)) == 0, said(folder)
        self.num_calls = int(count.read_text())
        self.expected = came_to(folder / "run")

    def _fault(self, folder: Path, call: int, error: int, lasts: bool, count: Path | str = "") -> dict[str, Any]:
        below = str(folder / "run")
        return {"folder": below, "call": call, "error": error, "lasts": int(lasts), "count": str(count)}

    def case(self, call: int, error: int, *, lasts: bool) -> list[str]:
        """The run with the fault, and where that did not end well another one; what went wrong, in words."""
        folder = self.starter.folder / "failing"
        shutil.rmtree(folder, ignore_errors=True)
        recipe = tiny_run(folder, 0)
        status = self.starter.run(recipe, fault=self._fault(folder, call, error, lasts))
        words, problems = (folder / "said.txt").read_text(errors="replace"), []
        if "Traceback" in words or status not in (0, 1):
            problems.append(f"status {status}: {words[-1500:]}")
        if status and self.starter.run(recipe):
            return [*problems, f"did not go on: {said(folder)}"]
        names = differences(came_to(folder / "run"), self.expected)
        # Lines that were dropped are gone, which is said; all the rest is what it would have been.
        if LINES_ARE_LOST.search(words):
            names = [name for name in names if name not in ("numbers", "files", "report")]
        return problems + [f"{name} differs" for name in names]
