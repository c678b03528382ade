"""The training loop on fakes: resume bit for bit, non-finite guard, early stopping, finished run, records."""

import math
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from training_fakes import (
    FakeLoader,
    assert_same_bits,
    interrupted,
    make_trainer,
    records,
    step_of,
    tensors,
    trained,
    weights_of,
)

from speakernet.checkpoint import read_own_checkpoint
from speakernet.run_folder import held
from speakernet.training.checkpoints import epoch_paths
from speakernet.training.progress import NonFiniteError


@pytest.mark.parametrize(("stop_at", "accumulation"), [(0, 1), (3, 1), (7, 2), (13, 2)])
def test_stopped_and_resumed_equals_straight(tmp_path: Path, stop_at: int, accumulation: int) -> None:
    options = {"accumulation_steps": accumulation, "ema_decay": 0.9}
    straight = trained(tmp_path / "straight", **options)
    interrupted(tmp_path / "run", stop_at, **options)
    # Another seed: everything must come from the checkpoint.
    resumed = trained(tmp_path / "run", **options, seed=99)
    assert_same_bits(straight, resumed)
    assert all(torch.equal(*pair) for pair in zip(straight.average._kept, resumed.average._kept, strict=True))
    assert (straight.state.step, straight.state.utterances) == (resumed.state.step, resumed.state.utterances)
    rows = [records(tmp_path / name) for name in ("straight", "run")]
    for one, other in zip(*rows, strict=True):
        for key in ("kind", "step", "epoch", "learning_rate"):
            assert one.get(key) == other.get(key)
        if one["kind"] == "epoch":
            assert one["loss"] == pytest.approx(other["loss"])


def test_a_resume_with_another_batch_size_keeps_the_schedules_in_place(tmp_path: Path) -> None:
    """Halves of batches: twice as many steps an epoch, and the learning rate continues where it was."""
    trained(tmp_path, loader=FakeLoader(num_batches=4), max_epochs=1, scheduled_epochs=2)
    assert trained(tmp_path, loader=FakeLoader(num_batches=8), max_epochs=2).state.step == 4 + 8
    rates = {row["step"]: row["learning_rate"] for row in records(tmp_path, "step")}
    # Cosine over the 1.5 epochs after half an epoch of warm-up; a row tells the step's own rate.
    for step, epoch in {2: 0.25, 4: 0.75, 6: 1 + 1 / 8, 12: 1 + 7 / 8}.items():
        expected = 0.01 * epoch / 0.5 if epoch < 0.5 else 0.005 * (1 + math.cos(math.pi * (epoch - 0.5) / 1.5))
        assert rates[step] == pytest.approx(expected), step


def test_a_position_that_no_longer_exists_restarts_the_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Changed(FakeLoader):
        def load_state_dict(self, state: dict) -> None:
            raise ValueError("other batches")

    interrupted(tmp_path, 10)
    # Four steps of the second epoch were done before, and are done again.
    assert trained(tmp_path, loader=Changed()).state.step == 3 * 7 + 4
    assert "restarting epoch 2: other batches" in caplog.text


class Slow(FakeLoader):
    """Takes its time for a batch."""

    def batch(self, position: int):
        time.sleep(0.03)
        return super().batch(position)


def test_kill_nine_and_resume_equals_straight(tmp_path: Path) -> None:
    """A process of its own, killed while it trains and saves every step."""
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


def test_bad_step_is_undone_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A poisoned batch leaves weights, optimizer and batch-norm statistics as if it had not been there."""
    loader = FakeLoader(num_batches=1, poisoned=frozenset({0}))
    trainer = make_trainer(tmp_path, loader=loader, max_epochs=1)
    before = [value.clone() for value in weights_of(trainer)]
    with pytest.raises(NonFiniteError, match="epoch 1: every step"):
        trainer.train()
    assert all(torch.equal(*pair) for pair in zip(before, weights_of(trainer), strict=True))
    assert not trainer.optimizer.state and trainer.state.bad_steps == 1 and "utterance0.wav" in caplog.text


def test_good_step_clears_the_streak_and_many_bad_ones_stop_the_run(tmp_path: Path) -> None:
    trainer = trained(tmp_path / "a", loader=FakeLoader(poisoned=frozenset({1, 2, 4, 5})), max_bad_steps=3)
    assert trainer.state.bad_steps == 4
    assert all(torch.isfinite(value).all() for value in weights_of(trainer) if value.is_floating_point())
    with pytest.raises(NonFiniteError, match=r"3 steps in a row.*utterance"):
        trained(tmp_path / "b", loader=FakeLoader(poisoned=frozenset({2, 3, 4})), max_bad_steps=3)


def test_finished_run_continues_with_more_epochs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    trained(tmp_path)
    assert make_trainer(tmp_path).train()["epochs"] == 3
    assert "nothing to train" in caplog.text and "--max_epoch" in caplog.text
    assert make_trainer(tmp_path, max_epochs=5).train()["steps"] == 5 * 7


def test_early_stopping_keeps_the_best(tmp_path: Path) -> None:
    summary = make_trainer(tmp_path, eers=[9.0, 5.0, 6.0, 7.0, 1.0], max_epochs=20, patience=2).train()
    assert (summary["epochs"], summary["best_epoch"], summary["best_eer_percent"]) == (4, 2, 5.0)
    assert read_own_checkpoint(tmp_path / "best.pt")["training_summary"]["epoch"] == 2
    assert make_trainer(tmp_path, max_epochs=20, patience=2).train()["epochs"] == 4


def test_run_folder_is_held_by_one_run(tmp_path: Path) -> None:
    with held(tmp_path), pytest.raises(ValueError, match=f"in use by another run .process {os.getpid()}"):
        make_trainer(tmp_path).train()


def test_an_average_after_early_stopping_is_tried_once_and_costs_no_patience(tmp_path: Path) -> None:
    options = {"max_epochs": 20, "average_checkpoints": 2}
    trained(tmp_path, eers=[5.0, 6.0, 7.0], patience=1, **options)
    again = trained(tmp_path, eers=[4.0], patience=1, **options)
    assert (again.state.epoch, again.state.best_eer_percent) == (2, 5.0)
    assert trained(tmp_path, eers=[8.0, 8.0], patience=3, **options).state.epoch == 4


def test_what_an_earlier_run_left_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path, max_epochs=6)
    best = (tmp_path / "best.pt").read_bytes()
    (tmp_path / "last.pt").unlink()
    (tmp_path / "results.json").write_text("{}")
    trained(tmp_path, max_epochs=2, average_checkpoints=3)
    assert "checkpoints.before-1, last.previous.pt.before-1, best.pt.before-1, results.json.before-1" in caplog.text
    # Its model and its figures stay together, and nobody takes them for the new run's.
    assert (tmp_path / "best.pt.before-1").read_bytes() == best and not (tmp_path / "results.json").exists()
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["average.pt", "epoch_0001.pt", "epoch_0002.pt"]
    assert (tmp_path / "checkpoints.before-1" / "epoch_0006.pt").exists()


def test_other_trials_restart_the_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for checksum, eer, epochs, best in ((1, 5.0, 1, 5.0), (1, 9.0, 2, 5.0), (2, 8.0, 3, 8.0)):
        found = {"eer_percent": eer, "trials_checksum": checksum}
        assert trained(tmp_path, max_epochs=epochs, validate=lambda found=found: found).state.best_eer_percent == best
    assert "5.00 %" in caplog.text


def test_a_record_holds_the_mean_since_the_last_one(tmp_path: Path) -> None:
    """However often the run saves in between."""
    losses = []
    for name, save_steps in (("plain", 0), ("saving", 1)):
        trained(tmp_path / name, max_epochs=1, log_interval=3, save_steps=save_steps)
        rows = records(tmp_path / name, "step")
        losses.append([row["loss"] for row in rows])
        assert {"accuracy_percent", "data_wait_share", "grad_norm", "margin", "run_time_left"} <= set(rows[0])
    assert losses[0] == pytest.approx(losses[1]) and len(losses[0]) == 2


def test_averaging_at_the_end_can_win(tmp_path: Path) -> None:
    trainer = trained(tmp_path, eers=[9.0, 8.0, 7.0, 3.0], average_checkpoints=3)
    assert trainer.state.best_eer_percent == 3.0
    best = read_own_checkpoint(tmp_path / "best.pt")["weights"]["first.weight"]
    epochs = [read_own_checkpoint(path)["weights"] for path in epoch_paths(tmp_path)]
    mean = sum(one["first.weight"].double() for one in epochs) / 3
    assert torch.allclose(best.double(), mean) and not torch.equal(tensors(trainer.net)["first.weight"], best)


def test_moving_average_is_what_is_evaluated_and_kept(tmp_path: Path):
    trainer = make_trainer(tmp_path, ema_decay=0.99, max_epochs=1)
    trainer.train()
    best = read_own_checkpoint(tmp_path / "best.pt")["weights"]
    assert not torch.equal(best["first.weight"], trainer.net.state_dict()["first.weight"])
    assert torch.equal(best["first.weight"], trainer.average._kept[0])
