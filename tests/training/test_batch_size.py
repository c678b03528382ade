"""The batch-size finder against fake memory limits and fake clocks, and once for real."""

import pytest
import torch
from torch import nn

from speakernet.training.batch_size import BatchSizeOptimizer


class FakeMachine:
    """Steps that run out of memory above `limit` items, and take the seconds that `cost` says."""

    def __init__(self, limit: int, cost=lambda size: float(size)) -> None:
        self.limit, self.cost, self.now = limit, cost, 0.0
        self.tried: list[int] = []

    def step(self, size: int) -> None:
        self.tried.append(size)
        if size > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory (a fake)")
        self.now += self.cost(size)

    def optimizer(self, smallest: int = 1, largest: int = 1024) -> BatchSizeOptimizer:
        return BatchSizeOptimizer(
            model=nn.Linear(1, 1),
            sample_batch_fn=lambda size: size,
            min_batch_size=smallest,
            max_batch_size=largest,
            step=self.step,
            clock=lambda: self.now,
        )


@pytest.mark.parametrize("limit", [1, 7, 64, 100, 700])
def test_bisection_comes_within_an_eighth_of_the_limit(limit: int) -> None:
    machine = FakeMachine(limit)
    finder = machine.optimizer()
    finder.find_optimal_batch_size()
    assert limit * 7 / 8 - 1 <= finder.largest_batch_size <= limit
    assert max(machine.tried) <= 2 * limit


def test_everything_fits_up_to_the_largest() -> None:
    finder = FakeMachine(10**6).optimizer(3, 50)
    finder.find_optimal_batch_size()
    assert [one.batch_size for one in finder.measurements] == [3, 6, 12, 24, 48, 50]


def test_the_fastest_size_wins_not_the_largest() -> None:
    # seconds a step: 1 + size/16 up to 32, then cache misses make it four times dearer
    machine = FakeMachine(512, lambda size: (1 + size / 16) * (1 if size <= 32 else 4))
    assert machine.optimizer().find_optimal_batch_size() == 32


def test_of_equally_fast_sizes_the_smallest_wins() -> None:
    assert FakeMachine(512, lambda size: size / 10).optimizer(4).find_optimal_batch_size() == 4


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    def broken(_: int) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    finder = BatchSizeOptimizer(model=nn.Linear(1, 1), sample_batch_fn=lambda size: size, step=broken)
    with pytest.raises(RuntimeError, match="shapes"):
        finder.find_optimal_batch_size()


def test_nothing_fits() -> None:
    with pytest.raises(ValueError, match="not even a batch of 8"):
        FakeMachine(4).optimizer(8).find_optimal_batch_size()
    with pytest.raises(ValueError, match="expected 1 <="):
        FakeMachine(4).optimizer(8, 4)


def test_a_limit_below_a_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="memory limit of -1 bytes; expected more than 0"):
        BatchSizeOptimizer(model=torch.nn.Linear(1, 1), sample_batch_fn=lambda size: size, memory_limit_bytes=-1)


def test_a_cpu_is_held_to_its_memory_limit_without_trying_what_would_break_it() -> None:
    """Each item takes a megabyte; with a limit of 50 MB a batch of 64 must never be run."""
    sizes: list[int] = []
    finder = BatchSizeOptimizer(
        model=nn.Linear(1, 1),
        sample_batch_fn=lambda size: size,
        min_batch_size=16,
        max_batch_size=256,
        step=sizes.append,
        memory_limit_bytes=50 << 20,
        read_memory=lambda: (sum(sizes) << 20) // 4,  # four steps are run with each size
    )
    finder.find_optimal_batch_size()
    assert max(sizes) < 64
    assert 44 <= finder.largest_batch_size <= 50


def test_a_size_that_does_not_fit_is_run_once() -> None:
    sizes: list[int] = []
    finder = BatchSizeOptimizer(
        model=nn.Linear(1, 1),
        sample_batch_fn=lambda size: size,
        min_batch_size=8,
        step=sizes.append,
        memory_limit_bytes=1 << 20,
        read_memory=lambda: len(sizes) << 30,
    )
    with pytest.raises(ValueError, match=r"not even a batch of 8 .*limit 1\.0 MiB"):
        finder.find_optimal_batch_size()
    assert sizes == [8]


def test_a_real_network_is_left_as_it_was() -> None:
    net = nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 1))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    best = BatchSizeOptimizer(
        model=net, sample_batch_fn=lambda size: torch.randn(size, 20), max_batch_size=16
    ).find_optimal_batch_size()
    assert 1 <= best <= 16
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_batch_norm_statistics_are_as_before_and_tries_are_of_one_search() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    finder = BatchSizeOptimizer(
        model=model, sample_batch_fn=lambda size: torch.randn(size, 3) + 5, min_batch_size=2, max_batch_size=4
    )
    finder.find_optimal_batch_size()
    tries = len(finder.measurements)
    finder.find_optimal_batch_size()
    assert len(finder.measurements) == tries
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
