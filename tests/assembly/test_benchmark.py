"""Loader and step of one's own configuration, measured: that it runs and what it writes, never how fast."""

import types
from collections.abc import Iterator

import pytest
import torch

from speakernet.assembly import benchmark
from speakernet.assembly.benchmark import time_batches, time_steps
from speakernet.machine.memory import Monitor


def test_batches_are_counted_and_no_more_are_fetched_than_asked_for() -> None:
    fetched = []

    def batches() -> Iterator[list[int]]:
        for number in range(5):
            fetched.append(number)
            yield [number] * 3

    times = time_batches(batches(), 2, len)
    assert times["num_batches"] == 2 and fetched == [0, 1] and times["utterances_per_second"] > 0
    assert 0 <= times["median_seconds"] <= times["p95_seconds"] <= times["slowest_seconds"]
    assert time_batches(batches(), 9, len)["num_batches"] == 5
    with pytest.raises(ValueError, match="no batch"):
        time_batches(iter([]), 3, len)


def test_steps_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up is not counted, the clock is read only when the device has caught up, utilisation is that of the run."""
    events: list[str] = []
    seconds, busy = iter([10.0, 14.0]), iter([90.0, 70.0, *[80.0] * 100])

    def now() -> float:
        events.append("clock")
        return next(seconds)

    def utilisation() -> float:
        assert events.count("step") >= 20
        return next(busy)

    monkeypatch.setattr(benchmark, "synchronize", lambda device: events.append("wait"))
    monkeypatch.setattr(benchmark, "time", types.SimpleNamespace(perf_counter=now))
    monkeypatch.setattr(benchmark, "utilisation_monitor", lambda device: Monitor(utilisation, sample_seconds=60.0))
    figures = time_steps(lambda: events.append("step"), 8, torch.device("cuda"))
    assert events == ["step"] * 20 + ["wait", "clock"] + ["step"] * 8 + ["wait", "clock"]
    assert figures == {"step_seconds": 0.5, "steps_per_second": 2.0, "gpu_utilisation_percent": 80.0}


def test_steps_of_a_cpu() -> None:
    assert set(time_steps(lambda: None, 2, torch.device("cpu"))) == {"step_seconds", "steps_per_second"}
