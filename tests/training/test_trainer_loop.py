"""The training loop on fakes: resuming bit for bit, initial and frozen weights, bad steps, records,
the final model.
"""

import math
import multiprocessing
import os
import signal
import time

import pytest
import torch

from speakernet.checkpoint import read_own_checkpoint
from speakernet.run_folder import lock_folder
from speakernet.training.checkpoints import epoch_paths
from speakernet.training.optimizers import create_optimizer
from speakernet.training.options import OPTIMIZERS, TrainingOptions
from speakernet.training.state import NonFiniteError, Stage
from tests.outcomes import records_of
from tests.training.training_fakes import (
    CPU,
    FakeLoader,
    FakeLoss,
    FakeNet,
    assert_equal,
    assert_same_bits,
    interrupted,
    make_step,
    make_trainer,
    optimizer_options,
    step_of,
    tensors,
    trained,
    weights_of,
)


@pytest.mark.parametrize(("stop_at", "accumulation"), [(0, 1), (3, 1), (7, 2), (13, 2)])
def test_resuming(tmp_path, stop_at, accumulation):
    options = {"accumulation_steps": accumulation, "ema_decay": 0.9}
    straight = trained(tmp_path / "straight", **options)
    interrupted(tmp_path / "run", stop_at, **options)
    # With another seed, because everything must come from the checkpoint.
    resumed = trained(tmp_path / "run", **options, seed=99)
    assert_same_bits(straight, resumed)
    assert_equal(straight.average._kept, resumed.average._kept)
    assert straight.state.step == resumed.state.step
    assert straight.state.utterances == resumed.state.utterances
    rows = [records_of(tmp_path / name) for name in ("straight", "run")]
    for expected, row in zip(*rows, strict=True):
        for key in ("kind", "step", "epoch", "learning_rate"):
            assert expected.get(key) == row.get(key)
        if row["kind"] == "epoch":
            assert row["loss"] == pytest.approx(expected["loss"])


def test_resuming_with_another_batch_size(tmp_path):
    """With half the batch size there are twice as many steps per epoch, and the learning rate
    continues.
    """
    trained(tmp_path, loader=FakeLoader(num_batches=4), max_epochs=1, scheduled_epochs=2)
    assert trained(tmp_path, loader=FakeLoader(num_batches=8), max_epochs=2).state.step == 4 + 8
    rates = {row["step"]: row["learning_rate"] for row in records_of(tmp_path, "step")}
    # A cosine over 1.5 epochs after half an epoch of warm-up; a record has the rate of its step.
    for step, epoch in {2: 0.25, 4: 0.75, 6: 1 + 1 / 8, 12: 1 + 7 / 8}.items():
        expected = (
            0.01 * epoch / 0.5
            if epoch < 0.5
            else 0.005 * (1 + math.cos(math.pi * (epoch - 0.5) / 1.5))
        )
        assert rates[step] == pytest.approx(expected), step


class Slow(FakeLoader):
    """Makes batches slowly."""

    def batch(self, position):
        time.sleep(0.03)
        return super().batch(position)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a process that has used a GPU cannot fork")
def test_kill_and_resume(tmp_path):
    """A process killed while it trains and saves every step."""
    slow = make_trainer(tmp_path / "run", loader=Slow(), save_steps=1)
    process = multiprocessing.get_context("fork").Process(target=slow.train)
    process.start()
    while not (tmp_path / "run" / "last.pt").exists():
        assert process.is_alive()
        time.sleep(0.02)
    time.sleep(0.2)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL and step_of(tmp_path / "run")["step"] > 0
    assert_same_bits(trained(tmp_path / "straight"), trained(tmp_path / "run", seed=99))


def test_bad_step(tmp_path, caplog):
    """A poisoned batch does not change weights, optimizer or batch-norm statistics."""
    loader = FakeLoader(num_batches=1, poisoned=frozenset({0}))
    trainer = make_trainer(tmp_path, loader=loader, max_epochs=1)
    before = [value.clone() for value in weights_of(trainer)]
    with pytest.raises(NonFiniteError, match="epoch 1: every step"):
        trainer.train()
    assert_equal(before, weights_of(trainer))
    assert not trainer.step.optimizer.state
    assert trainer.state.bad_steps == 1 and "utterance0.wav" in caplog.text


def test_many_bad_steps(tmp_path):
    trainer = trained(
        tmp_path / "a", loader=FakeLoader(poisoned=frozenset({1, 2, 4, 5})), max_bad_steps=3
    )
    assert trainer.state.bad_steps == 4
    assert all(
        torch.isfinite(value).all() for value in weights_of(trainer) if value.is_floating_point()
    )
    with pytest.raises(NonFiniteError, match=r"3 steps in a row.*utterance"):
        trained(tmp_path / "b", loader=FakeLoader(poisoned=frozenset({2, 3, 4})), max_bad_steps=3)


def test_early_stopping(tmp_path):
    summary = make_trainer(
        tmp_path, eers=[9.0, 5.0, 6.0, 7.0, 1.0], max_epochs=20, patience=2
    ).train()
    assert (summary["epochs"], summary["best_epoch"], summary["best_eer_percent"]) == (4, 2, 5.0)
    assert read_own_checkpoint(tmp_path / "best.pt")["training_summary"]["epoch"] == 2
    assert make_trainer(tmp_path, max_epochs=20, patience=2).train()["epochs"] == 4


def test_locked_run_folder(tmp_path):
    with (
        lock_folder(tmp_path),
        pytest.raises(ValueError, match=f"in use by another run .process {os.getpid()}"),
    ):
        make_trainer(tmp_path).train()


def test_files_of_an_earlier_run(tmp_path, caplog):
    trained(tmp_path, max_epochs=6)
    best = (tmp_path / "best.pt").read_bytes()
    (tmp_path / "last.pt").unlink()
    (tmp_path / "results.json").write_text("{}")
    trained(tmp_path, max_epochs=2, average_checkpoints=3)
    assert (
        "checkpoints.before-1, last.previous.pt.before-1, best.pt.before-1, results.json.before-1"
        in caplog.text
    )
    # Its model and figures stay together and cannot be taken for those of the new run.
    assert (tmp_path / "best.pt.before-1").read_bytes() == best and not (
        tmp_path / "results.json"
    ).exists()
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["average.pt", "epoch_0001.pt", "epoch_0002.pt"]
    assert (tmp_path / "checkpoints.before-1" / "epoch_0006.pt").exists()


def test_other_trials_reset_the_best(tmp_path, caplog):
    for checksum, eer, epochs, best in ((1, 5.0, 1, 5.0), (1, 9.0, 2, 5.0), (2, 8.0, 3, 8.0)):
        figures = {"eer_percent": eer, "trials_checksum": checksum}
        trainer = trained(tmp_path, max_epochs=epochs, validate=figures.copy)
        assert trainer.state.best_eer_percent == best
    assert "5.00 %" in caplog.text


def test_means_of_records(tmp_path):
    """A record has the mean since the last one, however often the run saves in between."""
    losses = []
    for name, save_steps in (("plain", 0), ("saving", 1)):
        trained(tmp_path / name, max_epochs=1, log_interval=3, save_steps=save_steps)
        rows = records_of(tmp_path / name, "step")
        losses.append([row["loss"] for row in rows])
        assert {
            "accuracy_percent",
            "data_wait_share",
            "grad_norm",
            "margin",
            "run_time_left",
        } <= set(rows[0])
    assert losses[0] == pytest.approx(losses[1]) and len(losses[0]) == 2


def test_final_average(tmp_path):
    trainer = trained(tmp_path, eers=[9.0, 8.0, 7.0, 3.0], average_checkpoints=3)
    assert trainer.state.best_eer_percent == 3.0
    best = read_own_checkpoint(tmp_path / "best.pt")["weights"]["first.weight"]
    epochs = [read_own_checkpoint(path)["weights"] for path in epoch_paths(tmp_path)]
    mean = sum(weights["first.weight"].double() for weights in epochs) / 3
    assert torch.allclose(best.double(), mean) and not torch.equal(
        tensors(trainer.net)["first.weight"], best
    )


GIVEN = Stage(initial_model={"file": "theirs.pt"})


class Watching(FakeLoader):
    """Records the network's tensors at every batch."""

    def batch(self, position):
        self.seen.append(tensors(self.net))
        return super().batch(position)


def watched(folder, **options):
    """A run, and the network's tensors at every batch."""
    loader = Watching()
    trainer = make_trainer(folder, loader=loader, stage=GIVEN, **options)
    loader.net = trainer.net
    loader.seen = []
    trainer.train()
    return trainer, loader.seen


def same(left, right, part=""):
    return all(torch.equal(left[name], right[name]) for name in left if part in name)


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_frozen_network(tmp_path, optimizer):
    trainer, seen = watched(tmp_path, optimizer=optimizer, freeze_epochs=2)
    # Weights and statistics, despite weight decay.
    assert all(same(seen[0], tensors) for tensors in seen[: 2 * 7 + 1])
    after = trainer.net.state_dict()
    assert not same(seen[14], after, "weight") and not same(seen[14], after, "running_mean")
    # Epochs of the frozen network are not evaluated: it is still the initial one.
    assert [row["epoch"] for row in records_of(tmp_path, "evaluation")] == [0, 3]


@pytest.mark.parametrize("stop_at", [0, 13, 14])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_resuming_around_the_thaw(tmp_path, stop_at, optimizer):
    options = {
        "optimizer": optimizer,
        "freeze_epochs": 2,
        "network_learning_rate_factor": 0.1,
        "ema_decay": 0.9,
    }
    straight = trained(tmp_path / "straight", eers=[1.0, 2.0], stage=GIVEN, **options)
    interrupted(tmp_path / "run", stop_at, eers=[1.0, 2.0], stage=GIVEN, **options)
    resumed = make_trainer(tmp_path / "run", eers=[2.0], stage=GIVEN, seed=99, **options)
    summary = resumed.train()
    assert_same_bits(straight, resumed)
    assert (summary["initial_eer_percent"], summary["best_eer_percent"], summary["best_epoch"]) == (
        1.0,
        1.0,
        0,
    )


def test_parameter_groups_of_factors():
    net = FakeNet()
    loss = FakeLoss()
    slow = create_optimizer(
        optimizer_options("adamw", network_learning_rate_factor=0.25), [net, loss], CPU
    )
    step = make_step(net, loss, slow)
    step.add(FakeLoader().batch(0))
    step.finish(0.1)
    rates = {
        id(parameter): group["lr"] for group in slow.param_groups for parameter in group["params"]
    }
    assert {rates[id(parameter)] for parameter in net.parameters()} == {0.025}
    assert {rates[id(parameter)] for parameter in loss.parameters()} == {0.1}
    # As in every checkpoint of a run without factors.
    assert len(create_optimizer(optimizer_options("adamw"), [net, loss], CPU).param_groups) == 2


@pytest.mark.parametrize(("final_model", "epoch", "eer"), [("best", 2, 10.0), ("last", 3, 20.0)])
def test_final_model_without_choosing_trials(tmp_path, final_model, epoch, eer):
    summary = make_trainer(tmp_path, eers=[30.0, 10.0, 20.0], final_model=final_model).train()
    kept = read_own_checkpoint(tmp_path / "best.pt")["training_summary"]
    assert (kept["epoch"], kept["best_eer_percent"]) == (epoch, eer)
    assert (summary["best_epoch"], summary["best_eer_percent"]) == (epoch, eer)


def test_average_of_the_last_checkpoints(tmp_path):
    trained(tmp_path, eers=[30.0, 10.0, 20.0, 40.0], final_model="last", average_checkpoints=2)
    best, average = (
        read_own_checkpoint(tmp_path / name) for name in ("best.pt", "checkpoints/average.pt")
    )
    assert best["training_summary"]["best_eer_percent"] == 40.0
    assert same(best["weights"], average["weights"])


def test_patience_without_a_choice():
    options = TrainingOptions(final_model="last", patience=2)
    assert [option for option, _ in options.problems()] == ["patience"]
