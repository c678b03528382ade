"""`speakernet benchmark` and `find-batch-size`, with fake memory limits and clocks."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from speakernet.assembly import benchmark
from speakernet.assembly.benchmark import BatchSizeFinder, Measurement, ReadyCrops, recommendation
from speakernet.assembly.data import build_training_loader
from speakernet.assembly.inputs import Inputs
from speakernet.cli import main
from speakernet.config import load_config

OPTIONS = [
    "--model.name=ResNet",
    "--model.embedding_dim=8",
    "--data.crop_frames=50",
    "--runtime.device=cpu",
]


CPU = torch.device("cpu")


class FakeMachine:
    """Steps that run out of memory above `limit` items and take `cost(size)` seconds."""

    def __init__(self, limit: int, cost=float) -> None:
        self.limit = limit
        self.cost = cost
        self.now = 0.0
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
    def broken(_: int) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        BatchSizeFinder(nn.Linear(1, 1), int, broken).find(1, 2)
    with pytest.raises(ValueError, match="batch of 8"):
        FakeMachine(4).finder.find(8, 16)


def test_memory_limit_of_a_cpu():
    """Each item takes a megabyte; with a limit of 50 MB, 64 must never run, and a size that fails
    runs once.
    """
    sizes: list[int] = []
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
    assert len(lines) == len(sizes) + 2 and any(
        f"--batch_size {size}" in lines[-1] for size in batch_sizes
    )


def measured(batch_size: int, throughput: float) -> Measurement:
    return Measurement(batch_size, batch_size / throughput if throughput else float("inf"), 0)


@pytest.mark.parametrize(
    ("configured", "best", "rows", "start"),
    [
        ((32, 100.0), (32, 100.0), 0, "keep --batch_size 32"),
        ((32, 100.0), (64, 110.0), 10**6, "keep --batch_size 32"),
        (
            (64, 100.0),
            (32, 99.9),
            10**6,
            "keep --batch_size 64; no size is clearly faster (32 by 0 %",
        ),
        ((32, 100.0), (64, 150.0), 1000, "keep --batch_size 32"),
        ((32, 100.0), (64, 150.0), 50_000, "use --batch_size 64 "),
        ((64, 100.0), (32, 150.0), 1000, "use --batch_size 32 "),
        ((64, 0.0), (16, 100.0), 0, "use --batch_size 16 --training.accumulation_steps 4"),
    ],
)
def test_the_recommendation(configured, best, rows, start, tmp_path):
    """A slightly faster size, or too few steps left, is not recommended."""
    path = tmp_path / "train.txt"
    if rows:
        path.write_text("".join(f"a {row}.wav\n" for row in range(rows)))
    config = load_config([*OPTIONS, "--max_epoch", "16", "--train_list", str(path)]).config
    assert recommendation(config, measured(*configured), measured(*best)).startswith(start)


class FakeGpu:
    """Records the order of calls; a step compiles something while `compiled` has entries left."""

    def __init__(self, monkeypatch, compiled=()):
        self.done: list[str] = []
        self.compiled = list(compiled)
        self.count = 0
        monkeypatch.setattr(benchmark, "num_compiled", lambda: self.count)
        monkeypatch.setattr(benchmark, "synchronize", lambda device: self.done.append("waited"))
        monkeypatch.setattr(benchmark.time, "perf_counter", self.clock)

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
        ((1,) * 500, benchmark.MAX_WARM_STEPS),
    ],
)
def test_end_of_warm_up(monkeypatch, compiled, steps):
    machine = FakeGpu(monkeypatch, compiled)
    assert benchmark.warm_up(machine.step, 5) == steps == machine.done.count("step")


def test_clock_waits_for_the_device(monkeypatch):
    machine = FakeGpu(monkeypatch)
    benchmark.time_steps(machine.step, 2, CPU, lambda: machine.done.append("warm"))
    assert machine.done[machine.done.index("warm") :] == [
        "warm",
        "waited",
        "clock",
        "step",
        "step",
        "waited",
        "clock",
    ]
    machine.done.clear()
    benchmark.time_batches(iter([1, 1]), 2, int, CPU)
    assert machine.done == ["clock", "clock", "clock", "waited", "clock"]
    machine.done.clear()
    benchmark.peak_flops(CPU, "float32", 4)
    assert machine.done == ["waited", "clock", "waited", "clock"] * (1 + benchmark.TIMED_STEPS)


def test_arithmetic_of_the_peak(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", seen.append)
    for arithmetic in ("float32", "tf32", "bf16"):
        assert benchmark.peak_flops(CPU, arithmetic, 8) > 0
    before = torch.get_float32_matmul_precision()
    assert seen == ["highest", before, "high", before, "highest", before]
    gpu = torch.device("cuda")
    for allowed, name in ((True, "tf32"), (False, "float32")):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
        assert [benchmark.arithmetic_of(one, gpu) for one in ("no", "bf16", "fp16")] == [
            name,
            "bf16",
            "fp16",
        ]
    assert benchmark.arithmetic_of("no", CPU) == "float32"


def test_flop_of_products():
    net = nn.Linear(8, 4)
    # Two inputs: forward, and the gradient of the weights.
    assert benchmark.count_flop(lambda: net(torch.ones(2, 8)).sum().backward()) == 2 * (
        2 * 2 * 8 * 4
    )


def test_ready_crops_cost_the_same(tiny_corpus):
    words = [
        *OPTIONS,
        "--train_list",
        str(tiny_corpus / "train_list.txt"),
        "--data.batch_size",
        "4",
        "--data.num_workers",
        "0",
        "--augment.enabled",
        "false",
    ]
    config = load_config(words).config
    loader = build_training_loader(config, Inputs(config, CPU))
    first = next(iter(loader))
    made = []
    augmented = []
    maker = loader.maker
    read = maker.run
    maker.run = lambda requests: (made.append(1) or one for one in read(requests))
    loader.augmenter = lambda waveforms, **keys: (
        augmented.append(keys["rows"].tolist()) or waveforms.mul_(2)
    )
    loader.maker = ReadyCrops(maker)
    loader.set_epoch(0)
    batches = list(loader)
    assert len(made) == 1 and len(augmented) == len(batches) > 1
    # Augmentation works in place, and must not change the crops of the next batch.
    assert all(torch.equal(one.waveforms, 2 * first.waveforms) for one in batches)
    assert all(torch.equal(one.labels, first.labels) for one in batches)


def test_waiting_and_mfu(tiny_corpus, tmp_path, capsys):
    figures = tmp_path / "figures.json"
    words = [
        "benchmark",
        *OPTIONS,
        "--train_list",
        str(tiny_corpus / "train_list.txt"),
        "--data.batch_size",
        "4",
        "--data.num_workers",
        "0",
        "--augment.enabled",
        "false",
        "--num_batches",
        "2",
        "--json",
        str(figures),
    ]
    assert main(words) == 0
    found = SimpleNamespace(**json.loads(figures.read_text(encoding="utf-8"))["training"])
    assert found.mfu == pytest.approx(found.step_flop / found.step_seconds / found.peak_flops)
    waited = max(0.0, 1 - found.ready_step_seconds / found.step_seconds)
    assert found.data_wait_share == pytest.approx(waited) and 0 < found.mfu < 2
    assert "MFU" in capsys.readouterr().out
