"""`speakernet benchmark` and `find-batch-size`: fake memory limits and clocks; no figure is a matter of time."""

import pytest
import torch
from torch import nn

from speakernet.assembly.benchmark import BatchSizeFinder, Measurement, recommendation
from speakernet.cli import main
from speakernet.config import load_config

OPTIONS = ["--model.name=ResNet", "--model.embedding_dim=8", "--data.crop_frames=50", "--runtime.device=cpu"]


class FakeMachine:
    """Steps that run out of memory above `limit` items, and take the seconds that `cost` says."""

    def __init__(self, limit: int, cost=float) -> None:
        self.limit, self.cost, self.now = limit, cost, 0.0
        self.tried: list[int] = []
        self.finder = BatchSizeFinder(nn.Linear(1, 1), int, self.step, clock=lambda: self.now)

    def step(self, size: int) -> None:
        self.tried.append(size)
        if size > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory (a fake)")
        self.now += self.cost(size)


@pytest.mark.parametrize("limit", [1, 7, 64, 100, 700])
def test_bisection(limit):
    machine = FakeMachine(limit)
    machine.finder.find(1, 1024)
    assert limit * 7 / 8 - 1 <= machine.finder.largest <= limit and max(machine.tried) <= 2 * limit


def test_the_fastest_size_wins_and_of_equals_the_smallest():
    # Seconds a step: 1 + size/16 up to 32, then cache misses make it four times slower.
    assert FakeMachine(512, lambda size: (1 + size / 16) * (1 if size <= 32 else 4)).finder.find(1, 512) == 32
    assert FakeMachine(512, lambda size: size / 10).finder.find(4, 512) == 4


def test_errors():
    def broken(_: int) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        BatchSizeFinder(nn.Linear(1, 1), int, broken).find(1, 2)
    with pytest.raises(ValueError, match="batch of 8"):
        FakeMachine(4).finder.find(8, 16)


def test_a_cpu_keeps_to_its_limit():
    """Each item takes a megabyte; with a limit of 50 MB a batch of 64 must never run, and one that fails runs once."""
    sizes: list[int] = []
    # Four steps are run with each size.
    finder = BatchSizeFinder(nn.Linear(1, 1), int, sizes.append, 50 << 20, read_memory=lambda: (sum(sizes) << 20) // 4)
    finder.find(16, 256)
    assert max(sizes) < 64 and 44 <= finder.largest <= 50
    sizes.clear()
    finder = BatchSizeFinder(nn.Linear(1, 1), int, sizes.append, 1 << 20, read_memory=lambda: len(sizes) << 30)
    with pytest.raises(ValueError, match=r"batch of 8 .*1\.0 MiB"):
        finder.find(8, 16)
    assert sizes == [8]


def test_the_network_is_left_as_it_was():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    finder = BatchSizeFinder(net, lambda size: torch.randn(size, 3) + 5, lambda batch: net(batch).mean().backward())
    assert 2 <= finder.find(2, 16) <= 16
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize(
    ("options", "sizes", "batch_sizes"),
    [
        ("--data.batch_size 6 --min_batch_size 2 --max_batch_size 4", [2, 4, 6], (2, 4, 6)),
        (
            "--loss.name angleproto --data.utterances_per_speaker 3 --data.batch_size 2 "
            "--min_batch_size 4 --max_batch_size 8",
            [3, 6],
            (1, 2),
        ),
    ],
    ids=["utterances", "whole speakers"],
)
def test_the_command(options, sizes, batch_sizes, capsys):
    assert main(["find-batch-size", *OPTIONS, *options.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines[: len(sizes)]] == sizes
    assert len(lines) == len(sizes) + 2 and any(f"--batch_size {size}" in lines[-1] for size in batch_sizes)


def measured(batch_size: int, throughput: float) -> Measurement:
    return Measurement(batch_size, batch_size / throughput if throughput else float("inf"), 0)


@pytest.mark.parametrize(
    ("configured", "best", "rows", "start"),
    [
        ((32, 100.0), (32, 100.0), 0, "keep --batch_size 32"),
        ((32, 100.0), (64, 110.0), 10**6, "keep --batch_size 32"),
        ((32, 100.0), (64, 150.0), 1000, "keep --batch_size 32"),
        ((32, 100.0), (64, 150.0), 50_000, "take --batch_size 64 "),
        ((64, 100.0), (32, 150.0), 1000, "take --batch_size 32 "),
        ((64, 0.0), (16, 100.0), 0, "take --batch_size 16 --training.accumulation_steps 4"),
    ],
)
def test_the_recommendation(configured, best, rows, start, tmp_path):
    """Slightly faster, or too few steps left, is not worth it."""
    path = tmp_path / "train.txt"
    if rows:
        path.write_text("".join(f"a {row}.wav\n" for row in range(rows)))
    config = load_config([*OPTIONS, "--max_epoch", "16", "--train_list", str(path)]).config
    assert recommendation(config, measured(*configured), measured(*best)).startswith(start)
