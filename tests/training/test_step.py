"""One optimizer step and its schedules, against loops and hand-worked numbers."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from speakernet.training.optimizers import (
    WeightAverage,
    create_optimizer,
    parameter_groups,
    should_fuse,
)
from speakernet.training.options import (
    AdamOptions,
    RuntimeOptions,
    SgdOptions,
    TrainingOptions,
    schedules,
)
from speakernet.training.precision import Precision, choose_precision
from speakernet.training.schedules import (
    SHOWN_STEPS,
    LearningRateSchedule,
    MarginSchedule,
    Schedules,
    scheduled_epochs,
)
from tests.training.training_fakes import (
    CPU,
    SAMPLES,
    FakeBatch,
    FakeLoader,
    FakeLoss,
    FakeMetricLoss,
    FakeNet,
    assert_equal,
    make_step,
    optimizer_options,
    tensors,
)


def sgd_step(net, loss, **options):
    """Of a metric loss over two utterances of each speaker; `options` are those of training."""
    optimizer = create_optimizer(
        SgdOptions(learning_rate=1.0, momentum=0.0, nesterov=False), [net, loss], CPU
    )
    count = 2 if loss.is_metric else 1
    return make_step(net, loss, optimizer, options=TrainingOptions(**options), per_speaker=count)


def fresh(metric=False, frozen_norm=True, dropout=0.0):
    torch.manual_seed(1)
    net = FakeNet(dropout=dropout, frozen_norm=frozen_norm)
    return net.train(), FakeMetricLoss() if metric else FakeLoss()


def split(batch, sizes):
    parts = zip(
        batch.waveforms.split(sizes),
        batch.labels.split(sizes),
        batch.indices.split(sizes),
        strict=True,
    )
    return [FakeBatch(*part) for part in parts]


def whole_batch():
    return FakeLoader(num_batches=2, batch_size=12).batch(0)


def metric_batch():
    """Two utterances of each of six speakers."""
    generator = torch.Generator().manual_seed(3)
    return FakeBatch(
        torch.randn(12, SAMPLES, generator=generator),
        torch.arange(6).repeat_interleave(2),
        torch.arange(12),
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
def test_micro_batches(sizes, is_metric, clip):
    """Equal to one batch for any sizes (frozen batch norm); the gradient cache keeps all negatives
    of a metric loss.
    """
    batch = metric_batch() if is_metric else whole_batch()
    net, loss = fresh(is_metric)
    parameters = [*net.parameters(), *loss.parameters()]
    before = [p.detach().clone() for p in parameters]
    embeddings = net(batch.waveforms)
    inputs = (
        (embeddings.reshape(6, 2, -1), batch.labels[::2])
        if is_metric
        else (embeddings, batch.labels)
    )
    value, _ = loss(*inputs)
    gradients = torch.autograd.grad(value, parameters, allow_unused=True)
    norm = torch.stack([g.square().sum() for g in gradients if g is not None]).sum().sqrt()
    step = sgd_step(net, loss, max_grad_norm=clip, accumulation_steps=len(sizes))
    for part in split(batch, sizes):
        step.add(part)
    outcome = step.finish(learning_rate=0.1)
    assert outcome.loss.item() == pytest.approx(value.item(), rel=1e-5)
    assert outcome.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
    rate = 0.1 * clip / norm if clip else 0.1
    for old, gradient, new in zip(before, gradients, parameters, strict=True):
        expected = old if gradient is None else old - rate * gradient
        assert_close(new.detach(), expected, rtol=1e-5, atol=1e-6)


def test_seconds(monkeypatch):
    """A loader without workers decodes in this thread; that time counts as data only."""
    clock = [0.0]
    ticking = SimpleNamespace(thread_time=lambda: clock[0], perf_counter=lambda: clock[0])
    monkeypatch.setattr("speakernet.training.step.time", ticking)
    net, loss = fresh()
    net.register_forward_pre_hook(lambda *given: clock.append(clock.pop() + 1))

    def batches():
        for part in split(whole_batch(), [8, 4]):
            clock[0] += 5
            yield part

    step = sgd_step(net, loss)
    step.threads = SimpleNamespace(most=2, step=lambda *given, **others: watched.append(given))
    watched = []
    outcome = step.run(batches(), 2, "step 1", 0.1)
    assert outcome.seconds == {"data": 10, "forward_backward": 2, "optimizer": 0}
    assert watched == [(2, 2, 12)] and outcome.num_utterances == 12


def test_gradient_cache():
    parts = split(metric_batch(), [4, 4, 4])
    net, loss = fresh(metric=True, frozen_norm=False, dropout=0.5)
    twin, _ = fresh(metric=True, frozen_norm=False, dropout=0.5)
    torch.manual_seed(7)
    for part in parts:
        twin(part.waveforms)
    drawn_after = torch.rand(1)
    torch.manual_seed(7)
    step = sgd_step(net, loss, accumulation_steps=3)
    for part in parts:
        step.add(part)
    step.finish(learning_rate=0.0)
    assert_close(net.norm.running_mean, twin.norm.running_mean)
    assert net.norm.num_batches_tracked.item() == 3 and torch.equal(torch.rand(1), drawn_after)


def test_loss_scale():
    """fp16's scaling (here with float32 arithmetic) changes neither the update nor the reported
    norm.
    """
    results = []
    for scale in (1.0, 1024.0):
        net, loss = fresh()
        step = sgd_step(net, loss, max_grad_norm=0.5)
        step.precision.scales = scale != 1.0
        step.precision.scale = torch.tensor(scale)
        for part in split(whole_batch(), [8, 4]):
            step.add(part)
        outcome = step.finish(learning_rate=0.1)
        results.append([outcome.grad_norm, *[p.detach() for p in net.parameters()]])
    assert_close(*results, rtol=1e-5, atol=1e-6)


def test_bad_gradient():
    net, loss = fresh(frozen_norm=False)
    step = sgd_step(net, loss)
    before = tensors(net)
    net.last.weight.register_hook(lambda gradient: gradient * float("inf"))
    step.add(whole_batch())
    results = step.finish(learning_rate=0.1)
    assert results.is_bad and not results.loss_is_bad
    assert_equal(before.values(), tensors(net).values())
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_skipped_first_step(name, monkeypatch):
    """A GPU's fused SGD allocates its momentum in the first step and leaves it uninitialised if it
    skips the step.
    """
    raw = torch.empty_like
    monkeypatch.setattr(
        torch, "empty_like", lambda *args, **options: raw(*args, **options).fill_(float("nan"))
    )
    results = []
    for skips in (True, False):
        net, loss = fresh()
        options = optimizer_options(name, learning_rate=0.1, fused="on", weight_decay=0.1)
        step = make_step(net, loss, create_optimizer(options, [net, loss], CPU))
        step._skips_on_device = True
        batches = [
            FakeLoader(poisoned=frozenset({0} if skips else ())).batch(number)
            for number in range(3)
        ]
        for batch in batches if skips else batches[1:]:
            step.add(batch)
            step.finish(learning_rate=0.1)
        results.append(
            [parameter.detach() for parameter in [*net.parameters(), *loss.parameters()]]
        )
    assert all(torch.isfinite(weights).all() for weights in results[0])
    assert_equal(*results)


def test_weight_decay():
    net = FakeNet()
    decaying, plain = parameter_groups([net, net], weight_decay=0.1)
    assert [tuple(p.shape) for p in decaying["params"]] == [(16, 12), (8, 16)]
    assert len(plain["params"]) == 4 and plain["weight_decay"] == 0.0
    (only,) = parameter_groups([net], weight_decay=0.1, decay_all=True)
    assert len(only["params"]) == 6
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="every weight"):
        create_optimizer(AdamOptions(learning_rate=1.0), [net], CPU)


CUDA = torch.device("cuda")


def test_refused_by_the_machine():
    with pytest.raises(ValueError, match="no fused nadam"):
        should_fuse(optimizer_options("nadam", fused="on"), CPU)
    with pytest.raises(ValueError, match="fp16"):
        choose_precision("fp16", CPU, flags=frozenset({"avx2"}))
    with pytest.raises(ValueError, match=r"7\.5"):
        choose_precision("bf16", CUDA, capability=(7, 5))


@pytest.mark.parametrize(
    ("requested", "device", "flags", "capability", "expected"),
    [
        ("auto", CPU, {"avx512_bf16"}, None, "bf16"),
        ("auto", CPU, {"avx2"}, None, "no"),
        ("bf16", CPU, {"avx2"}, None, "bf16"),
        ("fp16", CPU, {"avx512_fp16"}, None, "fp16"),
        ("auto", CUDA, set(), (8, 0), "bf16"),
        ("auto", CUDA, set(), (7, 5), "fp16"),
        ("auto", CUDA, set(), (5, 0), "no"),
    ],
)
def test_choice(requested, device, flags, capability, expected):
    choice = choose_precision(requested, device, flags=frozenset(flags), capability=capability)
    assert choice.value == expected
    assert choice.reason


def test_scale_against_torch():
    """The same overflows give the same scale after every step."""
    ours = Precision(RuntimeOptions(loss_scale=256.0, loss_scale_growth_interval=3), "fp16", CPU)
    theirs = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for digit in "0001011000000":
        is_bad = digit == "1"
        scaled = theirs.scale(weight.sum())
        weight.grad = torch.full_like(weight, float("inf") if is_bad else float(scaled.detach()))
        theirs.step(optimizer)
        theirs.update()
        ours.update(torch.tensor(is_bad))
        assert float(ours.scale) == theirs.get_scale()


def test_scale_in_a_checkpoint():
    options = RuntimeOptions(loss_scale=8.0, loss_scale_growth_interval=2)
    saved = Precision(options, "fp16", CPU)
    saved.update(torch.tensor(False))
    other = Precision(RuntimeOptions(loss_scale_growth_interval=2), "fp16", CPU)
    other.load_state_dict(saved.state_dict())
    other.update(torch.tensor(False))
    assert float(other.scale) == 16.0


def rates(name, steps, **options):
    """The rates of 40 epochs of 10 steps, from a top of 1 down to 0 by default."""
    owner = schedules.SCHEDULES[name].options
    floor = {"final_learning_rate": 0.0} if issubclass(owner, schedules.FloorOptions) else {}
    schedule = LearningRateSchedule(
        owner(**{"name": name, **floor, **options}), 1.0, steps_per_epoch=10, num_epochs=40
    )
    return [schedule(step) for step in steps]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("constant", {}, [1.0, 1.0, 1.0, 1.0]),
        # one epoch of warm-up
        ("constant_with_warmup", {}, [1e-3, 1.0, 1.0, 1.0]),
        # epochs 0, 10, 20, 40
        ("step", {"decay": 0.5, "decay_interval": 10}, [1.0, 0.5, 0.25, 0.0625]),
        ("exponential", {"decay": 0.25, "decay_interval": 20}, [1.0, 0.5, 0.25, 0.0625]),
        ("exponential", {"final_learning_rate": 0.0001}, [1.0, 0.1, 0.01, 0.0001]),
        ("linear", {"final_learning_rate": 0.2}, [1.0, 0.8, 0.6, 0.2]),
        ("cosine", {}, [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, 0.0]),
        ("polynomial", {"power": 2.0}, [1.0, 0.5625, 0.25, 0.0]),
        # cycles of 10, 20, 40 epochs begin at 0, 10, 30; epoch 20 is half of the second, 40 a
        # quarter of the third
        ("cosine_restarts", {}, [1.0, 1.0, 0.5, (1 + math.sqrt(0.5)) / 2]),
        # top after 20 of 40 epochs
        ("one_cycle", {"peak_share": 0.5}, [0.04, 0.52, 1.0, 0.0]),
        ("plateau", {}, [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_shapes(name, options, expected):
    assert rates(name, [0, 100, 200, 400], **options) == pytest.approx(expected)


def test_warm_up():
    assert rates("linear", [0, 10, 20, 40], warmup_epochs=4.0) == pytest.approx(
        [1e-3, 0.25, 0.5, 1.0]
    )


def test_overlapping_warm_up():
    options = {"final_learning_rate": 1e-4, "warmup_epochs": 20, "warmup_overlaps": True}
    expected = [1e-3, 0.5 * 0.1, 0.01, 1e-4]
    assert rates("exponential", [0, 100, 200, 400], **options) == pytest.approx(expected)


def test_plateau():
    def make():
        options = schedules.PlateauOptions(final_learning_rate=0.2, decay=0.5, plateau_patience=2)
        return LearningRateSchedule(options, 1.0, steps_per_epoch=10, num_epochs=40)

    schedule = make()
    seen = []
    for eer in [9.0, 8.0, 8.5, 8.2, 8.1, 8.0, 7.0, 7.5, 7.5]:
        schedule.observed_eers.append(eer)
        seen.append(schedule(5))
    assert seen == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.2]
    again = make()
    again.load_state_dict(schedule.state_dict())
    assert again(5) == 0.2


def test_margin_ramps():
    ramp = schedules.ScheduleOptions(
        margin="linear", margin_initial=0.1, margin_begin_epoch=2, margin_end_epoch=4
    )
    linear = MarginSchedule(ramp, 0.2, steps_per_epoch=10)
    assert [linear(step) for step in (0, 20, 30, 40, 400)] == pytest.approx(
        [0.1, 0.1, 0.15, 0.2, 0.2]
    )
    steep = MarginSchedule(
        schedules.ScheduleOptions(margin="exponential", margin_end_epoch=2), 0.3, steps_per_epoch=10
    )
    # Half-way: 1 - 0.001 ** 0.5 = 0.968377 of 0.999.
    assert [steep(step) for step in (0, 10, 20)] == pytest.approx(
        [0.0, 0.3 * 0.968377 / 0.999, 0.3], rel=1e-5
    )
    assert MarginSchedule(schedules.ScheduleOptions(), 0.2, steps_per_epoch=10)(7) == 0.2


def test_shown_rates_of_a_step_schedule():
    """Rates of the first and the last step: the fall ten epochs after the warm-up belongs to the
    thirteenth epoch.
    """
    options = schedules.StepOptions(name="step", decay=0.5, decay_interval=10, warmup_epochs=2)

    def shown(num_epochs):
        rate = LearningRateSchedule(
            options, 0.1, steps_per_epoch=SHOWN_STEPS, num_epochs=num_epochs
        )
        return {row.epoch: row.learning_rates for row in scheduled_epochs({"": Schedules(rate)})}

    rates = shown(12)
    assert rates[1] == pytest.approx((1e-4, 0.05), rel=1e-3)
    assert rates[2] == pytest.approx((0.05, 0.1), rel=1e-3)
    assert rates[12] == (0.1, 0.1)
    assert shown(13)[13] == (0.05, 0.05)


@pytest.mark.parametrize("decay", [0.0, 0.8])
def test_share_of_initial_weights(decay):
    net = nn.Linear(2, 2)
    first = net.weight.detach().clone()
    average = WeightAverage(net, decay, initial_share=0.25)
    plain = WeightAverage(net, decay or 1e-9)
    for step in range(5):
        net.weight.data.fill_(float(step))
        average.update()
        plain.update()
    with plain.apply():
        expected = 0.25 * first + 0.75 * net.weight.detach()
    # Resumed with other weights in the network, the initial weights are still those of the run.
    again = WeightAverage(nn.Linear(2, 2), decay, initial_share=0.25)
    again.load_state_dict(average.state_dict())
    for kept in (average, again):
        for _ in range(2):
            with kept.apply():
                assert_close(kept._live[0].detach(), expected)
    assert torch.equal(net.weight.detach(), torch.full((2, 2), 4.0))
    with pytest.raises(ValueError, match=r"training\.initial_weight"):
        again.load_state_dict(plain.state_dict())
