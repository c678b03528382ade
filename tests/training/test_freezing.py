"""Weights that were given: frozen, then slower than the head; evaluated first, and best until beaten."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from training_fakes import (
    CPU,
    FakeLoader,
    FakeLoss,
    FakeNet,
    assert_same_bits,
    make_step,
    make_trainer,
    optimizer_options,
)

from speakernet.checkpoint import read_own_checkpoint
from speakernet.training.optimizers import Freezing, create_optimizer
from speakernet.training.options import OPTIMIZERS, RuntimeOptions, TrainingOptions
from speakernet.training.precision import Precision
from speakernet.training.progress import Interrupted, Stage

GIVEN = Stage(given={"file": "theirs.pt"})


class Watching(FakeLoader):
    """Stops the run (as Ctrl-C does) with the batch of a number, and notes the network's tensors at every batch."""

    def __init__(self, stop_at: int = -1) -> None:
        super().__init__()
        self.stop_at = stop_at
        self.net: nn.Module | None = None
        self.seen: list[dict[str, torch.Tensor]] = []

    def batch(self, position: int):
        if self.epoch * self.num_batches + position == self.stop_at:
            os.kill(os.getpid(), signal.SIGINT)
        if self.net is not None:
            self.seen.append({name: value.clone() for name, value in self.net.state_dict().items()})
        return super().batch(position)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], wanted: str = "") -> bool:
    return all(torch.equal(one[name], other[name]) for name in one if wanted in name)


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_a_frozen_network_stays_to_the_last_bit_and_then_learns(tmp_path: Path, optimizer: str) -> None:
    loader = Watching()
    trainer = make_trainer(tmp_path, loader=loader, optimizer=optimizer, freeze_epochs=2, stage=GIVEN)
    loader.net = trainer.net
    head = trainer.loss.head.weight.clone()
    trainer.train()
    # Weights and statistics, weight decay notwithstanding; the head learns meanwhile.
    assert all(same(loader.seen[0], seen) for seen in loader.seen[: 2 * 7 + 1])
    assert not torch.equal(head, trainer.loss.head.weight)
    after = trainer.net.state_dict()
    assert not same(loader.seen[14], after, "weight") and not same(loader.seen[14], after, "running_mean")


def test_a_frozen_network_leaves_no_trace_in_the_optimizer(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        make_trainer(tmp_path, loader=Watching(stop_at=8), freeze_epochs=2, stage=GIVEN).train()
    saved = read_own_checkpoint(tmp_path / "last.pt")["training"]["optimizer"]
    assert len(saved["state"]) == len(list(FakeLoss().parameters()))


def test_statistics_stay_where_they_are_to_stay(tmp_path: Path) -> None:
    loader = Watching()
    options = {"freeze_epochs": 1, "freeze_norm_statistics": True, "average_checkpoints": 2}
    trainer = make_trainer(tmp_path, loader=loader, stage=GIVEN, **options)
    loader.net = trainer.net
    trainer.train()
    after = trainer.net.state_dict()
    assert same(loader.seen[0], after, "running") and not same(loader.seen[0], after, "norm.weight")
    # The average of the last epochs is not measured anew either.
    assert same(loader.seen[0], read_own_checkpoint(trainer.store.average_path)["weights"], "running")


@pytest.mark.parametrize("stop_at", [0, 3, 7, 13, 14, 18])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_stopped_and_resumed_equals_straight_across_the_thaw(tmp_path: Path, stop_at: int, optimizer: str) -> None:
    options = {
        "optimizer": optimizer,
        "freeze_epochs": 2,
        "network_learning_rate_factor": 0.1,
        "ema_decay": 0.9,
        "stage": GIVEN,
        "eers": [1.0, 2.0],
    }
    straight = make_trainer(tmp_path / "straight", **options)
    straight.train()
    with pytest.raises(Interrupted):
        make_trainer(tmp_path / "run", loader=Watching(stop_at), **options).train()
    resumed = make_trainer(tmp_path / "run", **{**options, "eers": [2.0]}, seed=99)
    summary = resumed.train()
    assert_same_bits(straight, resumed)
    assert (summary["initial_eer_percent"], summary["best_eer_percent"], summary["best_epoch"]) == (1.0, 1.0, 0)


def test_given_weights_are_evaluated_first_and_stay_best_until_beaten(tmp_path: Path) -> None:
    for name, eers, best in (("stays", [1.0, 2.0], (1.0, 0)), ("beaten", [3.0, 2.0], (2.0, 2))):
        trainer = make_trainer(tmp_path / name, eers=eers, freeze_epochs=1, stage=GIVEN)
        before = {key: value.clone() for key, value in trainer.net.state_dict().items()}
        summary = trainer.train()
        assert (summary["best_eer_percent"], summary["best_epoch"]) == best
        assert summary["initial_eer_percent"] == eers[0]
        kept = read_own_checkpoint(tmp_path / name / "best.pt")
        assert same(before, kept["weights"]) == (name == "stays")
        assert kept["training_summary"]["initial_model"] == {"file": "theirs.pt"}
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        # The epoch in which the network was frozen has nothing to evaluate.
        assert [row["epoch"] for row in rows if row["kind"] == "evaluation"] == [0, 2, 3]


def test_a_run_of_fresh_weights_is_not_evaluated_before_it_has_learned(tmp_path: Path) -> None:
    assert make_trainer(tmp_path, eers=[1.0, 2.0]).train()["best_epoch"] == 1


def test_patience_counts_from_the_given_weights(tmp_path: Path) -> None:
    summary = make_trainer(tmp_path, eers=[1.0, 2.0], max_epochs=20, patience=2, stage=GIVEN).train()
    assert (summary["epochs"], summary["best_epoch"]) == (2, 0)


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
    step = make_step(net, loss, slow, Precision(RuntimeOptions(), "no", CPU))
    step.add(FakeLoader().batch(0))
    step.finish(0.1)
    rates = {id(parameter): group["lr"] for group in slow.param_groups for parameter in group["params"]}
    assert {rates[id(parameter)] for parameter in net.parameters()} == {0.025}
    assert {rates[id(parameter)] for parameter in loss.parameters()} == {0.1}
    # As every checkpoint of a run without a factor has them.
    assert len(create_optimizer(optimizer_options("adamw"), [net, loss], CPU).param_groups) == 2


def test_the_gradient_cache_trains_the_head_of_a_frozen_network() -> None:
    class WithHead(FakeLoss):
        is_metric = True

        def forward(self, embeddings, labels):
            return super().forward(embeddings[:, 0], labels)

    torch.manual_seed(0)
    net, loss = FakeNet(), WithHead()
    Freezing(net, TrainingOptions(freeze_epochs=1)).begin_training(0)
    optimizer = create_optimizer(optimizer_options("sgd", learning_rate=0.1), [net, loss], CPU)
    step = make_step(net, loss, optimizer, Precision(RuntimeOptions(), "no", CPU), gradient_cache=True)
    before, head = [value.clone() for value in net.state_dict().values()], loss.head.weight.clone()
    loader = FakeLoader()
    step.add(loader.batch(0))
    step.add(loader.batch(1))
    step.finish(0.1)
    assert all(torch.equal(one, other) for one, other in zip(before, net.state_dict().values(), strict=True))
    assert not torch.equal(head, loss.head.weight)


@pytest.mark.slow
def test_a_compiled_network_freezes_and_thaws_as_an_eager_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    # Adam would make whole steps of the rounding in the gradient of a bias before batch norm, which is zero.
    options = {"dropout": 0.0, "freeze_epochs": 1, "stage": GIVEN, "optimizer": "sgd"}
    eager = make_trainer(tmp_path / "eager", **options)
    eager.train()
    compiles = RuntimeOptions(compile="on", compile_scope="whole")
    trainer = make_trainer(tmp_path / "compiled", compiles=compiles, **options)
    trainer.train()
    assert "compiled (whole, default)" in caplog.text and "without it" not in caplog.text
    for one, other in zip(eager.net.state_dict().values(), trainer.net.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
