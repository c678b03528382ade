"""A tiny network, loss and loader for tests of the trainer, with everything real ones have."""

import dataclasses
import math
import os
import signal
from typing import ClassVar

import pytest
import torch
from torch import nn

from speakernet.checkpoint import read_own_checkpoint
from speakernet.models.layers import Trunk
from speakernet.training.checkpoints import CheckpointStore
from speakernet.training.compiling import Compiler
from speakernet.training.optimizers import create_optimizer
from speakernet.training.options import (
    OPTIMIZERS,
    RuntimeOptions,
    TrainingOptions,
)
from speakernet.training.options.schedules import FloorOptions
from speakernet.training.precision import Precision
from speakernet.training.progress import Progress
from speakernet.training.schedules import LearningRateSchedule, MarginSchedule, Schedules
from speakernet.training.state import WHOLE_RUN
from speakernet.training.step import StepTools, TrainingStep
from speakernet.training.stopping import Interrupted
from speakernet.training.trainer import RunOutput, Trainer

SAMPLES = 12
CLASSES = 4
CPU = torch.device("cpu")


class FakeNet(nn.Module):
    """Batch norm (statistics), dropout (global randomness) and two layers."""

    def __init__(self, dropout=0.2, frozen_norm=False):
        super().__init__()
        self.trunk = Trunk()
        self.first = nn.Linear(SAMPLES, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(16, 8)
        self.frozen_norm = frozen_norm

    def train(self, mode=True):
        super().train(mode)
        if self.frozen_norm:
            self.norm.eval()
        return self

    def forward(self, waveforms):
        return self.last(self.dropout(torch.relu(self.norm(self.first(waveforms)))))


class FakeLoss(nn.Module):
    """Softmax with a margin that is subtracted from the target's logit."""

    is_metric = False
    sees_all_ranks = False

    def __init__(self, margin=0.2):
        super().__init__()
        self.head = nn.Linear(8, CLASSES)
        self.margin = margin

    def set_margin(self, margin):
        self.margin = margin

    def forward(self, embeddings, labels):
        logits = self.head(embeddings.float())
        logits = logits - self.margin * (labels[:, None] == torch.arange(CLASSES)).float()
        accuracy = 100.0 * (logits.argmax(1) == labels).float().mean()
        return nn.functional.cross_entropy(logits, labels), accuracy


class FakeMetricLoss(nn.Module):
    """Prototypes against the first utterance of each speaker; all other speakers of the batch are
    negatives.
    """

    is_metric = True
    sees_all_ranks = True
    margin = None

    def forward(self, embeddings, labels):
        # (speakers, utterances, dim)
        scores = embeddings[:, 0].float() @ embeddings[:, 1:].float().mean(1).T
        target = torch.arange(len(scores))
        return nn.functional.cross_entropy(scores, target), 100.0 * (
            scores.argmax(1) == target
        ).float().mean()


@dataclasses.dataclass
class FakeBatch:
    waveforms: torch.Tensor
    labels: torch.Tensor
    indices: torch.Tensor
    draw_key: int = 0

    @property
    def draw_rows(self):
        """The rows: no utterance is repeated."""
        return self.indices.numpy()

    @property
    def rank_sizes(self):
        """The whole batch is one process's."""
        return (len(self.labels),)


@dataclasses.dataclass(eq=False)
class FakeLoader:
    """Batches keyed by (epoch, position); `poisoned` ones have a NaN; at batch `stop_at` the
    process gets Ctrl-C.
    """

    num_batches: int = 7
    batch_size: int = 6
    last_size: int = 3
    poisoned: frozenset = frozenset()
    stop_at: int = -1
    epoch: int = 0
    position: int = 0
    utterances_per_speaker: ClassVar = 1

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.position = 0

    def __len__(self):
        return self.num_batches

    def __iter__(self):
        while self.position < self.num_batches:
            self.position += 1
            yield self.batch(self.position - 1)

    def batch(self, position):
        generator = torch.Generator().manual_seed(1000 * self.epoch + position)
        size = self.last_size if position == self.num_batches - 1 else self.batch_size
        labels = torch.randint(CLASSES, (size,), generator=generator)
        waveforms = torch.randn(size, SAMPLES, generator=generator) + labels[:, None]
        number = self.epoch * self.num_batches + position
        if number in self.poisoned:
            waveforms[0, 0] = math.nan
        if number == self.stop_at:
            os.kill(os.getpid(), signal.SIGINT)
        return FakeBatch(waveforms, labels, torch.arange(size) + 100 * number)

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]
        self.position = state["position"]

    def file_names(self, indices):
        return [f"utterance{int(index)}.wav" for index in indices]

    def epoch_report(self):
        return {"skipped_files": 0}


def optimizer_options(name, **options):
    return OPTIMIZERS[name].options(name=name, **options)


def make_trainer(
    folder,
    *,
    loader=None,
    eers=None,
    validate=None,
    optimizer="adam",
    dropout=0.2,
    seed=0,
    compiles=None,
    scheduled_epochs=None,
    network_learning_rate_factor=1.0,
    stage=WHOLE_RUN,
    **options,
):
    """A trainer on the fakes; evaluations return the `eers` in turn; schedules cover
    `scheduled_epochs`.
    """
    torch.manual_seed(seed)
    net = FakeNet(dropout)
    loss = FakeLoss()
    loader = loader or FakeLoader()
    rates = {
        "learning_rate": 0.01,
        "network_learning_rate_factor": network_learning_rate_factor,
        "weight_decay": 1e-4,
    }
    moves = create_optimizer(optimizer_options(optimizer, **rates), [net, loss], CPU)
    numbers = list(eers or [50.0])

    def eer_in_turn():
        # Random numbers drawn by an evaluation must not change training.
        torch.rand(3)
        return {"eer_percent": numbers.pop(0) if len(numbers) > 1 else numbers[0]}

    usual = {"max_epochs": 3, "test_interval": 1, "log_interval": 2, "save_minutes": 0.0}
    settings = TrainingOptions(**{**usual, **options})
    steps = -(-len(loader) // settings.accumulation_steps)
    epochs = scheduled_epochs or settings.max_epochs
    schedule = FloorOptions(
        final_learning_rate=0.0, warmup_epochs=0.5, margin="linear", margin_end_epoch=2.0
    )
    schedules = Schedules(
        LearningRateSchedule(schedule, 0.01, steps_per_epoch=steps, num_epochs=epochs),
        MarginSchedule(schedule, 0.2, steps_per_epoch=steps),
    )

    def model_contents(training_summary, is_last):
        return {"weights": net.state_dict(), "training_summary": training_summary}

    return Trainer(
        make_step(net, loss, moves, Compiler(net, compiles), settings),
        loader,
        lambda epoch: (validate or eer_in_turn)(),
        schedules,
        settings,
        RunOutput(
            CheckpointStore(folder, settings),
            Progress(folder),
            model_contents,
            origin={},
        ),
        stage,
    )


def make_step(net, loss, optimizer, compiler=None, options=None, per_speaker=1, precision=None):
    return TrainingStep(
        net,
        loss,
        optimizer,
        precision or Precision(RuntimeOptions(), "no", CPU),
        options or TrainingOptions(),
        utterances_per_speaker=per_speaker,
        tools=StepTools(compiler=compiler),
    )


def trained(folder, **options):
    trainer = make_trainer(folder, **options)
    trainer.train()
    return trainer


def interrupted(folder, stop_at, loader=None, **options):
    """A run that got Ctrl-C at batch `stop_at`."""
    loader = loader or FakeLoader()
    loader.stop_at = stop_at
    with pytest.raises(Interrupted):
        make_trainer(folder, loader=loader, **options).train()


def step_of(folder):
    return read_own_checkpoint(folder / "last.pt")["training"]["state"]


def tensors(net):
    """Copies of a network's weights and statistics."""
    return {name: value.clone() for name, value in net.state_dict().items()}


def weights_of(trainer):
    """Everything that training changes."""
    return [*trainer.net.state_dict().values(), *trainer.loss.state_dict().values()]


def assert_equal(left, right):
    for first, second in zip(left, right, strict=True):
        assert torch.equal(first, second)


def assert_same_bits(left, right):
    """Network, head and optimizer of two trainers are equal to the last bit."""
    assert_equal(weights_of(left), weights_of(right))
    optimizers = left.step.optimizer.state.values(), right.step.optimizer.state.values()
    for first, second in zip(*optimizers, strict=True):
        for key in first:
            assert torch.equal(torch.as_tensor(first[key]), torch.as_tensor(second[key]))
