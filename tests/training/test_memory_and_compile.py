"""Speed and memory of training: checkpointed blocks, the decision to compile, threads beside other
work.
"""

import pytest
import torch
from torch import nn

from speakernet.training import compiling
from speakernet.training.compiling import Compiler, enable_gradient_checkpointing, training_bytes
from speakernet.training.options import RuntimeOptions
from speakernet.training.threads import SKIPPED_STEPS, WINDOW_STEPS, ThreadWatch
from tests.training.training_fakes import assert_equal, trained


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.conv = nn.Conv1d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden):
        return hidden + self.dropout(self.norm(self.conv(hidden)).relu_())


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.stages = nn.Sequential(
            *(nn.Sequential(Block(dropout), Block(dropout)) for _ in range(2))
        )
        self.last = nn.Linear(3, 2)

    def forward(self, hidden):
        return self.last(self.stages(hidden).mean(-1))


def run(net):
    torch.manual_seed(5)
    data = torch.randn(4, 3, 10, generator=torch.Generator().manual_seed(2))
    output = net.train()(data)
    output.square().sum().backward()
    return [output.detach(), *[p.grad for p in net.parameters()], *net.buffers()]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointing(dropout):
    """Outputs, gradients and batch-norm statistics (updated once, not twice) equal those of the
    plain network.
    """
    torch.manual_seed(0)
    plain = Net(dropout)
    saving = Net(dropout)
    saving.load_state_dict(plain.state_dict())
    assert enable_gradient_checkpointing(saving) == 4
    assert saving.state_dict().keys() == plain.state_dict().keys()
    assert_equal(run(plain), run(saving))


class Recorder(nn.Module):
    """A fake network that counts compilations, and fails on request."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.compiled_with = []

    def compile(self, **options):
        self.compiled_with.append(options)


def compiler_of(net, when="auto", scope="whole"):
    return Compiler(net, RuntimeOptions(compile=when, compile_scope=scope))


@pytest.mark.parametrize("extra", [1, -2])
def test_auto_compiles_if_it_pays(extra):
    """With steps of one second and one layer."""
    net = Recorder()
    compiler = compiler_of(net)
    steps_left = (
        int(compiling.REQUIRED_GAIN * compiling.SECONDS_PER_LAYER / compiling.ASSUMED_SAVING["cpu"])
        + extra
    )
    for _ in range(compiling.OBSERVED_STEPS):
        compiler.consider(1.0, steps_left)
    assert len(net.compiled_with) == int(extra > 0) and compiler.is_observing is (extra > 0)


@pytest.mark.parametrize(("compiled_seconds", "is_kept"), [(0.9, True), (1.1, False)])
def test_auto_reverts(compiled_seconds, is_kept):
    net = Recorder()
    compiler = compiler_of(net)
    for _ in range(2 * compiling.OBSERVED_STEPS):
        compiler.consider(compiled_seconds if compiler.is_compiled else 1.0, 10**6)
    assert (
        len(net.compiled_with) == 1
        and compiler.is_compiled is is_kept
        and not compiler.is_observing
    )


def test_checkpointed_blocks_are_compiled(monkeypatch):
    calls = []

    def compiled(function, **options):
        def run(*inputs):
            calls.append(options["dynamic"])
            return function(*inputs)

        return run

    torch.manual_seed(0)
    net = Net()
    plain = run(net)
    net.zero_grad()
    for buffer, start in zip(net.buffers(), Net().buffers(), strict=True):
        buffer.copy_(start)
    enable_gradient_checkpointing(net)
    monkeypatch.setattr(torch, "compile", compiled)
    compiler = compiler_of(net, "on", "regional")
    assert_equal(plain, run(net))
    # Four blocks, each again in the backward pass.
    assert calls == [False] * 8
    compiler.close()
    run(net)
    assert len(calls) == 8


def test_failed_compilation(tmp_path, monkeypatch, caplog):
    straight = trained(tmp_path / "straight", max_epochs=1)
    failures = []

    def broken(*_inputs, **_options):
        failures.append(1)
        raise RuntimeError("no C++ compiler was found")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", broken)
    compiles = RuntimeOptions(compile="on", compile_scope="whole")
    trainer = trained(tmp_path / "run", max_epochs=1, compiles=compiles)
    # Once: no further block is tried, and the log says why.
    assert len(failures) == 1 and "no C++ compiler was found" in caplog.text
    assert not trainer.step.compiler.is_compiled
    assert_equal(straight.net.state_dict().values(), trainer.net.state_dict().values())


def test_memory_of_training():
    net = nn.Sequential(nn.Linear(100, 40), nn.Dropout(0.5), nn.Linear(40, 8))
    before = [parameter.clone() for parameter in net.parameters()]
    random_state = torch.get_rng_state()
    weights = 16 * (100 * 40 + 40 + 40 * 8 + 8)
    # Inputs of both layers (a value each) and the mask of the dropout (a byte each).
    for batch_size in (1, 64):
        taken = training_bytes(net, 100, batch_size, torch.float32) - weights
        assert (
            1.25 * batch_size * 4 * (100 + 40)
            <= taken
            <= 1.25 * batch_size * (4 * (100 + 40) + 4 * 40)
        )
    assert_equal(net.parameters(), before)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in net.parameters())


BUSY = 0.3


class Run:
    """Steps whose speed depends on the number of threads: (utterances per second, share of time
    training ran).
    """

    def __init__(self, threads, speeds, adapts=True):
        self.speeds = speeds
        self.used = []
        self.set = []
        self.watch = ThreadWatch(threads, adapts=adapts, set_threads=self.set.append)

    def go(self, steps, is_compiled=False):
        for _ in range(steps):
            rate, share = self.speeds(self.watch.threads)
            self.used.append(self.watch.threads)
            self.watch.step(64 / rate, share * 64 / rate, 64, is_compiled=is_compiled)


def disturbed(threads):
    return (17.0, BUSY) if threads > 1 else (55.0, 0.6)


def test_disturbed_run(caplog):
    run = Run(2, disturbed)
    run.go(SKIPPED_STEPS + WINDOW_STEPS + 1)
    assert run.used[-1] == 1
    run.go(500)
    assert set(run.used[20:]) == {1} and run.set == [1]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "55 utterances/s with 1 threads, 17 with 2; continuing with 1" in caplog.text
    run.watch.close()
    assert run.set == [1, 2]


@pytest.mark.parametrize(("adapts", "is_compiled"), [(False, False), (True, True)])
def test_fixed_number_of_threads(adapts, is_compiled, caplog):
    run = Run(2, disturbed, adapts)
    run.go(100, is_compiled)
    assert run.set == []
    assert len(caplog.records) == 1 and "runtime.threads: 1" in caplog.text
