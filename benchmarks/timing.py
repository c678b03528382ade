"""Two ways of doing the same thing, run in turn on one machine, and a table of how much faster the second one is.

Measures callables that it is given: it knows no data, no model and no configuration.
"""

import contextlib
import dataclasses
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

# What an interpreter with torch costs before anything of ours is imported.
BARE_INTERPRETER = "import psutil, torch; print(psutil.Process().memory_full_info().uss)"


@dataclass(frozen=True)
class Side:
    """One of two ways.

    Attributes:
        prepare: makes ready what a round needs (workers started, queues full); not timed.
        run: does the work on what `prepare` gave and returns the number of items done; timed.
    """

    prepare: Callable[[], Any]
    run: Callable[[Any], int]


@dataclass(frozen=True)
class Comparison:
    """What came of running two sides in turn.

    Attributes:
        measure: what was measured.
        first_per_second: median items per second of the first side.
        second_per_second: the same of the second side.
        ratio: median over the rounds of second / first, each taken within its round.
        lowest_ratio: of any round.
        highest_ratio: of any round.
        wanted: ratio to reach; 0 where none is set.
        unit: what an item is.
        sides: names of the two.
    """

    measure: str
    first_per_second: float
    second_per_second: float
    ratio: float
    lowest_ratio: float
    highest_ratio: float
    wanted: float = 0.0
    unit: str = "crops"
    sides: tuple[str, str] = ("classic", "ours")


def compare(
    measure: str,
    first: Side,
    second: Side,
    *,
    rounds: int,
    wanted: float = 0.0,
    unit: str = "crops",
    sides: tuple[str, str] = ("classic", "ours"),
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Run A B A B …, `rounds` times each after one round that does not count.

    Raises:
        ValueError: no round asked for, or a side that does nothing.
    """
    if rounds < 1:
        raise ValueError(f"{rounds} rounds; expected one or more")
    rates: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for side, values in zip((first, second), rates, strict=True):
            ready = side.prepare()
            start = clock()
            items = side.run(ready)
            seconds = clock() - start
            if items < 1:
                raise ValueError(f"{measure}: a side did nothing; is the corpus empty?")
            if number:
                values.append(items / max(seconds, 1e-9))
    ratios = [two / one for one, two in zip(*rates, strict=True)]
    return Comparison(
        measure,
        statistics.median(rates[0]),
        statistics.median(rates[1]),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        wanted,
        unit,
        sides,
    )


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    """A Markdown table, one row a comparison; a ratio below the one wanted is marked."""
    lines = ["| measure | classic /s | ours /s | ratio (lowest to highest) | wanted |", "|---|---|---|---|---|"]
    for one in comparisons:
        spread = f"{one.ratio:.1f} ({one.lowest_ratio:.1f} to {one.highest_ratio:.1f})"
        wanted = f"{one.wanted:g}{' **not reached**' if one.ratio < one.wanted else ''}" if one.wanted else ""
        names = "" if one.sides == ("classic", "ours") else f" ({one.sides[1]} against {one.sides[0]})"
        lines.append(
            f"| {one.measure}{names} [{one.unit}] | {one.first_per_second:,.0f} | {one.second_per_second:,.0f} "
            f"| {spread} | {wanted} |"
        )
    return "\n".join(lines)


def as_plain(comparison: Comparison) -> dict[str, Any]:
    """A comparison for a JSON file."""
    plain = dataclasses.asdict(comparison)
    return {**plain, "sides": list(comparison.sides), "is_reached": comparison.ratio >= comparison.wanted}


@dataclass(frozen=True)
class BatchTimes:
    """How long batches took to arrive."""

    num_batches: int
    utterances_per_second: float
    median_seconds: float
    p95_seconds: float
    slowest_seconds: float


def time_batches(batches: Iterator[Any], num_batches: int, size_of: Callable[[Any], int]) -> BatchTimes:
    """Fetch batches as fast as they come.

    Args:
        batches: gives them; may end early.
        num_batches: fetched at most.
        size_of: utterances in a batch.

    Raises:
        ValueError: there was not one batch.
    """
    seconds, utterances = [], 0
    last = time.perf_counter()
    for _, batch in zip(range(num_batches), batches, strict=False):
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
        utterances += size_of(batch)
    if not seconds:
        raise ValueError("the loader gave no batch; is data.batch_size larger than the list?")
    return BatchTimes(
        len(seconds),
        utterances / sum(seconds),
        statistics.median(seconds),
        float(np.percentile(seconds, 95)),
        max(seconds),
    )


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """Keep this process on one core, where the system can; what it starts inside stays there too."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def unique_bytes(process_id: int) -> int:
    """Memory of a process that no other process shares."""
    return int(psutil.Process(process_id).memory_full_info().uss)


def bare_interpreter_bytes() -> int:
    """Unique memory of a new interpreter that has imported torch and nothing else."""
    result = subprocess.run([sys.executable, "-c", BARE_INTERPRETER], capture_output=True, text=True, check=True)
    return int(result.stdout)
