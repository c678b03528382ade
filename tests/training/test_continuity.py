"""What a run that goes on is told of options that are not as they were."""

from pathlib import Path

import pytest

from speakernet.training.checkpoints import say_changes


def told(before: dict, now: dict, caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    say_changes({"config": before}, {"config": now}, "last.pt")
    return caplog.text


def test_the_same_place_written_otherwise_is_no_change(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = {"data": {"train_list": "lists/train.txt", "train_lists": ["a.txt", "b.txt"], "crop_frames": 200}}
    there = {
        "data": {
            "train_list": str(tmp_path / "lists" / "train.txt"),
            "train_lists": [str(tmp_path / "a.txt"), "b.txt"],
            "crop_frames": 200,
        }
    }
    assert told(here, there, caplog) == told(there, here, caplog) == ""


def test_changes_are_named_with_both_values(caplog: pytest.LogCaptureFixture) -> None:
    before = {"data": {"train_list": "a.txt", "speeds": [1.0], "seed": 0}, "loss": {"name": "softmax"}}
    now = {"data": {"train_list": "b.txt", "speeds": [1.0, 1.1], "seed": 1}, "loss": {"name": "aamsoftmax", "new": 1}}
    text = told(before, now, caplog)
    for words in ("train_list 'b.txt' (was 'a.txt')", "speeds [1.0, 1.1]", "data.seed 1 (was 0)", "(was 'softmax')"):
        assert words in text
    assert "new" not in text
    # An empty place is not the working directory.
    assert "(was '')" in told({"data": {"train_path": ""}}, {"data": {"train_path": "."}}, caplog)
