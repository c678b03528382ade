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
from pathlib import Path

from tests.outcomes import differences, outcome_of
from tests.tiny_recipe import EVERY_STAGE, write_recipe

HERE = Path(__file__).parent
# What a run prints about lost log lines, metrics or curves, lost checkpoints, and a mean of fewer.
LINES_ARE_LOST = re.compile(r"lines are dropped|they will appear twice")
BEST_IS_LOST = re.compile(r"could not write \S+/best\.pt")
LAST_IS_LOST = re.compile(r"could not write \S+/last\.pt")
FEWER_TO_AVERAGE = re.compile(r"\d checkpoints to average, found \d")
SECOND_STAGE = "2_large_margin/last.pt"


def tiny_run(folder, workers):
    """Writes the configuration of a run into `folder`/run with the corpus beside it."""
    corpus = folder.parent / "corpus"
    changes = {"data": {"num_workers": workers}}
    return write_recipe(folder / "run.yaml", corpus, folder / "run", EVERY_STAGE, changes)


def printed(folder):
    """The output of a folder's runs."""
    return (folder / "output.txt").read_text(errors="replace")


def end_of_output(folder):
    return printed(folder)[-1500:]


def fault(folder, call, error=0, lasts=False, count=""):
    """Arguments of `hostile_arm` in failing_disk.c: which call below a folder fails; call 0 only
    counts calls.
    """
    paths = {"folder": str(folder), "count": str(count)}
    return {**paths, "call": call, "error": error, "lasts": int(lasts)}


class Starter:
    """A warm process that forks commands (`forked.py`); `shim` is the library of the failing
    disk.
    """

    def __init__(self, folder, corpus, shim):
        self.folder = folder
        self.can_fail = shim is not None
        shutil.copytree(corpus, folder / "corpus")
        for name in ("train_list.txt", "trials.txt"):
            path = folder / "corpus" / name
            # A third of the rows makes a run short.
            path.write_text("".join(path.read_text().splitlines(keepends=True)[::3]))
        environment = {"OMP_NUM_THREADS": "1", "SPEAKERNET_CACHE": str(folder / "cache")}
        if shim is not None:
            environment["LD_PRELOAD"] = str(shim)
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "forked.py")],
            env=os.environ | environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._answer() == "ready"

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self._process.communicate()

    def start(self, arguments, folder, **order):
        """Start a command with its output in the folder's `output.txt`; returns its process. `end`
        must follow.
        """
        order |= {"arguments": list(arguments), "output": str(folder / "output.txt")}
        assert self._process.stdin is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return int(self._answer())

    def end(self):
        """Wait for the started command; returns its status."""
        return int(self._answer())

    def command(self, arguments, folder, **order):
        """Run a command to its end."""
        self.start(arguments, folder, **order)
        return self.end()

    def run(self, recipe, **order):
        return self.command(["train", "--config", str(recipe)], recipe.parent, **order)

    def _answer(self):
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class Kills:
    """Kills runs at random moments, a few times in each folder, and compares the final outcomes."""

    def __init__(self, starter, workers, seed):
        self.starter = starter
        self.workers = workers
        self.draw = random.Random(seed)
        self.num_kills = 0
        folder = starter.folder / f"straight{workers}"
        begin = time.monotonic()
        assert starter.run(tiny_run(folder, workers)) == 0, end_of_output(folder)
        self.seconds = time.monotonic() - begin
        self.expected = outcome_of(folder / "run")

    def round(self, most_kills):
        """One folder: kills while any are left, then a run to its end; returns problems in
        words.
        """
        folder = self.starter.folder / f"killed{self.workers}"
        shutil.rmtree(folder, ignore_errors=True)
        recipe = tiny_run(folder, self.workers)
        for _ in range(most_kills):
            process = self.starter.start(["train", "--config", str(recipe)], folder)
            # A resumed run is shorter, so the kills cover all of it.
            time.sleep(self.draw.uniform(0, 0.6 * self.seconds))
            # The whole group, as when a container ends, or only the process, as when memory runs
            # out.
            kill = os.killpg if self.draw.random() < 0.5 else os.kill
            with contextlib.suppress(ProcessLookupError):
                kill(process, signal.SIGKILL)
            status = self.starter.end()
            self.num_kills += status == -signal.SIGKILL
            if status not in (0, -signal.SIGKILL):
                return [f"status {status}: {end_of_output(folder)}"]
        if status := self.starter.run(recipe):
            return [f"status {status} at the last: {end_of_output(folder)}"]
        return differences(outcome_of(folder / "run"), self.expected)


def build_shim(folder):
    """The library of the failing disk; None without a compiler or on other systems than Linux."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    library = folder / "failing_disk.so"
    options = f"-shared -fPIC -O1 -o {library}".split()
    subprocess.run([compiler, *options, HERE / "failing_disk.c", "-ldl"], check=True)
    return library


class DiskFaults:
    """Makes one disk-changing call of a run fail, and compares the outcome of the next run."""

    def __init__(self, starter):
        self.starter = starter
        folder = starter.folder / "whole"
        count = starter.folder / "count.txt"
        status = starter.run(tiny_run(folder, 0), fault=fault(folder / "run", 0, count=count))
        assert status == 0, end_of_output(folder)
        self.num_calls = int(count.read_text())
        self.expected = outcome_of(folder / "run")

    def case(self, call, error, *, lasts):
        """Run with the fault and, if that fails, again without; returns problems in words."""
        folder = self.starter.folder / "failing"
        shutil.rmtree(folder, ignore_errors=True)
        recipe = tiny_run(folder, 0)
        status = self.starter.run(recipe, fault=fault(folder / "run", call, error, lasts))
        output = printed(folder)
        if "Traceback" in output or status not in (0, 1):
            return [f"status {status}: {output[-1500:]}"]
        if status and self.starter.run(recipe):
            return [f"did not resume: {end_of_output(folder)}"]
        outcome = outcome_of(folder / "run")
        expected = dict(self.expected)
        if LAST_IS_LOST.search(output):
            # The next one has no predecessor.
            for files in (outcome, expected):
                files["files"] = [
                    name for name in files["files"] if not name.endswith("/last.previous.pt")
                ]
        names = differences(outcome, expected)
        if BEST_IS_LOST.search(output):
            # The last model takes its place; the training is the same.
            names = [name for name in names if name == SECOND_STAGE]
        if FEWER_TO_AVERAGE.search(output):
            # An average of fewer checkpoints starts the next stage from other weights.
            changed = (SECOND_STAGE, "numbers", "files")
            names = [name for name in names if not name.startswith(changed)]
        if LINES_ARE_LOST.search(output):
            # Lines reported as dropped are missing; everything else is the same.
            names = [name for name in names if name not in ("numbers", "files", "report")]
        return names
