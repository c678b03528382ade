"""Methods timed in turn, with a fake clock."""

import pytest

from benchmarks.timing import Way, compare, speedup_table


def test_turns_and_medians():
    now = [0.0]
    order = []
    # Seconds for 10 items; the first round of each is the warm-up.
    seconds = {"a": iter([99.0, 1.0, 2.0, 4.0]), "b": iter([99.0, 0.5, 0.5, 0.1])}

    def way(name):
        def prepare():
            now[0] += 1000  # not counted
            return name

        def run(ready):
            assert ready == name
            order.append(name)
            now[0] += next(seconds[name])
            return 10

        return Way(run, prepare)

    result = compare("x", way("a"), way("b"), rounds=3, clock=lambda: now[0])
    assert order == ["a", "b"] * 4
    figures = [result[name] for name in ("first_per_second", "second_per_second", "ratio")]
    assert figures == pytest.approx([5, 20, 4])
    assert (result["lowest_ratio"], result["highest_ratio"]) == pytest.approx((2, 40))
    assert "| x | 5 | 20 | 4.0 (2.0 to 40.0) |" in speedup_table([result])
