"""One optimizer step: accumulation, clipping, the gradient cache, precision; against loops and hand-worked numbers."""

import pytest
import torch
from torch import nn
from training_fakes import (
    CPU,
    SAMPLES,
    FakeBatch,
    FakeLoader,
    FakeLoss,
    FakeMetricLoss,
    FakeNet,
    make_step,
    optimizer_options,
)

from speakernet.training.optimizers import OptimizerState, create_optimizer
from speakernet.training.options import RuntimeOptions, SgdOptions
from speakernet.training.precision import Precision
from speakernet.training.step import BufferGuard, TrainingStep


def sgd_step(net: nn.Module, loss: nn.Module, precision: str = "no", **options) -> TrainingStep:
    optimizer = create_optimizer(SgdOptions(learning_rate=1.0, momentum=0.0, nesterov=False), [net, loss], CPU)
    return make_step(net, loss, optimizer, Precision(RuntimeOptions(), precision, CPU), **options)


def fresh(metric: bool = False, frozen_norm: bool = True, dropout: float = 0.0) -> tuple[FakeNet, nn.Module]:
    torch.manual_seed(1)
    net = FakeNet(dropout=dropout, frozen_norm=frozen_norm)
    loss = FakeMetricLoss() if metric else FakeLoss()
    return net.train(), loss


def split(batch: FakeBatch, sizes: list[int]) -> list[FakeBatch]:
    parts = zip(batch.waveforms.split(sizes), batch.labels.split(sizes), batch.indices.split(sizes), strict=True)
    return [FakeBatch(*part) for part in parts]


def whole_batch(size: int = 12) -> FakeBatch:
    return FakeLoader(num_batches=2, batch_size=size).batch(0)


@pytest.mark.parametrize("sizes", [[12], [4, 4, 4], [5, 5, 2], [2, 10]])
def test_accumulation_equals_one_batch(sizes: list[int]):
    """Micro-batches of any sizes, the smaller last one too, give the step of the whole batch (frozen batch norm)."""
    batch = whole_batch()
    net, loss = fresh()
    reference = [p.detach().clone() for p in [*net.parameters(), *loss.parameters()]]
    value, _ = loss(net(batch.waveforms), batch.labels)
    gradients = torch.autograd.grad(value, [*net.parameters(), *loss.parameters()], allow_unused=True)
    step = sgd_step(net, loss, max_grad_norm=0.0)
    for part in split(batch, sizes):
        step.add(part)
    outcome = step.finish(learning_rate=0.1)
    assert outcome.loss.item() == pytest.approx(value.item(), rel=1e-5)
    assert outcome.num_utterances == 12
    for before, gradient, after in zip(reference, gradients, [*net.parameters(), *loss.parameters()], strict=True):
        expected = before if gradient is None else before - 0.1 * gradient
        torch.testing.assert_close(after.detach(), expected, rtol=1e-5, atol=1e-6)


def test_clipping_scales_to_the_norm_and_reports_the_true_one():
    batch = whole_batch()
    net, loss = fresh()
    parameters = [*net.parameters(), *loss.parameters()]
    before = [p.detach().clone() for p in parameters]
    value, _ = loss(net(batch.waveforms), batch.labels)
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    norm = torch.sqrt(sum((g.square().sum() for g in found if g is not None), torch.zeros(())))
    step = sgd_step(net, loss, max_grad_norm=0.01)
    step.add(batch)
    outcome = step.finish(learning_rate=1.0)
    assert outcome.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
    moved = torch.sqrt(sum(((b - a.detach()).square().sum() for b, a in zip(before, parameters, strict=True)),
                           torch.zeros(())))  # fmt: skip
    assert moved.item() == pytest.approx(0.01, rel=1e-3)


def metric_batch(speakers: int = 6) -> FakeBatch:
    labels = torch.arange(speakers).repeat_interleave(2)
    generator = torch.Generator().manual_seed(3)
    return FakeBatch(torch.randn(2 * speakers, SAMPLES, generator=generator), labels, torch.arange(2 * speakers))


def test_gradient_cache_equals_the_whole_batch():
    """Three micro-batches of two speakers give the gradient of one batch of six: all negatives are kept."""
    batch = metric_batch()
    net, loss = fresh(metric=True)
    value, _ = loss(net(batch.waveforms).reshape(6, 2, -1), batch.labels[::2])
    gradients = torch.autograd.grad(value, [p for p in net.parameters() if p.requires_grad], allow_unused=True)
    before = [p.detach().clone() for p in net.parameters()]
    step = sgd_step(net, loss, max_grad_norm=0.0, utterances_per_speaker=2, gradient_cache=True)
    for part in split(batch, [4, 4, 4]):
        step.add(part)
    outcome = step.finish(learning_rate=0.1)
    assert outcome.loss.item() == pytest.approx(value.item(), rel=1e-5)
    for old, gradient, new in zip(before, gradients, net.parameters(), strict=True):
        expected = old if gradient is None else old - 0.1 * gradient
        torch.testing.assert_close(new.detach(), expected, rtol=1e-5, atol=1e-6)


def test_gradient_cache_moves_statistics_once_and_repeats_dropout():
    batch = metric_batch()
    parts = split(batch, [4, 4, 4])
    net, loss = fresh(metric=True, frozen_norm=False, dropout=0.5)
    twin, _ = fresh(metric=True, frozen_norm=False, dropout=0.5)
    torch.manual_seed(7)
    for part in parts:
        twin(part.waveforms)
    drawn_after = torch.rand(1)
    torch.manual_seed(7)
    step = sgd_step(net, loss, utterances_per_speaker=2, gradient_cache=True)
    for part in parts:
        step.add(part)
    step.finish(learning_rate=0.0)
    torch.testing.assert_close(net.norm.running_mean, twin.norm.running_mean)
    assert net.norm.num_batches_tracked.item() == 3
    assert torch.equal(torch.rand(1), drawn_after)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_precisions_give_finite_results_of_equal_shape(precision: str):
    net, loss = fresh()
    step = sgd_step(net, loss, precision)
    step.add(whole_batch())
    outcome = step.finish(learning_rate=0.01)
    assert not outcome.is_bad
    assert torch.isfinite(outcome.loss) and outcome.loss.dtype == torch.float32
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in net.parameters())


def test_loss_scale_leaves_the_step_alone():
    """fp16's scaling (here over float32 arithmetic) changes neither the update nor the reported norm."""
    results = []
    for scales in (False, True):
        net, loss = fresh()
        step = sgd_step(net, loss, max_grad_norm=0.5)
        if scales:
            step.precision.scales, step.precision.scale = True, torch.tensor(1024.0)
        for part in split(whole_batch(), [8, 4]):
            step.add(part)
        outcome = step.finish(learning_rate=0.1)
        results.append([outcome.grad_norm, *[p.detach() for p in net.parameters()]])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad_epoch", [True, False])
def test_bad_gradient_with_finite_loss_is_undone(bad_epoch: bool):
    net, loss = fresh(frozen_norm=False)
    step = sgd_step(net, loss)
    before = [value.clone() for value in net.state_dict().values()]
    if bad_epoch:
        net.last.weight.register_hook(lambda gradient: gradient * float("inf"))
    step.add(whole_batch())
    outcome = step.finish(learning_rate=0.1)
    assert bool(outcome.is_bad) is bad_epoch and not outcome.loss_is_bad
    same = [torch.equal(one, other) for one, other in zip(before, net.state_dict().values(), strict=True)]
    assert all(same) is bad_epoch
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_fused_optimizers_skip_where_found_inf_says_so(name: str):
    """What the step relies on for GPUs: torch's fused kernels leave weights and moments alone."""
    weight = nn.Parameter(torch.ones(3))
    holder = nn.ParameterList([weight])
    optimizer = create_optimizer(optimizer_options(name, learning_rate=0.1, fused="on"), [holder], CPU)
    weight.grad = torch.full((3,), float("nan"))
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    assert torch.equal(weight, torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    optimizer.step()
    assert not torch.equal(weight, torch.ones(3)) and torch.isfinite(weight).all()


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_skipped_first_step_on_the_device_leaves_no_trace(name: str, monkeypatch: pytest.MonkeyPatch):
    """A GPU's fused SGD makes its momentum from raw memory in the first step and leaves it raw where it skips."""
    raw = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: raw(*args, **options).fill_(float("nan")))
    results = []
    for skips in (True, False):
        net, loss = fresh()
        options = optimizer_options(name, learning_rate=0.1, fused="on", weight_decay=0.1)
        moves = create_optimizer(options, [net, loss], CPU)
        step = make_step(net, loss, moves, Precision(RuntimeOptions(), "no", CPU))
        step._skips_on_device = True
        batches = [FakeLoader(poisoned=frozenset({0} if skips else ())).batch(number) for number in range(3)]
        for batch in batches if skips else batches[1:]:
            step.add(batch)
            step.finish(learning_rate=0.1)
        results.append([parameter.detach() for parameter in [*net.parameters(), *loss.parameters()]])
    for one, other in zip(*results, strict=True):
        assert torch.isfinite(one).all() and torch.equal(one, other)


def test_momentum_that_was_not_saved_begins_at_zero():
    """A checkpoint from before the first good step has none."""
    weight = nn.Parameter(torch.ones(2))
    moves = create_optimizer(SgdOptions(learning_rate=0.1, fused="on"), [nn.ParameterList([weight])], CPU)
    state = OptimizerState(moves)
    state.load_state_dict({**state.state_dict(), "state": {}})
    assert torch.equal(moves.state[weight]["momentum_buffer"], torch.zeros(2))


@pytest.mark.parametrize("is_bad", [True, False])
def test_statistics_are_put_back_where_a_step_was_bad(is_bad: bool) -> None:
    """Without asking the device which: all tensors of a type at once, NaN among them."""
    net = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(2))
    guard = BufferGuard([net])
    guard.remember()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    for norm in net:
        norm.running_mean.fill_(float("nan"))
        norm.num_batches_tracked += 1
    moved = {key: value.clone() for key, value in net.state_dict().items()}
    guard.restore_where(torch.tensor(is_bad))
    for key, value in net.state_dict().items():
        torch.testing.assert_close(value, (before if is_bad else moved)[key], equal_nan=True, atol=0, rtol=0)
