"""What a run shows: a progress line in a terminal, lines in the log elsewhere; records that a resume takes back."""

import json
import logging
from pathlib import Path

import pytest

from speakernet.training import progress
from speakernet.training.progress import Progress

VALUES = {"loss": 2.5, "accuracy_percent": 10.0, "utterances_per_second": 200.0, "learning_rate": 1e-3}


def test_without_a_terminal_the_numbers_go_to_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    shown = Progress(tmp_path, tensorboard=False)
    shown.open(0)
    shown.start_epoch(0, 2, 10, 0)
    shown.advance()
    shown.record("step", 1, 1, VALUES)
    assert "step 1: loss 2.500, acc 10.0%, utt/s 200, lr 1.00e-03" in caplog.text
    monkeypatch.setattr(progress, "LINE_SECONDS", 1000.0)
    shown.record("step", 2, 1, VALUES)
    assert "step 2" not in caplog.text
    shown.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_in_a_terminal_there_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    shown = Progress(tmp_path, tensorboard=False)
    shown.open(0)
    shown.start_epoch(0, 2, 10, 0)
    shown.record("step", 1, 1, VALUES)
    shown.advance()
    shown.close()
    assert "epoch 1/2" in capsys.readouterr().err


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
