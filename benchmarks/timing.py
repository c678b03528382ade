"""Times several ways of doing the same thing, in turn on one machine (A B C A B C …), so that slow
phases affect all.

It times arbitrary callables, and reports either seconds and their ratio to the first way
(`timings`), or items per second of two ways (`compare`).
"""

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm


@dataclass(frozen=True)
class Way:
    """One way of doing the work."""

    run: Callable[[Any], int]
    """Does the work with the result of `prepare` and returns the number of items done; timed."""
    prepare: Callable[[], Any] = lambda: None
    """Prepares a run (starts workers, fills queues); not timed."""


@dataclass(frozen=True)
class Samples:
    """The measured runs, in order."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    """Wall-clock time."""
    items: list[int] = dataclasses.field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Items per second."""
        return [
            items / max(seconds, 1e-9)
            for items, seconds in zip(self.items, self.seconds, strict=True)
        ]


def run_in_turn(
    ways: Mapping[str, Way],
    *,
    rounds: int,
    warmup: int = 1,
    settle: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Samples]:
    """Run every way once per round.

    Args:
        ways: name -> way.
        rounds: measured rounds.
        warmup: unmeasured runs of each way at the start.
        settle: unmeasured runs before each measured one, so that it follows a run of the same way
            (as a training step does) and not a run of another way, which has filled the caches.
        clock: seconds; replaceable for tests.

    Raises:
        ValueError: no ways or no rounds, or a way that does nothing.
    """
    if not ways or rounds < 1:
        raise ValueError(f"{len(ways)} ways and {rounds} rounds; expected at least one of each")
    # The story of a comparison. Machines have moods: another program, a warm processor, a full
    # cache. Way after way, in blocks, would give one of them the bad minutes. So the ways take
    # turns, each is prepared without the clock, and the clock stops only when the device has done
    # all that was queued. Nothing is left out afterwards: a slow round is slow for everybody in it.
    samples = {name: Samples() for name in ways}
    # A suite takes minutes: the bar shows what it is doing.
    with tqdm(total=(1 + rounds) * len(ways), unit="run", leave=False) as bar:
        for name, way in ways.items():
            bar.set_description(f"warm-up of {name}")
            for _ in range(warmup):
                way.run(way.prepare())
            bar.update()
        for name, way in [*ways.items()] * rounds:
            bar.set_description(name)
            # Not for its figures: it fills the caches with what this way needs.
            for _ in range(settle):
                way.run(way.prepare())
            ready = way.prepare()
            finish_device()
            start = clock()
            items = way.run(ready)
            finish_device()
            samples[name].seconds.append(clock() - start)
            samples[name].items.append(items)
            # A way that does nothing is infinitely fast; better to stop than to report that.
            if items < 1:
                raise ValueError(f"{name} processed no items; expected a corpus that is not empty")
            bar.update()
    return samples


# A machine slows down for seconds at a time (other programs, heat). Within a round all ways meet
# nearly the same machine, so a ratio is taken in each round and the median over the rounds; the
# ratio of two medians would compare a fast phase with a slow one.
def timings(samples: Mapping[str, Samples]) -> list[dict[str, Any]]:
    """For each way in order: its name, median seconds, interquartile range, and the median over the
    rounds of the ratio to the first way.
    """
    reference = next(iter(samples.values())).seconds
    made = []
    for name, runs in samples.items():
        ratios = [seconds / base for seconds, base in zip(runs.seconds, reference, strict=True)]
        figures = {
            "name": name,
            "median_seconds": statistics.median(runs.seconds),
            "quartile_spread_seconds": _spread(runs.seconds),
            "ratio": statistics.median(ratios),
        }
        made.append(figures)
    return made


def compare(
    measure: str,
    first: Way,
    second: Way,
    *,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Run A B A B …, `rounds` times each after one warm-up round: median items per second of both
    ways, and how much faster the second is (median, lowest and highest of the rounds).

    Raises:
        ValueError: as in `run_in_turn`.
    """
    samples = run_in_turn({"classic": first, "ours": second}, rounds=rounds, clock=clock)
    slow = samples["classic"].rates
    fast = samples["ours"].rates
    ratios = [ours / classic for classic, ours in zip(slow, fast, strict=True)]
    return {
        "measure": measure,
        "first_per_second": statistics.median(slow),
        "second_per_second": statistics.median(fast),
        "ratio": statistics.median(ratios),
        "lowest_ratio": min(ratios),
        "highest_ratio": max(ratios),
    }


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of cells that are text already."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def speedup_table(comparisons: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table, one row for each result of `compare`."""
    form = "{measure};{first_per_second:,.0f};{second_per_second:,.0f};"
    form += "{ratio:.1f} ({lowest_ratio:.1f} to {highest_ratio:.1f})"
    rows = [form.format_map(figures).split(";") for figures in comparisons]
    columns = ("measure", "classic crops/s", "ours crops/s", "ratio (lowest to highest)")
    return markdown_table(columns, rows)


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """Keep this process, and those it starts inside, on one core, if the system supports it."""
    if not hasattr(os, "sched_setaffinity"):
        # Python cannot pin a process on Windows and macOS.
        yield
        return
    before = os.sched_getaffinity(0)
    # The last core: interrupts and most services run on the first.
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def finish_device() -> None:
    """Wait for the GPU, which works asynchronously: otherwise the clock would stop when work is
    queued, not done.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _spread(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    # Half of the rounds lie in between. Unlike a standard deviation it does not follow a single
    # slow round.
    low, _, high = statistics.quantiles(values, n=4)
    return high - low
