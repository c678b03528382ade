"""The search for a batch size, with fake memory limits and clocks."""

import pytest
import torch
from torch import nn

from speakernet.training.batch_size import BatchSizeFinder, Measurement, recommendation
from speakernet.training.options import TrainingOptions


class FakeMachine:
    """Steps that run out of memory above `limit` items and take `cost(size)` seconds."""

    def __init__(self, limit, cost=float):
        self.limit = limit
        self.cost = cost
        self.now = 0.0
        self.tried = []
        self.finder = BatchSizeFinder(nn.Linear(1, 1), int, self.step, clock=lambda: self.now)

    def step(self, size):
        self.tried.append(size)
        if size > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory (a fake)")
        self.now += self.cost(size)


@pytest.mark.parametrize("limit", [1, 7, 64, 100, 700])
def test_bisection(limit):
    machine = FakeMachine(limit)
    machine.finder.find(1, 1024)
    assert limit * 7 / 8 - 1 <= machine.finder.largest <= limit and max(machine.tried) <= 2 * limit


def test_fastest_size():
    # Seconds per step: 1 + size / 16 up to 32, then four times as long, as with cache misses. On a
    # tie, the smallest.
    assert (
        FakeMachine(512, lambda size: (1 + size / 16) * (1 if size <= 32 else 4)).finder.find(
            1, 512
        )
        == 32
    )
    assert FakeMachine(512, lambda size: size / 10).finder.find(4, 512) == 4


def test_errors():
    def broken(_):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        BatchSizeFinder(nn.Linear(1, 1), int, broken).find(1, 2)
    with pytest.raises(ValueError, match="batch of 8"):
        FakeMachine(4).finder.find(8, 16)


def test_memory_limit_of_a_cpu():
    """Each item takes a megabyte; with a limit of 50 MB, 64 must never run, and a size that fails
    runs once.
    """
    sizes = []
    # Each size runs four steps.
    finder = BatchSizeFinder(
        nn.Linear(1, 1), int, sizes.append, 50 << 20, read_memory=lambda: (sum(sizes) << 20) // 4
    )
    finder.find(16, 256)
    assert max(sizes) < 64 and 44 <= finder.largest <= 50
    sizes.clear()
    finder = BatchSizeFinder(
        nn.Linear(1, 1), int, sizes.append, 1 << 20, read_memory=lambda: len(sizes) << 30
    )
    with pytest.raises(ValueError, match=r"batch of 8 .*1\.0 MiB"):
        finder.find(8, 16)
    assert sizes == [8]


def test_network_is_unchanged():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    finder = BatchSizeFinder(
        net, lambda size: torch.randn(size, 3) + 5, lambda batch: net(batch).mean().backward()
    )
    assert 2 <= finder.find(2, 16) <= 16
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


def measured(batch_size, throughput):
    return Measurement(batch_size, batch_size / throughput if throughput else float("inf"), 0)


@pytest.mark.parametrize(
    ("configured", "best", "utterances", "start"),
    [
        ((32, 100.0), (64, 110.0), 10**6, "keep --batch_size 32"),
        (
            (64, 100.0),
            (32, 99.9),
            10**6,
            "keep --batch_size 64; no size is clearly faster (32 by 0 %",
        ),
        ((32, 100.0), (64, 150.0), 1000, "keep --batch_size 32"),
        ((32, 100.0), (64, 150.0), 50_000, "use --batch_size 64 "),
        ((64, 0.0), (16, 100.0), 0, "use --batch_size 16 --training.accumulation_steps 4"),
    ],
)
def test_the_recommendation(configured, best, utterances, start):
    """A slightly faster size, or too few steps left, is not recommended."""
    advice = recommendation(
        measured(*configured),
        measured(*best),
        TrainingOptions(max_epochs=16),
        utterances_per_speaker=1,
        is_metric=False,
        count_utterances=lambda: utterances,
    )
    assert advice.startswith(start)
