"""Paired comparison and batch times, with a clock of our own."""

from collections.abc import Iterator

import pytest

from benchmarks.timing import (
    Side,
    as_plain,
    compare,
    comparison_table,
    on_one_core,
    time_batches,
)


class Clock:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_sides_take_turns_and_medians_are_of_the_counted_rounds() -> None:
    clock, order = Clock(), []
    # The first round of each is the warm-up; 10 items in so many seconds.
    seconds = {"a": iter([99.0, 1.0, 2.0, 4.0]), "b": iter([99.0, 0.5, 0.5, 0.1])}

    def side(name: str) -> Side:
        def prepare() -> str:
            clock.now += 1000  # not counted
            return name

        def run(ready: str) -> int:
            assert ready == name
            order.append(name)
            clock.now += next(seconds[name])
            return 10

        return Side(prepare, run)

    result = compare("x", side("a"), side("b"), rounds=3, wanted=5, clock=clock)
    assert order == ["a", "b"] * 4
    assert result.first_per_second == pytest.approx(5) and result.second_per_second == pytest.approx(20)
    assert (result.ratio, result.lowest_ratio, result.highest_ratio) == pytest.approx((4, 2, 40))
    assert as_plain(result)["is_reached"] is False
    assert "**not reached**" in comparison_table([result]) and "| x [crops] | 5 | 20 |" in comparison_table([result])


def test_a_side_that_does_nothing_is_an_error() -> None:
    idle = Side(lambda: None, lambda _: 0)
    with pytest.raises(ValueError, match="did nothing"):
        compare("x", idle, idle, rounds=1)
    with pytest.raises(ValueError, match="0 rounds"):
        compare("x", idle, idle, rounds=0)


def test_batches_are_counted_and_no_more_are_fetched_than_asked_for() -> None:
    fetched = []

    def batches() -> Iterator[list[int]]:
        for number in range(5):
            fetched.append(number)
            yield [number] * 3

    times = time_batches(batches(), 2, len)
    assert times.num_batches == 2 and fetched == [0, 1] and times.utterances_per_second > 0
    assert 0 <= times.median_seconds <= times.p95_seconds <= times.slowest_seconds
    assert time_batches(batches(), 9, len).num_batches == 5
    with pytest.raises(ValueError, match="no batch"):
        time_batches(iter([]), 3, len)


def test_one_core_is_given_back() -> None:
    import os

    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this system does not let a process choose its cores")
    before = os.sched_getaffinity(0)
    with on_one_core():
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before
