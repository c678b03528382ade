"""Weights that were given: frozen, then slower than the head; evaluated first, and best until beaten."""

from pathlib import Path

import pytest
import torch
from training_fakes import (
    CPU,
    FakeLoader,
    FakeLoss,
    FakeNet,
    assert_same_bits,
    interrupted,
    make_step,
    make_trainer,
    optimizer_options,
    records,
    tensors,
    trained,
)

from speakernet.checkpoint import read_own_checkpoint
from speakernet.training.optimizers import Freezing, create_optimizer
from speakernet.training.options import OPTIMIZERS, TrainingOptions
from speakernet.training.progress import Stage
from speakernet.training.trainer import Trainer

GIVEN = Stage(given={"file": "theirs.pt"})


class Watching(FakeLoader):
    """Notes the network's tensors at every batch."""

    def batch(self, position: int):
        self.seen.append(tensors(self.net))
        return super().batch(position)


def watched(folder: Path, **options) -> tuple[Trainer, list[dict[str, torch.Tensor]]]:
    """A run, and the network's tensors at every batch."""
    loader = Watching()
    trainer = make_trainer(folder, loader=loader, stage=GIVEN, **options)
    loader.net, loader.seen = trainer.net, []
    trainer.train()
    return trainer, loader.seen


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], wanted: str = "") -> bool:
    return all(torch.equal(one[name], other[name]) for name in one if wanted in name)


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_a_frozen_network_stays_to_the_last_bit_and_then_learns(tmp_path: Path, optimizer: str) -> None:
    trainer, seen = watched(tmp_path, optimizer=optimizer, freeze_epochs=2)
    # Weights and statistics, weight decay notwithstanding.
    assert all(same(seen[0], one) for one in seen[: 2 * 7 + 1])
    after = trainer.net.state_dict()
    assert not same(seen[14], after, "weight") and not same(seen[14], after, "running_mean")


def test_statistics_stay_where_they_are_to_stay(tmp_path: Path) -> None:
    trainer, seen = watched(tmp_path, freeze_epochs=1, freeze_norm_statistics=True, average_checkpoints=2)
    after = trainer.net.state_dict()
    assert same(seen[0], after, "running") and not same(seen[0], after, "norm.weight")
    # The average of the last epochs is not measured anew either.
    assert same(seen[0], read_own_checkpoint(trainer.store.average_path)["weights"], "running")


@pytest.mark.parametrize("stop_at", [0, 13, 14])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_stopped_and_resumed_equals_straight_across_the_thaw(tmp_path: Path, stop_at: int, optimizer: str) -> None:
    options = {"optimizer": optimizer, "freeze_epochs": 2, "network_learning_rate_factor": 0.1, "ema_decay": 0.9}
    straight = trained(tmp_path / "straight", eers=[1.0, 2.0], stage=GIVEN, **options)
    interrupted(tmp_path / "run", stop_at, eers=[1.0, 2.0], stage=GIVEN, **options)
    resumed = make_trainer(tmp_path / "run", eers=[2.0], stage=GIVEN, seed=99, **options)
    summary = resumed.train()
    assert_same_bits(straight, resumed)
    assert (summary["initial_eer_percent"], summary["best_eer_percent"], summary["best_epoch"]) == (1.0, 1.0, 0)


@pytest.mark.parametrize(("eers", "best"), [([1.0, 2.0], (1.0, 0)), ([3.0, 2.0], (2.0, 2))])
def test_given_weights_are_evaluated_first_and_stay_best_until_beaten(
    tmp_path: Path, eers: list[float], best: tuple[float, int]
) -> None:
    trainer = make_trainer(tmp_path, eers=eers, freeze_epochs=1, stage=GIVEN)
    before = tensors(trainer.net)
    summary = trainer.train()
    assert (summary["best_eer_percent"], summary["best_epoch"]) == best and summary["initial_eer_percent"] == eers[0]
    kept = read_own_checkpoint(tmp_path / "best.pt")
    assert same(before, kept["weights"]) == (best[1] == 0)
    assert kept["training_summary"]["initial_model"] == {"file": "theirs.pt"}
    # The epoch in which the network was frozen has nothing to evaluate.
    assert [row["epoch"] for row in records(tmp_path, "evaluation")] == [0, 2, 3]


def test_weights_that_never_learn_stay_so_when_the_rest_thaws() -> None:
    net = FakeNet()
    net.first.weight.requires_grad_(False)
    freezing = Freezing(net, TrainingOptions(freeze_epochs=1))
    freezing.begin_training(0)
    assert not any(parameter.requires_grad for parameter in net.parameters())
    assert net.training and not net.norm.training
    freezing.begin_training(1)
    assert not net.first.weight.requires_grad and net.last.weight.requires_grad and net.norm.training


def test_each_factor_has_groups_of_its_own_and_the_factor_one_none() -> None:
    net, loss = FakeNet(), FakeLoss()
    slow = create_optimizer(optimizer_options("adamw", network_learning_rate_factor=0.25), [net, loss], CPU)
    step = make_step(net, loss, slow)
    step.add(FakeLoader().batch(0))
    step.finish(0.1)
    rates = {id(parameter): group["lr"] for group in slow.param_groups for parameter in group["params"]}
    assert {rates[id(parameter)] for parameter in net.parameters()} == {0.025}
    assert {rates[id(parameter)] for parameter in loss.parameters()} == {0.1}
    # As every checkpoint of a run without a factor has them.
    assert len(create_optimizer(optimizer_options("adamw"), [net, loss], CPU).param_groups) == 2
