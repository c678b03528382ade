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
    tensors,
)

from speakernet.training.optimizers import BufferGuard, create_optimizer
from speakernet.training.options import SgdOptions
from speakernet.training.step import TrainingStep


def sgd_step(net: nn.Module, loss: nn.Module, **options) -> TrainingStep:
    optimizer = create_optimizer(SgdOptions(learning_rate=1.0, momentum=0.0, nesterov=False), [net, loss], CPU)
    return make_step(net, loss, optimizer, **options)


def fresh(metric: bool = False, frozen_norm: bool = True, dropout: float = 0.0) -> tuple[FakeNet, nn.Module]:
    torch.manual_seed(1)
    net = FakeNet(dropout=dropout, frozen_norm=frozen_norm)
    return net.train(), FakeMetricLoss() if metric else FakeLoss()


def split(batch: FakeBatch, sizes: list[int]) -> list[FakeBatch]:
    parts = zip(batch.waveforms.split(sizes), batch.labels.split(sizes), batch.indices.split(sizes), strict=True)
    return [FakeBatch(*part) for part in parts]


def whole_batch() -> FakeBatch:
    return FakeLoader(num_batches=2, batch_size=12).batch(0)


def metric_batch() -> FakeBatch:
    """Two utterances of each of six speakers."""
    generator = torch.Generator().manual_seed(3)
    return FakeBatch(
        torch.randn(12, SAMPLES, generator=generator), torch.arange(6).repeat_interleave(2), torch.arange(12)
    )


@pytest.mark.parametrize(
    ("sizes", "is_metric", "clip"),
    [
        ([12], False, 0.0),
        ([4, 4, 4], False, 0.0),
        ([5, 5, 2], False, 0.0),
        ([4, 8], False, 0.01),
        ([4, 4, 4], True, 0.0),
    ],
)
def test_micro_batches_equal_one_batch(sizes: list[int], is_metric: bool, clip: float) -> None:
    """Of any sizes (frozen batch norm); with the gradient cache all negatives of a metric loss are kept."""
    batch = metric_batch() if is_metric else whole_batch()
    net, loss = fresh(is_metric)
    parameters = [*net.parameters(), *loss.parameters()]
    before = [p.detach().clone() for p in parameters]
    embeddings = net(batch.waveforms)
    inputs = (embeddings.reshape(6, 2, -1), batch.labels[::2]) if is_metric else (embeddings, batch.labels)
    value, _ = loss(*inputs)
    gradients = torch.autograd.grad(value, parameters, allow_unused=True)
    norm = torch.stack([g.square().sum() for g in gradients if g is not None]).sum().sqrt()
    how = {"utterances_per_speaker": 2, "gradient_cache": True} if is_metric else {}
    step = sgd_step(net, loss, max_grad_norm=clip, **how)
    for part in split(batch, sizes):
        step.add(part)
    outcome = step.finish(learning_rate=0.1)
    assert outcome.loss.item() == pytest.approx(value.item(), rel=1e-5) and outcome.num_utterances == 12
    assert outcome.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
    rate = 0.1 * clip / norm if clip else 0.1
    for old, gradient, new in zip(before, gradients, parameters, strict=True):
        expected = old if gradient is None else old - rate * gradient
        torch.testing.assert_close(new.detach(), expected, rtol=1e-5, atol=1e-6)


def test_gradient_cache_moves_statistics_once_and_repeats_dropout() -> None:
    parts = split(metric_batch(), [4, 4, 4])
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
    assert net.norm.num_batches_tracked.item() == 3 and torch.equal(torch.rand(1), drawn_after)


def test_loss_scale_leaves_the_step_alone() -> None:
    """fp16's scaling (here over float32 arithmetic) changes neither the update nor the reported norm."""
    results = []
    for scale in (1.0, 1024.0):
        net, loss = fresh()
        step = sgd_step(net, loss, max_grad_norm=0.5)
        step.precision.scales, step.precision.scale = scale != 1.0, torch.tensor(scale)
        for part in split(whole_batch(), [8, 4]):
            step.add(part)
        outcome = step.finish(learning_rate=0.1)
        results.append([outcome.grad_norm, *[p.detach() for p in net.parameters()]])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_bad", [True, False])
def test_bad_gradient_with_finite_loss_is_undone(is_bad: bool) -> None:
    net, loss = fresh(frozen_norm=False)
    step, before = sgd_step(net, loss), tensors(net)
    if is_bad:
        net.last.weight.register_hook(lambda gradient: gradient * float("inf"))
    step.add(whole_batch())
    outcome = step.finish(learning_rate=0.1)
    assert bool(outcome.is_bad) is is_bad and not outcome.loss_is_bad
    assert all(torch.equal(before[key], value) for key, value in tensors(net).items()) is is_bad
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_skipped_first_step_on_the_device_leaves_no_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's fused SGD makes its momentum from raw memory in the first step and leaves it raw if it skips."""
    raw = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: raw(*args, **options).fill_(float("nan")))
    results = []
    for skips in (True, False):
        net, loss = fresh()
        options = optimizer_options(name, learning_rate=0.1, fused="on", weight_decay=0.1)
        step = make_step(net, loss, create_optimizer(options, [net, loss], CPU))
        step._skips_on_device = True
        batches = [FakeLoader(poisoned=frozenset({0} if skips else ())).batch(number) for number in range(3)]
        for batch in batches if skips else batches[1:]:
            step.add(batch)
            step.finish(learning_rate=0.1)
        results.append([parameter.detach() for parameter in [*net.parameters(), *loss.parameters()]])
    for one, other in zip(*results, strict=True):
        assert torch.isfinite(one).all() and torch.equal(one, other)


@pytest.mark.parametrize("is_bad", [True, False])
def test_statistics_are_put_back_after_a_bad_step(is_bad: bool) -> None:
    """Without asking the device which: all tensors of a type at once, NaN among them."""
    net = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(2))
    guard = BufferGuard([net])
    guard.remember()
    before = tensors(net)
    for norm in net:
        norm.running_mean.fill_(float("nan"))
        norm.num_batches_tracked += 1
    moved = tensors(net)
    guard.restore_where(torch.tensor(is_bad))
    for key, value in net.state_dict().items():
        torch.testing.assert_close(value, (before if is_bad else moved)[key], equal_nan=True, atol=0, rtol=0)
