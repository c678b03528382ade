"""Cases of the readers in child processes: started, watched, counted, and begun again where one died or hung."""

import json
import os
import random
import selectors
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from targets import TARGETS

CASE_SECONDS = 10.0
"""A case that takes longer hangs."""
START_SECONDS = 120.0
MOST_SEEDS = 2000
"""Of one child; also what fits a command line."""
HERE = Path(__file__).parent


@dataclass
class Tally:
    """What cases came to.

    Attributes:
        outcomes: how often each.
        failures: (target, seed, what happened).
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, int, str]] = field(default_factory=list)


def shares(num_cases: int) -> dict[str, int]:
    """How many cases of each target there are among so many."""
    total = sum(target.weight for target in TARGETS.values())
    return {name: -(-num_cases * target.weight // total) for name, target in TARGETS.items()}


def run_cases(target: str, seeds: Iterable[int], on_record=lambda record: None) -> Tally:
    """Run the cases of one target; every seed is run, whatever the ones before it did to their process."""
    left, tally = list(seeds), Tally()
    while left:
        with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
            done = _run_child(target, folder, left[:MOST_SEEDS])
        if not done:
            raise RuntimeError(f"{target}: the child ended before its first case")
        for record in done:
            tally.outcomes[record["outcome"]] += 1
            if record["outcome"] not in ("read", "refused"):
                tally.failures.append((target, record["seed"], f"{record.get('file', '')}: {record.get('said', '')}"))
            on_record({"target": target, **record})
        left = left[len(done) :]
    return tally


def _run_child(target: str, folder: str, seeds: list[int]) -> list[dict]:
    """The records of the seeds until the child ended, died or hung; of the last two kinds a record is made up."""
    command = [sys.executable, str(HERE / "child.py"), target, folder, *map(str, seeds)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SPEAKERNET_CACHE": str(Path(folder) / "cache")}
    done: list[dict] = []
    begun: int | None = None
    with (Path(folder) / "stderr.txt").open("wb") as log:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
        assert child.stdout is not None
        lines = _lines(child)
        try:
            for line in lines:
                if line is None:
                    child.kill()
                    break
                record = json.loads(line)
                if "outcome" in record:
                    done.append(record)
                    begun = None
                else:
                    begun = record["seed"]
        finally:
            child.kill()
            child.wait()
            child.stdout.close()
    if begun is not None:
        how = f"no answer in {CASE_SECONDS:g} s" if line is None else f"the process ended with {child.returncode}"
        done.append({"seed": begun, "outcome": "failed", "said": how})
    elif not done:
        raise RuntimeError((Path(folder) / "stderr.txt").read_text(errors="replace")[-2000:])
    return done


def _lines(child: subprocess.Popen):
    """Lines of a child as they come; None where none came in time."""
    assert child.stdout is not None
    waited, rest = START_SECONDS, b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(waited):
                yield None
                return
            block = os.read(child.stdout.fileno(), 1 << 16)
            if not block:
                return
            waited = CASE_SECONDS
            *whole, rest = (rest + block).split(b"\n")
            yield from whole


def sample(seed: int, count: int) -> dict[str, list[int]]:
    """Seeds of about `count` cases over all targets, drawn anew from a number."""
    draw = random.Random(seed)
    return {name: [draw.randrange(1 << 31) for _ in range(number)] for name, number in shares(count).items()}


def run_sample(seed: int, count: int, seconds: float) -> Tally:
    """A sample of cases over all targets, which ends early when the time is over."""
    end, whole = time.monotonic() + seconds, Tally()
    for name, seeds in sample(seed, count).items():
        if time.monotonic() > end:
            break
        one = run_cases(name, seeds)
        whole.outcomes += one.outcomes
        whole.failures += one.failures
    return whole
