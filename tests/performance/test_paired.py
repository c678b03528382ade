"""Paired timing with a clock of our own."""

import pytest

from speakernet.performance.paired import time_in_turn


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
