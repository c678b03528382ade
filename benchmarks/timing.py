"""Times several ways of doing the same thing, in turn on one machine (A B C A B C …), so that slow
phases affect all.

It times arbitrary callables, and reports either seconds and their ratio to the first way
(`timings`), or items per second of two ways (`compare`).
"""

import contextlib
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm


def nothing() -> None:
    """The default preparation: none."""


@dataclass(frozen=True)
class Way:
    """One way of doing the work."""

    run: Callable[[Any], int]
    """Does the work with the result of `prepare` and returns the number of items done; timed."""
    prepare: Callable[[], Any] = nothing
    """Prepares a run (starts workers, fills queues); not timed."""


@dataclass(frozen=True)
class Samples:
    """The measured runs, in order."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    """Wall-clock time."""
    processor_seconds: list[float] = dataclasses.field(default_factory=list)
    """CPU time of all threads of this process."""
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
            for _ in range(settle):
                way.run(way.prepare())
            ready = way.prepare()
            finish_device()
            start = clock()
            used = time.process_time()
            items = way.run(ready)
            finish_device()
            samples[name].seconds.append(clock() - start)
            samples[name].processor_seconds.append(time.process_time() - used)
            samples[name].items.append(items)
            if items < 1:
                raise ValueError(f"{name} processed no items; expected a corpus that is not empty")
            bar.update()
    return samples


@dataclass(frozen=True)
class Timing:
    """One way: median seconds, interquartile range, and the median over the rounds of the ratio to
    the first way.
    """

    name: str
    median_seconds: float
    quartile_spread_seconds: float
    ratio: float


def timings(samples: Mapping[str, Samples]) -> list[Timing]:
    """One timing per way, in order. Ratios are taken within each round, then their median over the
    rounds.
    """
    reference = next(iter(samples.values())).seconds
    made = []
    for name, runs in samples.items():
        seconds = runs.seconds
        ratio = _median_ratio(seconds, reference)
        made.append(Timing(name, statistics.median(seconds), _spread(seconds), ratio))
    return made


@dataclass(frozen=True)
class Speedup:
    """How much faster the second of two ways is.

    Attributes:
        measure: what was measured.
        first_per_second: median items per second of the first way.
        second_per_second: the same of the second way.
        ratio: median over the rounds of second / first, each taken within its round.
        lowest_ratio: the lowest of any round.
        highest_ratio: the highest of any round.
    """

    measure: str
    first_per_second: float
    second_per_second: float
    ratio: float
    lowest_ratio: float
    highest_ratio: float


def compare(
    measure: str,
    first: Way,
    second: Way,
    *,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Speedup:
    """Run A B A B …, `rounds` times each after one warm-up round.

    Raises:
        ValueError: as in `run_in_turn`.
    """
    samples = run_in_turn({"classic": first, "ours": second}, rounds=rounds, clock=clock)
    slow = samples["classic"].rates
    fast = samples["ours"].rates
    ratios = [ours / classic for classic, ours in zip(slow, fast, strict=True)]
    return Speedup(
        measure,
        statistics.median(slow),
        statistics.median(fast),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
    )


def speedup_table(speedups: Sequence[Speedup]) -> str:
    """A Markdown table, one row per measure."""
    lines = [
        "| measure | classic crops/s | ours crops/s | ratio (lowest to highest) |",
        "|---|---|---|---|",
    ]
    for speedup in speedups:
        lines.append(
            f"| {speedup.measure} | {speedup.first_per_second:,.0f} | "
            f"{speedup.second_per_second:,.0f} | {speedup.ratio:.1f} "
            f"({speedup.lowest_ratio:.1f} to {speedup.highest_ratio:.1f}) |"
        )
    return "\n".join(lines)


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
    # Looked up, not imported: without torch there is no GPU work, and a process that only serves
    # starts faster.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()


def _median_ratio(values: list[float], reference: list[float]) -> float:
    ratios = [value / base for value, base in zip(values, reference, strict=True)]
    return statistics.median(ratios)


def _spread(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return high - low
