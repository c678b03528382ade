"""Paired timing with a clock of our own."""

import pytest

from benchmarks.paired import time_in_turn


def test_ratios_are_taken_inside_a_round():
    """The machine slows down from round to round; the ratio stays what it is."""
    now = 0.0
    order: list[str] = []
    slowness = iter([1.0] * 2 + [1.0, 1.0, 4.0, 4.0, 10.0, 10.0])

    def work(name: str, seconds: float):
        def run() -> None:
            nonlocal now
            order.append(name)
            now += seconds * next(slowness)

        return run

    plain, fast = time_in_turn({"plain": work("plain", 2.0), "fast": work("fast", 1.0)}, rounds=3, clock=lambda: now)
    assert (plain.ratio, fast.ratio) == (1.0, 0.5)
    assert (plain.median_seconds, fast.median_seconds) == (8.0, 4.0)
    assert order == ["plain", "fast"] * 4
    with pytest.raises(ValueError, match="one or more"):
        time_in_turn({}, rounds=1)


def test_runs_to_settle_are_not_counted():
    now = 0.0
    order: list[str] = []
    # The first run after the other variant is slow.
    seconds = {"plain": iter([9.0, 2.0] * 3), "fast": iter([9.0, 1.0] * 3)}

    def work(name: str):
        def run() -> None:
            nonlocal now
            order.append(name)
            now += next(seconds[name])

        return run

    variants = {name: work(name) for name in seconds}
    plain, fast = time_in_turn(variants, rounds=3, warmup=0, settle=1, clock=lambda: now)
    assert (plain.median_seconds, fast.median_seconds, fast.ratio) == (2.0, 1.0, 0.5)
    assert order == ["plain", "plain", "fast", "fast"] * 3
