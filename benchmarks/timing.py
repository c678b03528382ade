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
    for way in ways.values():
        for _ in range(warmup):
            way.run(way.prepare())
    samples = {name: Samples() for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
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
    for name, one in samples.items():
        ratios = [value / base for value, base in zip(one.seconds, reference, strict=True)]
        made.append(
            Timing(
                name,
                statistics.median(one.seconds),
                _spread(one.seconds),
                statistics.median(ratios),
            )
        )
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
        wanted: target ratio; 0 for none.
        unit: what an item is.
        sides: names of the two ways.
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
    first: Way,
    second: Way,
    *,
    rounds: int,
    wanted: float = 0.0,
    unit: str = "crops",
    sides: tuple[str, str] = ("classic", "ours"),
    clock: Callable[[], float] = time.perf_counter,
) -> Speedup:
    """Run A B A B …, `rounds` times each after one warm-up round.

    Raises:
        ValueError: as in `run_in_turn`.
    """
    samples = run_in_turn(
        dict(zip(sides, (first, second), strict=True)), rounds=rounds, clock=clock
    )
    slow, fast = (samples[name].rates for name in sides)
    ratios = [two / one for one, two in zip(slow, fast, strict=True)]
    rates = statistics.median(slow), statistics.median(fast)
    return Speedup(
        measure, *rates, statistics.median(ratios), min(ratios), max(ratios), wanted, unit, sides
    )


def speedup_table(speedups: Sequence[Speedup]) -> str:
    """A Markdown table, one row per measure; ratios below the target are marked."""
    lines = [
        "| measure | classic /s | ours /s | ratio (lowest to highest) | wanted |",
        "|---|---|---|---|---|",
    ]
    for one in speedups:
        spread = f"{one.ratio:.1f} ({one.lowest_ratio:.1f} to {one.highest_ratio:.1f})"
        wanted = (
            f"{one.wanted:g}{' **not reached**' if one.ratio < one.wanted else ''}"
            if one.wanted
            else ""
        )
        names = (
            "" if one.sides == ("classic", "ours") else f" ({one.sides[1]} against {one.sides[0]})"
        )
        lines.append(
            f"| {one.measure}{names} [{one.unit}] | {one.first_per_second:,.0f} | "
            f"{one.second_per_second:,.0f} | {spread} | {wanted} |"
        )
    return "\n".join(lines)


def as_plain(speedup: Speedup) -> dict[str, Any]:
    """A speed-up as plain values, for a JSON file."""
    plain = dataclasses.asdict(speedup)
    return {**plain, "sides": list(speedup.sides), "is_reached": speedup.ratio >= speedup.wanted}


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


def _spread(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return high - low
