"""What a run shows: one bar for all of it, in the words of its last numbers; records that a resume takes back."""

import json
import logging
from pathlib import Path

import pytest
import torch
from training_fakes import make_trainer

from speakernet import terminal
from speakernet.terminal import duration
from speakernet.training import progress
from speakernet.training.progress import LoadingFacts, PerformanceTracker, Progress, data_wait_advice

VALUES = {
    "loss": 2.5,
    "accuracy_percent": 10.0,
    "utterances_per_second": 200.0,
    "data_wait_share": 0.05,
    "run_time_left": "0:12:31",
}


@pytest.fixture()
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Progress:
    """A run's progress without a terminal, which tells the log at every batch."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.0)
    return Progress(tmp_path, tensorboard=False)


def test_one_bar_tells_of_the_whole_run(shown: Progress, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    shown.open(0)
    shown.start_epoch(0, 4, 2, 0)
    shown.advance(1)
    assert caplog.messages[-1] == "training: 12 %, epoch 1/4"
    shown.record("step", 1, 1, VALUES)
    shown.advance(1)
    assert caplog.messages[-1] == "training: 25 %, epoch 1/4, loss 2.500, 200 utt/s, 0:12:31 left"
    shown.start_epoch(1, 4, 4, 0)
    shown.record("step", 2, 2, {**VALUES, "data_wait_share": 0.31})
    shown.advance(1)
    expected = "training: 31 %, epoch 2/4, loss 2.500, 200 utt/s, 0:12:31 left, waits 31%"
    assert caplog.messages[-1] == expected
    shown.close()
    shown.advance(1)
    assert caplog.messages[-1] == expected
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_numbers_are_fresh_however_rarely_they_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.0)
    trainer = make_trainer(tmp_path / "shown", log_interval=100)
    monkeypatch.setattr(trainer.progress, "show_bar", True)
    trainer.train()
    lines = [line for line in caplog.messages if line.startswith("training: ")]
    assert len(lines) == 3 * 7 and all("loss" in line and " left" in line for line in lines[1:])
    assert lines[-1].startswith("training: 100 %, epoch 3/3, loss ")
    # What is shown changes nothing of what is recorded.
    quiet = make_trainer(tmp_path / "quiet", log_interval=100)
    quiet.train()
    assert quiet.state.epoch_loss_sum == trainer.state.epoch_loss_sum


@pytest.mark.parametrize(
    ("epoch", "interval", "left"), [(0, 4, 4), (3, 4, 4), (4, 4, 3), (14, 4, 1), (0, 5, 4), (15, 5, 1)]
)
def test_time_left_counts_evaluations(tmp_path: Path, epoch: int, interval: int, left: int) -> None:
    trainer = make_trainer(tmp_path, max_epochs=16, test_interval=interval)
    trainer.state.epoch = epoch
    trainer._evaluation_seconds = 60.0
    assert trainer._time_left({}) == duration(60.0 * left)


def test_what_was_told_after_the_last_checkpoint_is_told_once(tmp_path: Path) -> None:
    """An epoch has the step of its last step, after which the checkpoint may have been written."""
    first = Progress(tmp_path, show_bar=False, tensorboard=False)
    first.open(0)
    first.record("step", 2, 1, {"loss": 1.0})
    num_lines = first.num_lines
    first.record("epoch", 2, 1, {"loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "st')
    again = Progress(tmp_path, show_bar=False, tensorboard=False)
    again.open(2, num_lines)
    again.record("epoch", 2, 1, {"loss": float("nan")})
    again.close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["kind"] for record in records] == ["step", "epoch"] and again.num_lines == 2
    assert num_lines == 1 and records[1]["loss"] is None


def test_rates_and_shares():
    tracker = PerformanceTracker("bf16", 4, torch.device("cpu"))
    for _ in range(4):
        tracker.update(0.5, 64, {"data": 0.1, "forward_backward": 0.3, "optimizer": 0.05})
    tracker.update(1.0, 32, {"data": 0.2})
    summary = tracker.summary(87.0)
    assert summary["steps_per_second"] == pytest.approx(5 / 3)
    assert summary["utterances_per_second"] == pytest.approx((4 * 64 + 32) / 3)
    assert summary["effective_batch"] == pytest.approx(57.6)
    assert summary["data_wait_share"] == pytest.approx(0.6 / 3)
    assert summary["overhead_share"] == pytest.approx((3 - 0.6 - 1.2 - 0.2) / 3)
    assert summary["accumulation_share"] == 0.75 and summary["gpu_utilisation_percent"] == 87.0
    assert tracker.take_window()["utterances_per_second"] == pytest.approx(96) and tracker.take_window() == {}
    tracker.update(1.0, 30, {})
    assert tracker.take_window()["utterances_per_second"] == 30.0
    assert tracker.take_epoch()["utterances_per_second"] == pytest.approx((4 * 64 + 62) / 4)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (LoadingFacts(7, 8, False, False, False, True, 40e6), "40 MB/s"),
        (LoadingFacts(7, 8, False, False, True, True), "augment.device"),
        (LoadingFacts(2, 8, False, False, False, True), "num_workers from 2 to 7"),
        (LoadingFacts(7, 8, False, True, False, True), "decoded for every crop"),
        (LoadingFacts(7, 8, False, False, False, True, 900e6), "opened for every crop"),
        (LoadingFacts(1, 2, True, False, True, False), "busy augmenting"),
        (LoadingFacts(1, 2, True, False, False, False), "all cores are busy"),
        (LoadingFacts(0, 8, True, False, False, True, is_on_disk=True), "faster disk"),
        (LoadingFacts(2, 8, True, False, True, False, is_on_disk=True), "num_workers from 2 to 7"),
    ],
)
def test_advice_fits_the_run(facts: LoadingFacts, words: str) -> None:
    assert words in data_wait_advice(0.3, facts) and "30 %" in data_wait_advice(0.3, facts)
    assert data_wait_advice(0.1, facts) == ""
