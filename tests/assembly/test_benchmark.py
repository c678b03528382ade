"""Loader and step of one's own configuration, measured: that it runs and what it writes, never how fast."""

from collections.abc import Iterator

import pytest

from speakernet.assembly.benchmark import time_batches


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
