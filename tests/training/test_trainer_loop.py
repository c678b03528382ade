"""The training loop on fakes: resume bit for bit, non-finite guard, early stopping, finished run, records."""

import json
import math
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from training_fakes import FakeLoader, assert_same_bits, make_trainer, weights_of

from speakernet.checkpoint import CheckpointError, read_own_checkpoint, write_checkpoint
from speakernet.run_folder import held
from speakernet.training.progress import Interrupted, NonFiniteError


class StopAt(FakeLoader):
    """Asks this process to stop (as Ctrl-C does) when it hands out the batch of that number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def batch(self, position: int):
        if self.epoch * self.num_batches + position == self.number:
            os.kill(os.getpid(), signal.SIGINT)
        return super().batch(position)


@pytest.mark.parametrize(
    ("stop_at", "accumulation"),
    [(3, 1), (7, 2), *(pytest.param(*place, marks=pytest.mark.slow) for place in ((0, 1), (0, 2), (7, 1), (13, 2)))],
)
def test_stopped_and_resumed_equals_straight(tmp_path: Path, stop_at: int, accumulation: int):
    straight = make_trainer(tmp_path / "straight", accumulation_steps=accumulation, ema_decay=0.9)
    straight.train()
    with pytest.raises(Interrupted):
        make_trainer(tmp_path / "run", loader=StopAt(stop_at), accumulation_steps=accumulation, ema_decay=0.9).train()
    # another seed: everything must come from the checkpoint
    resumed = make_trainer(tmp_path / "run", accumulation_steps=accumulation, ema_decay=0.9, seed=99)
    resumed.train()
    assert_same_bits(straight, resumed)
    for one, other in zip(straight.average._kept, resumed.average._kept, strict=True):
        assert torch.equal(one, other)
    assert straight.state.step == resumed.state.step
    assert straight.state.utterances == resumed.state.utterances


def test_a_resume_with_another_batch_size_keeps_the_schedules_in_place(tmp_path: Path):
    """Halves of batches: twice as many steps an epoch, and the learning rate goes on where it was."""
    make_trainer(tmp_path, loader=FakeLoader(num_batches=4), max_epochs=1, scheduled_epochs=2).train()
    second = make_trainer(tmp_path, loader=FakeLoader(num_batches=8), max_epochs=2)
    second.train()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rates = {row["step"]: row["learning_rate"] for row in rows if row["kind"] == "step"}
    assert second.state.step == 4 + 8
    # Cosine over the 1.5 epochs after half an epoch of warm-up; a row tells the step's own rate.
    for step, epoch in {2: 0.25, 4: 0.75, 6: 1 + 1 / 8, 12: 1 + 7 / 8}.items():
        expected = 0.01 * epoch / 0.5 if epoch < 0.5 else 0.005 * (1 + math.cos(math.pi * (epoch - 0.5) / 1.5))
        assert rates[step] == pytest.approx(expected), step


def test_a_position_that_no_longer_exists_begins_the_epoch_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    class Changed(FakeLoader):
        def load_state_dict(self, state: dict) -> None:
            raise ValueError("other batches")

    with pytest.raises(Interrupted):
        make_trainer(tmp_path, loader=StopAt(10)).train()
    resumed = make_trainer(tmp_path, loader=Changed())
    resumed.train()
    assert "restarting epoch 2: other batches" in caplog.text
    # Four steps of the second epoch were done before, and are done again.
    assert resumed.state.step == 3 * 7 + 4


def test_records_are_the_same_after_a_resume(tmp_path: Path):
    make_trainer(tmp_path / "straight").train()
    with pytest.raises(Interrupted):
        make_trainer(tmp_path / "run", loader=StopAt(10)).train()
    make_trainer(tmp_path / "run", seed=99).train()

    def read(folder: Path) -> list[tuple]:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [(row["kind"], row["step"], row["epoch"], row.get("loss"), row.get("learning_rate")) for row in rows]

    straight, resumed = read(tmp_path / "straight"), read(tmp_path / "run")
    assert [row[:3] for row in straight] == [row[:3] for row in resumed]
    epochs = [(row[3]) for row in straight if row[0] == "epoch"]
    assert epochs == pytest.approx([row[3] for row in resumed if row[0] == "epoch"])


class Slow(FakeLoader):
    """Takes its time for a batch."""

    def batch(self, position: int):
        time.sleep(0.05)
        return super().batch(position)


def test_kill_nine_and_resume_equals_straight(tmp_path: Path):
    """A process of its own, killed while it trains and saves every step."""
    slow = make_trainer(tmp_path / "run", loader=Slow(), save_steps=1)
    process = multiprocessing.get_context("fork").Process(target=slow.train)
    process.start()
    last = tmp_path / "run" / "last.pt"
    while not last.exists():
        assert process.is_alive()
        time.sleep(0.02)
    time.sleep(0.3)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert read_own_checkpoint(last)["training"]["state"]["step"] > 0
    resumed = make_trainer(tmp_path / "run", seed=99)
    resumed.train()
    straight = make_trainer(tmp_path / "straight")
    straight.train()
    assert_same_bits(straight, resumed)


def test_bad_step_is_undone_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A poisoned batch leaves weights, optimizer and batch-norm statistics as if it had not been there."""
    loader = FakeLoader(num_batches=1, poisoned=frozenset({0}))
    trainer = make_trainer(tmp_path, loader=loader, max_epochs=1)
    before = [value.clone() for value in weights_of(trainer)]
    with pytest.raises(NonFiniteError, match="epoch 1: every step"):
        trainer.train()
    for one, other in zip(before, weights_of(trainer), strict=True):
        assert torch.equal(one, other)
    assert not trainer.optimizer.state
    assert trainer.state.bad_steps == 1
    assert "utterance0.wav" in caplog.text


def test_good_step_clears_the_streak_and_many_bad_ones_stop_the_run(tmp_path: Path):
    trainer = make_trainer(tmp_path / "a", loader=FakeLoader(poisoned=frozenset({1, 2, 4, 5})), max_bad_steps=3)
    trainer.train()
    assert trainer.state.bad_steps == 4
    assert all(torch.isfinite(value).all() for value in weights_of(trainer) if value.is_floating_point())
    with pytest.raises(NonFiniteError, match=r"3 steps in a row.*utterance"):
        make_trainer(tmp_path / "b", loader=FakeLoader(poisoned=frozenset({2, 3, 4})), max_bad_steps=3).train()


def test_finished_run_says_so_and_goes_on_with_more_epochs(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    make_trainer(tmp_path).train()
    again = make_trainer(tmp_path)
    summary = again.train()
    assert "nothing to train" in caplog.text and "--max_epoch" in caplog.text
    assert summary["epochs"] == 3
    more = make_trainer(tmp_path, max_epochs=5)
    assert more.train()["steps"] == 5 * 7


def test_early_stopping_keeps_the_best(tmp_path: Path):
    trainer = make_trainer(tmp_path, eers=[9.0, 5.0, 6.0, 7.0, 1.0], max_epochs=20, patience=2)
    summary = trainer.train()
    assert (summary["epochs"], summary["best_epoch"], summary["best_eer_percent"]) == (4, 2, 5.0)
    assert read_own_checkpoint(tmp_path / "best.pt")["training_summary"]["epoch"] == 2
    assert make_trainer(tmp_path, max_epochs=20, patience=2).train()["epochs"] == 4


def test_run_folder_is_held_by_one_run(tmp_path: Path):
    with held(tmp_path), pytest.raises(ValueError, match=f"in use by another run .process {os.getpid()}"):
        make_trainer(tmp_path).train()
    make_trainer(tmp_path, max_epochs=1).train()


def test_foreign_checkpoints_are_refused(tmp_path: Path):
    write_checkpoint(tmp_path / "last.pt", {"weights": {}})
    with pytest.raises(CheckpointError, match="no training state"):
        make_trainer(tmp_path).train()
    make_trainer(tmp_path / "other", max_epochs=1).train()
    other = make_trainer(tmp_path / "other", max_epochs=2)
    other.loss.head = torch.nn.Linear(8, 9)
    with pytest.raises(CheckpointError, match="number of speakers"):
        other.train()


def test_an_average_after_early_stopping_is_tried_once_and_costs_no_patience(tmp_path: Path):
    options = {"max_epochs": 20, "average_checkpoints": 2}
    stopped = make_trainer(tmp_path, eers=[5.0, 6.0, 7.0], patience=1, **options)
    stopped.train()
    again = make_trainer(tmp_path, eers=[4.0], patience=1, **options)
    assert (again.train()["epochs"], again.state.best_eer_percent) == (2, 5.0)
    more_patient = make_trainer(tmp_path, eers=[8.0, 8.0], patience=3, **options)
    assert more_patient.train()["epochs"] == 4


def test_what_an_earlier_run_left_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    make_trainer(tmp_path, max_epochs=6).train()
    best = (tmp_path / "best.pt").read_bytes()
    (tmp_path / "last.pt").unlink()
    (tmp_path / "results.json").write_text("{}")
    make_trainer(tmp_path, max_epochs=2, average_checkpoints=3).train()
    moved = "checkpoints.before-1, last.previous.pt.before-1, best.pt.before-1, results.json.before-1"
    assert moved in caplog.text
    # Its model and its figures stay together, and nobody takes them for the new run's.
    assert (tmp_path / "best.pt.before-1").read_bytes() == best and not (tmp_path / "results.json").exists()
    assert "epoch_0001.pt, epoch_0002.pt" in caplog.text
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        "average.pt",
        "epoch_0001.pt",
        "epoch_0002.pt",
    ]
    assert (tmp_path / "checkpoints.before-1" / "epoch_0006.pt").exists()


def test_other_trials_begin_the_best_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def run(checksum: int, eer: float, epochs: int):
        found = {"eer_percent": eer, "trials_checksum": checksum}
        trainer = make_trainer(tmp_path, max_epochs=epochs, validate=lambda: found)
        trainer.train()
        return trainer.state.best_eer_percent

    assert run(1, 5.0, 1) == 5.0
    assert run(1, 9.0, 2) == 5.0
    assert run(2, 8.0, 3) == 8.0 and "5.00 %" in caplog.text


def test_a_record_holds_the_mean_since_the_last_one(tmp_path: Path):
    """However often the run saves in between."""
    make_trainer(tmp_path / "plain", max_epochs=1, log_interval=3).train()
    make_trainer(tmp_path / "saving", max_epochs=1, log_interval=3, save_steps=1).train()

    def losses(folder: Path) -> list[float]:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [row["loss"] for row in rows if row["kind"] == "step"]

    assert losses(tmp_path / "plain") == pytest.approx(losses(tmp_path / "saving"))
    assert len(losses(tmp_path / "plain")) == 2


def test_averaging_at_the_end_can_win(tmp_path: Path):
    trainer = make_trainer(tmp_path, eers=[9.0, 8.0, 7.0, 3.0], average_checkpoints=3)
    before = trainer.train()
    assert before["best_eer_percent"] == 3.0
    best = read_own_checkpoint(tmp_path / "best.pt")["weights"]
    epochs = [read_own_checkpoint(path)["weights"] for path in trainer.store.epoch_paths()]
    mean = sum(one["first.weight"].double() for one in epochs) / 3
    assert torch.allclose(best["first.weight"].double(), mean)
    assert not torch.equal(trainer.net.state_dict()["first.weight"], best["first.weight"])


def test_moving_average_is_what_is_evaluated_and_kept(tmp_path: Path):
    trainer = make_trainer(tmp_path, ema_decay=0.99, max_epochs=1)
    trainer.train()
    best = read_own_checkpoint(tmp_path / "best.pt")["weights"]
    assert not torch.equal(best["first.weight"], trainer.net.state_dict()["first.weight"])
    assert torch.equal(best["first.weight"], trainer.average._kept[0])


def test_records_hold_what_the_progress_line_shows(tmp_path: Path):
    make_trainer(tmp_path).train()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    step = next(row for row in rows if row["kind"] == "step")
    for key in ("loss", "accuracy_percent", "utterances_per_second", "data_wait_share", "learning_rate", "grad_norm",
                "margin", "run_time_left", "effective_batch"):  # fmt: skip
        assert key in step, key
    assert {row["kind"] for row in rows} == {"step", "epoch", "evaluation"}
