"""Cases of the readers in child processes: started, watched, counted, and begun again where one died or hung."""

import json
import math
import os
import random
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from targets import TARGETS

CASE_SECONDS = 20.0
"""A case that takes longer hangs; a machine may be busy with other things."""
START_SECONDS = 120.0
MOST_SEEDS = 2000
"""Of one child."""
HERE = Path(__file__).parent

Record = dict[str, Any]


@dataclass
class Tally:
    """What cases came to.

    Attributes:
        outcomes: how often each.
        failures: target, seed and what happened, in words.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Count one case."""
        self.outcomes[record["outcome"]] += 1
        if record["outcome"] not in ("read", "refused"):
            where = f"{record['target']}, seed {record['seed']}, {record.get('file', 'the file')}"
            self.failures.append(f"{where}: {record.get('said', '')}")


def shares(num_cases: int) -> dict[str, int]:
    """How many cases of each target there are among so many."""
    total = sum(target.weight for target in TARGETS.values())
    return {name: math.ceil(num_cases * target.weight / total) for name, target in TARGETS.items()}


def seeds_of(seed: int, num_cases: int) -> dict[str, list[int]]:
    """Seeds of about so many cases over all targets, drawn from a number."""
    draw = random.Random(seed)
    return {name: [draw.randrange(1 << 31) for _ in range(count)] for name, count in shares(num_cases).items()}


class Reader:
    """A warm process that runs cases in copies of itself; see `child.py`."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hostile-")
        self._errors = Path(self._folder.name) / "errors.txt"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "SPEAKERNET_CACHE": str(Path(self._folder.name) / "cache")}
        environment["HOSTILE_DRAWINGS"] = str(Path(self._folder.name) / "drawings")
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "child.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
            )
        self._answers = self._lines()
        self._waits = START_SECONDS
        assert next(self._answers) == {"ready": True}, self._errors.read_text()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()

    def run(self, target: str, seeds: Iterable[int], tell: Callable[[Record], object]) -> None:
        """Run cases of a target, each told as it ends; all are run, whatever the ones before did to their process."""
        left = list(seeds)
        while left:
            with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
                records = self._run_some(target, folder, left[:MOST_SEEDS])
            for record in records:
                tell({"target": target, **record})
            left = left[len(records) :]

    def _run_some(self, target: str, folder: str, seeds: list[int]) -> list[Record]:
        """The records of cases until the copy ended, died or hung; of the last two kinds one is made up."""
        assert self._process.stdin is not None
        order = {"target": target, "folder": str(Path(folder) / "files"), "seeds": seeds}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        done: list[Record] = []
        process, begun, how = 0, None, ""
        self._waits = START_SECONDS
        for answer in self._answers:
            self._waits = CASE_SECONDS
            if answer is None:
                how = f"no answer in {CASE_SECONDS:g} s"
                os.kill(process, signal.SIGKILL)
            elif "process" in answer:
                process = answer["process"]
            elif "outcome" in answer:
                done.append(answer)
                begun = None
            elif "seed" in answer:
                begun = answer["seed"]
            else:
                how = how or f"the process ended with {answer['status']}"
                break
        if begun is not None:
            done.append({"seed": begun, "outcome": "failed", "said": how})
        elif not done:
            raise RuntimeError(f"{target}: {how} before its first case:\n{self._errors.read_text()[-3000:]}")
        return done

    def _lines(self) -> Iterator[Record | None]:
        """Answers as they come; None where none came in time."""
        assert self._process.stdout is not None
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(self._waits):
                    yield None
                    continue
                block = os.read(self._process.stdout.fileno(), 1 << 16)
                if not block:
                    return
                *whole, rest = (rest + block).split(b"\n")
                yield from map(json.loads, whole)


def run_sample(seed: int, num_cases: int, seconds: float) -> Tally:
    """A sample of cases over all targets; targets after the time is over are left out."""
    end, tally = time.monotonic() + seconds, Tally()
    with Reader() as reader:
        for name, seeds in seeds_of(seed, num_cases).items():
            if time.monotonic() < end:
                reader.run(name, seeds, tally.add)
    return tally
