"""Timing of steps and batches, with fake devices and clocks."""

import pytest
import torch
from torch import nn

from speakernet.training import timing

CPU = torch.device("cpu")


class FakeGpu:
    """Records the order of calls; a step compiles something while `compiled` has entries left."""

    def __init__(self, monkeypatch, compiled=()):
        self.done = []
        self.compiled = list(compiled)
        self.count = 0
        monkeypatch.setattr(timing, "num_compiled", lambda: self.count)
        monkeypatch.setattr(timing, "synchronize", lambda device: self.done.append("waited"))
        monkeypatch.setattr(timing.time, "perf_counter", self.clock)

    def clock(self):
        self.done.append("clock")
        return float(len(self.done))

    def step(self):
        self.done.append("step")
        self.count += self.compiled.pop(0) if self.compiled else 0


@pytest.mark.parametrize(
    ("compiled", "steps"),
    [
        ((), 5),
        ((1,), 5),
        ((1, 0, 0, 2), 7),
        ((0, 0, 0, 0, 1), 8),
        ((1,) * 500, timing.MAX_WARM_STEPS),
    ],
)
def test_end_of_warm_up(monkeypatch, compiled, steps):
    machine = FakeGpu(monkeypatch, compiled)
    assert timing.warm_up(machine.step, 5) == steps == machine.done.count("step")


def test_clock_waits_for_the_device(monkeypatch):
    machine = FakeGpu(monkeypatch)
    timing.time_steps(machine.step, 2, CPU, lambda: machine.done.append("warm"))
    timed = machine.done[machine.done.index("warm") :]
    assert timed == ["warm", "waited", "clock", "step", "step", "waited", "clock"]
    machine.done.clear()
    timing.time_batches(iter([1, 1]), 2, int, CPU)
    assert machine.done == ["clock", "clock", "clock", "waited", "clock"]
    machine.done.clear()
    timing.peak_flops(CPU, "float32", 4)
    assert machine.done == ["waited", "clock", "waited", "clock"] * (1 + timing.TIMED_ROUNDS)


def test_flop_of_products():
    net = nn.Linear(8, 4)
    # Two inputs: forward, and the gradient of the weights.
    assert timing.count_flop(lambda: net(torch.ones(2, 8)).sum().backward()) == 2 * (2 * 2 * 8 * 4)
