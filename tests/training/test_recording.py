"""A recorded step does what an ordinary one does: traced on a CPU, its trace replayed over the same
tensors; on a GPU, if there is one.
"""

import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from speakernet.losses.options import LOSSES
from speakernet.models.speaker_net import SpeakerNet
from speakernet.options import create
from speakernet.training.optimizers import WeightAverage, create_optimizer
from speakernet.training.options import OPTIMIZERS, RuntimeOptions, TrainingOptions
from speakernet.training.precision import Precision
from speakernet.training.recording import (
    CudaCapture,
    HostValues,
    StepRecorder,
    why_not_recorded,
)
from speakernet.training.step import Results
from speakernet.training.stopping import Interrupted
from tests.training import training_fakes as fakes

SAMPLES = 4800
CLASSES = 5
STEPS = 10


def batch_of(number, size=4, device=fakes.CPU, *, is_bad=False):
    generator = torch.Generator().manual_seed(number)
    waveforms = 0.1 * torch.randn(size, SAMPLES, generator=generator)
    if is_bad:
        waveforms[0, 0] = math.nan
    labels = torch.randint(CLASSES, (size,), generator=generator)
    rows = torch.randint(1000, (size,), generator=generator)
    return fakes.FakeBatch(waveforms.to(device), labels.to(device), rows, draw_key=number // 4)


def step_of(device=fakes.CPU, loss="aamsoftmax", optimizer="adamw", precision="no", **training):
    """A step of a small network with dither, masks and dropout-free batch norms."""
    torch.manual_seed(1)
    net = SpeakerNet.named(
        "ResNet",
        embedding_dim=8,
        model_options={"channels": 8, "blocks": [1, 1], "stem_stride": 4},
        front_end="fbank",
        front_end_options={"num_mels": 16, "dither": 1.0, "spec_augment": True},
    ).to(device)
    head = create(
        LOSSES[loss], LOSSES[loss].options(name=loss), embedding_dim=8, num_classes=CLASSES, seed=5
    ).to(device)
    options = OPTIMIZERS[optimizer].options(
        name=optimizer, weight_decay=0.01, network_learning_rate_factor=0.5
    )
    return fakes.make_step(
        net.train(),
        head.train(),
        create_optimizer(options, [net, head], device),
        options=TrainingOptions(**training),
        precision=Precision(RuntimeOptions(loss_scale=64.0), precision, device),
    )


def state_of(step):
    """Every tensor that a step changes."""
    moments = [
        value
        for state in step.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    modules = [*step.net.state_dict().values(), *step.loss.state_dict().values()]
    tensors = [value for value in modules if isinstance(value, torch.Tensor)]
    return [*tensors, *moments, step.precision.scale, step.precision._good_steps]


class Tracer:
    """Records a step as torch's own trace. Tracing also computes, which is undone."""

    def __init__(self, step):
        self.step = step
        self.operations = []

    def __call__(self, body):
        tensors = state_of(self.step)
        before = [tensor.clone() for tensor in tensors]
        random = torch.get_rng_state()
        graph = make_fx(lambda: tuple(body()))()
        self.operations.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        with torch.no_grad():
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)
        torch.set_rng_state(random)
        results = Results(*(torch.zeros(()) for _ in Results._fields))

        def replay():
            with torch.no_grad():
                for static, value in zip(results, graph(), strict=True):
                    static.copy_(value)

        return replay, results


def taken(step, capture, batches, average=None, first=0):
    """Losses, norms and flags of steps whose rate and margin change."""
    step.record(StepRecorder(step, capture))
    rows = []
    torch.manual_seed(9)
    for number, batch in enumerate(batches, start=first):
        if step.loss.margin is not None:
            step.loss.set_margin(0.02 * number)
        outcome = step.run(iter([batch]), 1, "a step", 1e-3 * (1 + math.sin(number)))
        if average is not None:
            average.update()
        loss, accuracy, norm, is_bad, _ = map(float, outcome.results)
        rows.append([loss, accuracy, norm, bool(is_bad), outcome.num_utterances])
    return rows


def assert_equal(rows, others, step, other):
    np.testing.assert_array_equal(np.array(rows), np.array(others))
    fakes.assert_equal(state_of(step), state_of(other))


CASES = {
    "AAM-softmax with AdamW": {},
    "clipped": {"max_grad_norm": 0.1},
    "SGD": {"optimizer": "sgd"},
    "SphereFace2": {"loss": "sphereface2"},
    "softmax without margin": {"loss": "softmax"},
    "bfloat16": {"precision": "bf16"},
}


@pytest.mark.parametrize("case", CASES)
def test_replayed_steps(case):
    """Ten steps with changing batches, draws, rates and margins, one of them bad; equal bit for bit
    in results, weights, statistics, moments and the moving average.
    """
    batches = [batch_of(number, is_bad=number == 6) for number in range(STEPS)]
    step = step_of(**CASES[case])
    average = WeightAverage(step.net, 0.9)
    tracer = Tracer(step)
    rows = taken(step, tracer, batches, average)
    other = step_of(**CASES[case])
    expected_average = WeightAverage(other.net, 0.9)
    expected = taken(other, None, batches, expected_average)
    assert len(tracer.operations) == 1 and tracer.operations[0] > 200
    assert [row[3] for row in expected] == [number == 6 for number in range(STEPS)]
    assert_equal(rows, expected, step, other)
    fakes.assert_equal(average._kept, expected_average._kept)


def test_ordinary_steps():
    """Against steps without a recorder, which pass rates as Python numbers: equal but for their
    rounding to float32.
    """
    batches = [batch_of(number) for number in range(STEPS)]
    step = step_of()
    rows = taken(step, Tracer(step), batches)
    other = step_of()
    losses = []
    for number, batch in enumerate(batches):
        other.loss.set_margin(0.02 * number)
        outcome = other.run(iter([batch]), 1, "a step", 1e-3 * (1 + math.sin(number)))
        losses.append(float(outcome.results.loss))
    np.testing.assert_allclose([row[0] for row in rows], losses, rtol=1e-4)


@pytest.mark.slow
def test_forms():
    """Another batch size, crop length or set of trained parameters is recorded anew, up to a
    few.
    """
    sizes = [4, 4, 4, 4, 3, 4, 3, 3, 3, 4]
    batches = [batch_of(number, size) for number, size in enumerate(sizes)]
    step = step_of()
    tracer = Tracer(step)
    other = step_of()
    rows = taken(step, tracer, batches)
    assert_equal(rows, taken(other, None, batches), step, other)
    assert len(tracer.operations) == 2 and [row[4] for row in rows] == sizes
    more = [batch_of(20 + number, 2 + number // 4) for number in range(24)]
    assert_equal(taken(step, tracer, more), taken(other, None, more), step, other)


@pytest.mark.slow
def test_frozen_parts():
    step = step_of()
    tracer = Tracer(step)
    other = step_of()
    batches = [batch_of(number) for number in range(5)]
    for each, capture in ((step, tracer), (other, None)):
        each.rows = []
        for is_frozen in (False, True, False):
            for parameter in each.net.parameters():
                parameter.requires_grad_(not is_frozen)
            each.rows += taken(each, capture, batches)
    assert_equal(step.rows, other.rows, step, other)
    assert len(tracer.operations) == 3


def test_trainer(tmp_path):
    """The trainer knows nothing of it: dropout, schedules, shorter last batches, a bad step, the
    moving average, and Ctrl-C in the middle of an epoch.
    """

    def trainer_of(folder, is_recorded, stop_at=-1):
        loader = fakes.FakeLoader(poisoned=frozenset({5}), stop_at=stop_at)
        trainer = fakes.make_trainer(tmp_path / folder, loader=loader, ema_decay=0.9)
        tracer = Tracer(trainer.step) if is_recorded else None
        trainer.step.record(StepRecorder(trainer.step, tracer))
        return trainer

    ordinary = trainer_of("ordinary", is_recorded=False)
    ordinary.train()
    assert ordinary.state.bad_steps == 1
    recorded = trainer_of("recorded", is_recorded=True)
    recorded.train()
    fakes.assert_same_bits(recorded, ordinary)
    with pytest.raises(Interrupted):
        trainer_of("resumed", is_recorded=True, stop_at=12).train()
    # It stops after that step, which was a replay, not at the end of the epoch.
    assert fakes.step_of(tmp_path / "resumed")["step"] == 13
    resumed = trainer_of("resumed", is_recorded=True)
    resumed.train()
    fakes.assert_same_bits(resumed, ordinary)


@pytest.mark.parametrize(
    ("options", "accumulation", "reason"),
    [
        ({}, 1, ""),
        ({}, 2, "accumulates"),
        ({"compile_mode": "reduce-overhead"}, 1, "reduce-overhead"),
        ({"gradient_checkpointing": True}, 1, "checkpointed"),
    ],
)
def test_reasons_of_options(options, accumulation, reason):
    step = step_of()
    assert "CUDA" in why_not_recorded(step, RuntimeOptions(), 1)
    step.precision.device = torch.device("cuda")
    found = why_not_recorded(step, RuntimeOptions(**options), accumulation)
    assert reason in found and bool(reason) == bool(found)


def test_reasons_of_a_step():
    step = step_of()
    step.precision.device = torch.device("cuda")
    step.net.trunk.is_pretrained = True
    assert "host" in why_not_recorded(step, RuntimeOptions(), 1)
    step.exchange = SimpleNamespace(is_alone=False)
    assert "processes" in why_not_recorded(step, RuntimeOptions(), 1)
    step = step_of()
    step.precision.device = torch.device("cuda")
    step.optimizer = SimpleNamespace()
    step.is_fused = False
    assert "fused" in why_not_recorded(step, RuntimeOptions(), 1)


def test_failed_recording(caplog):
    """A step that cannot be recorded runs as an ordinary one."""
    batches = [batch_of(number) for number in range(6)]
    step = step_of()
    tracer = Tracer(step)

    def refuse(body):
        tracer(body)  # which undoes what it computes
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    other = step_of()
    with caplog.at_level(logging.WARNING):
        rows = taken(step, refuse, batches)
    assert_equal(rows, taken(other, None, batches), step, other)
    assert "operation not permitted when stream is capturing" in caplog.text


def test_values_from_the_host():
    """Found on the `meta` device, which has no values but tells devices apart."""
    with HostValues(torch.device("meta")) as host:
        there = torch.zeros(3, device="meta") * 2.0
        assert not host.operations
        there += torch.ones(3).to("meta")
    assert len(host.operations) == 1


needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="CUDA graphs need a GPU; none was found"
)


@needs_gpu
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_recorded_on_a_gpu(precision):
    """Fifty steps with a bad one in the middle, bit for bit (deterministic kernels)."""
    torch.use_deterministic_algorithms(True)
    try:
        device = torch.device("cuda")
        batches = [batch_of(number, 8, device, is_bad=number == 25) for number in range(50)]
        step = step_of(device, precision=precision)
        rows = taken(step, CudaCapture(), batches)
        assert step._recorder._capture is not None, "the step was recorded"
        other = step_of(device, precision=precision)
        assert_equal(rows, taken(other, None, batches), step, other)
    finally:
        torch.use_deterministic_algorithms(False)
