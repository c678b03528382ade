"""Paired timing: several ways of doing the same thing, run in turn, so that a slow moment of the machine hits them all.

Measures callables that it is given; knows nothing of what they do.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """One variant: median seconds, the spread between quartiles, and the median ratio to the reference by round."""

    name: str
    median_seconds: float
    quartile_spread_seconds: float
    ratio: float


def time_in_turn(
    variants: Mapping[str, Callable[[], None]],
    *,
    rounds: int,
    warmup: int = 1,
    settle: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Timing]:
    """Run every variant once a round, the first one being the reference.

    Args:
        variants: name -> what to time.
        rounds: rounds that count.
        warmup: runs of each variant before anything counts.
        settle: runs before each one that counts: what is measured comes right after its like (as a training step does)
            and not after another variant, which had caches and cores for itself.
        clock: seconds; replaceable for tests.

    Returns:
        One timing a variant, in order. Ratios are taken inside a round and their median over the rounds.
    """
    if not variants or rounds < 1:
        raise ValueError(f"{len(variants)} variants and {rounds} rounds; expected one or more of each")
    for run in variants.values():
        for _ in range(warmup):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            for _ in range(settle):
                run()
            _finish_device()
            start = clock()
            run()
            _finish_device()
            seconds[name].append(clock() - start)
    reference = next(iter(seconds.values()))
    timings = []
    for name, values in seconds.items():
        ratios = [value / base for value, base in zip(values, reference, strict=True)]
        timings.append(Timing(name, statistics.median(values), _spread(values), statistics.median(ratios)))
    return timings


def _spread(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return high - low


def _finish_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
