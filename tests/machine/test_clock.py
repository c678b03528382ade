"""The clock of a device: a GPU's through events that are read once, by a stand-in; a CPU's by the wall."""

import time
import types

import pytest
import torch

from speakernet.machine.device import DeviceClock


def test_a_cpu_is_timed_by_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 1.5, 4.0, 4.25])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = DeviceClock(torch.device("cpu"))
    assert clock.take() == [] and len(clock) == 0
    for _ in range(3):
        clock.mark()
    assert len(clock) == 2 and clock.take() == [0.5, 2.5]
    # The last mark is where the next stretch begins.
    clock.mark()
    assert clock.take() == [0.25]


def test_a_gpu_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host sets three marks at once; what it is told is when the device came to each."""
    reached, waits = iter([100.0, 102.0, 107.0]), []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            self.at = next(reached)

        def synchronize(self) -> None:
            waits.append(self.at)

        def elapsed_time(self, other: "Event") -> float:
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(device=device))
    clock = DeviceClock(torch.device("cuda"))
    for _ in range(3):
        clock.mark()
    assert clock.take() == pytest.approx([0.002, 0.005]) and waits == [107.0]
