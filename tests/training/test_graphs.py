"""Recorded steps on a CPU: a tape that is as strict as a CUDA graph gives the bits of steps that are not recorded."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from speakernet.training.graphs import MOST_RECORDINGS, PLAIN_STEPS, WARMUP_STEPS, RecordedStep
from torch import nn
from training_fakes import (
    CLASSES,
    CPU,
    SAMPLES,
    FakeBatch,
    FakeLoader,
    FakeLoss,
    FakeNet,
    assert_same_bits,
    make_step,
    make_trainer,
    optimizer_options,
)

from benchmarks.families import SMALLEST
from speakernet.frontend.options import SpecAugmentOptions
from speakernet.frontend.perturbation import KeyedDraws, SpecAugment
from speakernet.losses.options import LOSSES
from speakernet.models.speaker_net import SpeakerNet
from speakernet.options import create
from speakernet.training import graphs
from speakernet.training.optimizers import create_optimizer
from speakernet.training.options import PrecisionOptions, TrainingOptions
from speakernet.training.precision import Precision
from speakernet.training.profiler import NoProfiler
from speakernet.training.step import TrainingStep
from tests.tape_recorder import TapeRecorder

BEFORE_RECORDING = PLAIN_STEPS + WARMUP_STEPS


@pytest.mark.parametrize(
    ("optimizer", "accumulation", "poisoned", "options"),
    [
        ("sgd", 1, {3, 9, 22}, {"network_learning_rate_factor": 0.5}),
        ("adamw", 1, {9}, {"ema_decay": 0.9, "max_grad_norm": 0.5, "precision": "bf16"}),
        ("adam", 3, {25, 41}, {"max_grad_norm": 0.0}),
    ],
)
def test_training_by_recorded_steps_has_the_same_bits(
    tmp_path: Path, optimizer: str, accumulation: int, poisoned: set[int], options: dict[str, Any]
) -> None:
    """With dropout, batch norm, schedules of learning rate and margin, bad steps before and after the recording."""
    recorder = TapeRecorder()
    trainers = []
    for name, one in (("plain", None), ("recorded", recorder)):
        loader = FakeLoader(num_batches=13 * accumulation, last_size=6, poisoned=frozenset(poisoned))
        settings = {"optimizer": optimizer, "accumulation_steps": accumulation, "log_interval": 1, **options}
        trainer = make_trainer(tmp_path / name, loader=loader, recorder=one, max_epochs=2, **settings)
        # A loss scale that moves, as in half precision.
        trainer.precision.scales, trainer.precision.growth_interval = True, 3
        trainer.train()
        trainers.append(trainer)
    plain, recorded = trainers
    assert_same_bits(plain, recorded)
    assert plain.state.bad_steps == recorded.state.bad_steps == len(poisoned)
    assert plain.state.epoch_means() == recorded.state.epoch_means()
    assert torch.equal(plain.precision.scale, recorded.precision.scale) and recorded.precision.scale > 1
    assert recorder.recordings == 1 and recorder.repeats == 2 * 13 - BEFORE_RECORDING
    # Whoever comes next finds a plain margin; what a checkpoint holds are plain rates.
    assert isinstance(recorded.loss.margin, float) and recorded.loss.margin == plain.loss.margin
    last = torch.load(recorded.store.last_path, weights_only=True)["training"]
    assert all(isinstance(group["lr"], float) for group in last["optimizer"]["param_groups"])


def test_a_run_that_goes_on_has_the_bits_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    def train(folder: Path, epochs: int) -> Any:
        recorder = TapeRecorder()
        loader = FakeLoader(num_batches=9, last_size=6)
        trainer = make_trainer(folder, loader=loader, recorder=recorder, max_epochs=epochs, scheduled_epochs=2)
        trainer.train()
        assert recorder.repeats
        return trainer

    straight = train(tmp_path / "straight", 2)
    train(tmp_path / "stopped", 1)
    assert_same_bits(straight, train(tmp_path / "stopped", 2))


def recorded_step(net: nn.Module, loss: nn.Module, recorder: TapeRecorder, optimizer: str = "sgd") -> RecordedStep:
    moves = create_optimizer(optimizer_options(optimizer, learning_rate=0.1), [net, loss], CPU)
    how = {"profiler": NoProfiler(), "utterances_per_speaker": 1, "gradient_cache": False}
    return RecordedStep(recorder, net, loss, moves, Precision(PrecisionOptions(), "no", CPU), TrainingOptions(), **how)


def run(step: TrainingStep, batches: list[Any]) -> float:
    step.set_margin(0.1)
    for number, batch in enumerate(batches):
        step.add(batch, is_last=number + 1 == len(batches))
    outcome = step.finish(0.1)
    assert torch.equal(outcome.indices, torch.cat([batch.indices for batch in batches]))
    return outcome.loss.item()


def test_other_shapes_are_recorded_too_and_other_modes_anew() -> None:
    torch.manual_seed(0)
    recorder, net = TapeRecorder(), FakeNet().train()
    step = recorded_step(net, FakeLoss().train(), recorder)
    batches = [FakeLoader().batch(position) for position in range(2)]
    for _ in range(BEFORE_RECORDING + 2):
        run(step, batches)
    # The last step of an epoch may have fewer batches: it begins like the others.
    before = recorder.repeats
    run(step, batches[:1])
    assert recorder.repeats == before
    for _ in range(BEFORE_RECORDING):
        run(step, batches[:1])
    assert recorder.recordings == 2
    # What is not finished leaves nothing behind, whether it ran or waited.
    weights = [one.clone() for one in net.parameters()]
    step.add(batches[0], is_last=False)
    step.forget()
    assert all(map(torch.equal, weights, net.parameters()))
    run(step, batches)
    net.norm.eval()
    for _ in range(BEFORE_RECORDING + 1):
        run(step, batches)
    assert recorder.recordings == 3
    for size in range(7, 7 + MOST_RECORDINGS):
        for _ in range(BEFORE_RECORDING + 1):
            run(step, [FakeLoader(batch_size=size).batch(0)])
    # Their memory is bounded: further shapes run as they are.
    assert recorder.recordings == 3 + MOST_RECORDINGS - 1


class AskingLoss(FakeLoss):
    """Reads its margin on the host, which no recording can hold."""

    def forward(self, embeddings: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept, self.margin = self.margin, float(self.margin)
        try:
            return super().forward(embeddings, labels)
        finally:
            self.margin = kept


def test_what_cannot_be_recorded_goes_on_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainers = []
    for name, recorder in (("plain", None), ("asking", TapeRecorder())):
        torch.manual_seed(1)
        trainers.append(make_trainer(tmp_path / name, loss=AskingLoss(), recorder=recorder, max_epochs=2,
                                     loader=FakeLoader(num_batches=8, last_size=6)))  # fmt: skip
        trainers[-1].train()
    assert_same_bits(*trainers)
    assert caplog.text.count("a step could not be recorded, going on without: ") == 1
    assert "operation not permitted while a step is recorded" in caplog.text


class DrawingNet(FakeNet):
    """With dither and masks, whose draws are keyed by utterance."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.noise = KeyedDraws(3)
        self.masks = SpecAugment(SpecAugmentOptions(spec_augment=True, mel_mask_width=3, frame_mask_width=2), seed=4)

    def forward(self, waveforms: torch.Tensor) -> torch.Tensor:
        noisy = waveforms + 0.1 * self.noise.normal_like(waveforms)
        return super().forward(self.masks(noisy.view(len(noisy), 4, 3)).flatten(1))


def test_dither_and_masks_of_a_recorded_step_are_those_of_its_utterances() -> None:
    losses = []
    for recorder in (None, TapeRecorder()):
        torch.manual_seed(0)
        net, loss = DrawingNet().train(), FakeLoss().train()
        step = recorded_step(net, loss, recorder or TapeRecorder())
        if recorder is None:
            step._is_given_up = True
        found = []
        for position in range(BEFORE_RECORDING + 3):
            batches = [FakeLoader(num_batches=99).batch(position + more) for more in range(2)]
            for batch in batches:
                batch.draw_key = position
            found.append(run(step, batches))
        losses.append((found, [one.clone() for one in net.parameters()]))
        assert recorder is None or recorder.repeats == 3
    assert losses[0][0] == losses[1][0] and all(map(torch.equal, losses[0][1], losses[1][1]))
    # The same utterances draw the same in a pass of its own.
    net.noise.key_draws(1, np.arange(2))
    assert net.noise.normal_like(torch.zeros(2, 5)).abs().sum() > 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("softmax", {}),
        ("amsoftmax", {}),
        ("aamsoftmax", {}),
        ("aamsoftmax", {"easy_margin": True, "sub_centers": 2, "inter_top_k": 2}),
        ("sphereface2", {"margin_type": "A"}),
        ("sphereface2", {"margin_type": "C"}),
        ("hamsoftmax", {}),
        ("angleproto", {}),
        ("ge2e", {}),
        ("softmaxproto", {}),
        ("combined", {}),
        ("supcon", {}),
    ],
)
def test_every_loss_reads_its_margin_where_it_lies(name: str, options: dict[str, Any]) -> None:
    """A margin that grows from step to step, by a number and by a tensor that is filled in."""
    found = []
    for is_recorded in (False, True):
        torch.manual_seed(0)
        chosen = LOSSES[name].options(**options)
        loss = create(LOSSES[name], chosen, embedding_dim=8, num_classes=CLASSES, seed=0).train()
        recorder, net = TapeRecorder(), nn.Linear(SAMPLES, 8)
        how = {"utterances_per_speaker": 2 if loss.is_metric else 1, "recorder": recorder if is_recorded else None}
        moves = create_optimizer(optimizer_options("sgd", learning_rate=0.1), [net, loss], CPU)
        step = make_step(net, loss, moves, Precision(PrecisionOptions(), "no", CPU), **how)
        for number in range(BEFORE_RECORDING + 4):
            batch = FakeLoader(num_batches=99).batch(number)
            batch.labels = torch.tensor([0, 0, 1, 1, 2, 2])
            if hasattr(loss, "margin"):
                step.set_margin(0.04 * number)
            step.add(batch)
            step.finish(0.1)
        assert recorder.repeats == (4 if is_recorded else 0)
        found.append([*net.parameters(), *loss.parameters()])
    for one, other in zip(*found, strict=True):
        # Cosine and sine of torch and of Python's library may round the last bit of 64 another way.
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_every_family_can_be_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "PLAIN_STEPS", 1)
    monkeypatch.setattr(graphs, "WARMUP_STEPS", 0)
    found = []
    for recorder in (None, TapeRecorder()):
        torch.manual_seed(0)
        net = SpeakerNet.named(name, embedding_dim=8).train()
        loss = create(LOSSES["aamsoftmax"], LOSSES["aamsoftmax"].options(), embedding_dim=8, num_classes=CLASSES)
        moves = create_optimizer(optimizer_options("sgd", learning_rate=0.01), [net, loss], CPU)
        step = make_step(net, loss, moves, Precision(PrecisionOptions(), "no", CPU), recorder=recorder)
        for number in range(3):
            waveforms = 0.1 * torch.randn(2, 12000, generator=torch.Generator().manual_seed(number))
            step.add(FakeBatch(waveforms, torch.arange(2), torch.arange(2) + number))
            step.finish(0.01)
        found.append([one.detach() for one in net.state_dict().values() if isinstance(one, torch.Tensor)])
        assert recorder is None or recorder.repeats == 2
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_an_optimizer_that_asks_the_host_is_refused() -> None:
    with pytest.raises(ValueError, match="recorded steps need a fused optimizer"):
        recorded_step(FakeNet(), FakeLoss(), TapeRecorder(), optimizer="radam")
