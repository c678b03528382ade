"""What a run shows: one bar for all of it, in the words of its last numbers; records that a resume takes back."""

import json
import logging
from pathlib import Path

import pytest
from training_fakes import make_trainer

from speakernet import terminal
from speakernet.terminal import duration
from speakernet.training import progress
from speakernet.training.options import TrainingOptions
from speakernet.training.progress import Progress
from speakernet.training.state import TrainingState, evaluations_left

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
    shown.advance()
    assert caplog.messages[-1] == "training: 12 %, epoch 1/4"
    shown.record("step", 1, 1, VALUES)
    shown.advance()
    assert caplog.messages[-1] == "training: 25 %, epoch 1/4, loss 2.500, 200 utt/s, 0:12:31 left"
    shown.start_epoch(1, 4, 4, 0)
    shown.record("step", 2, 2, {**VALUES, "data_wait_share": 0.31})
    shown.advance()
    expected = "training: 31 %, epoch 2/4, loss 2.500, 200 utt/s, 0:12:31 left, waits 31%"
    assert caplog.messages[-1] == expected
    shown.close()
    shown.advance()
    assert caplog.messages[-1] == expected
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_a_resumed_run_begins_where_it_was(shown: Progress, caplog: pytest.LogCaptureFixture) -> None:
    shown.start_epoch(2, 4, 10, 4)
    shown.advance()
    assert caplog.messages[-1] == "training: 62 %, epoch 3/4"


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
    epochs = [line for line in caplog.messages if line.startswith("epoch ")]
    assert [line.split(":")[0] for line in epochs] == 2 * ["epoch 1", "epoch 2", "epoch 3"]
    # The margin grows until epoch 2 here: said when it begins to act, and once.
    note = "(by design loss rises and accuracy falls while the margin grows, until epoch 2: watch the EER)"
    assert epochs[0].endswith(note) and not any("by design" in line for line in epochs[1:3])


def test_evaluations_that_take_most_of_the_time_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tmp_path)
    reporter, shown = trainer.reporter, []
    trainer.progress.show = shown.append
    reporter._began -= 100.0
    for seconds in (5.0, 5.0, 80.0):
        reporter.tell_evaluation({"eer_percent": 5.0}, seconds, "")
    assert "evaluations take" not in caplog.text
    again = make_trainer(tmp_path / "again").reporter
    again._began -= 100.0
    for seconds in (40.0, 30.0, 30.0):
        again.tell_evaluation({"eer_percent": 5.0}, seconds, "")
    assert caplog.text.count("evaluations take 70 % of the time: raise training.test_interval") == 1
    # Three evaluations are left at 80 s each, and no step has been timed.
    assert shown[-1]["run_time_left"] == duration(80.0 * evaluations_left(trainer.state, trainer.options))


@pytest.mark.parametrize(
    ("epoch", "interval", "left"), [(0, 4, 4), (3, 4, 4), (4, 4, 3), (14, 4, 1), (0, 5, 4), (15, 5, 1)]
)
def test_evaluations_left_are_counted(epoch: int, interval: int, left: int) -> None:
    options = TrainingOptions(max_epochs=16, test_interval=interval)
    assert evaluations_left(TrainingState(epoch=epoch), options) == left


def test_records_after_the_step_of_a_resume_are_taken_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "step", "step": 1}\n{"kind": "step", "step": 5}\n{"kind": "st')
    again = Progress(tmp_path, show_bar=False, tensorboard=False)
    again.open(3)
    again.record("step", 4, 1, {"loss": float("nan")})
    again.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 4] and records[1]["loss"] is None
    assert "cut off" in caplog.text


def test_what_was_told_after_the_last_checkpoint_is_told_once(tmp_path: Path) -> None:
    """An epoch has the step of its last step, after which the checkpoint may have been written."""
    first = Progress(tmp_path, show_bar=False, tensorboard=False)
    first.open(0)
    first.record("step", 2, 1, {"loss": 1.0})
    num_lines = first.num_lines
    first.record("epoch", 2, 1, {"loss": 1.0})
    again = Progress(tmp_path, show_bar=False, tensorboard=False)
    again.open(2, num_lines)
    again.record("epoch", 2, 1, {"loss": 1.0})
    again.close()
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (num_lines, kinds, again.num_lines) == (1, ["step", "epoch"], 2)
