"""The tracker's arithmetic, worked out by hand."""

import logging

import pytest

from speakernet.training.tracker import PerformanceTracker


def test_rates_and_shares():
    tracker = PerformanceTracker(0, precision="bf16", accumulation_steps=4)
    for _ in range(4):
        tracker.update(0.5, batch_size=64, loss=2.0, parts={"data": 0.1, "forward_backward": 0.3, "optimizer": 0.05})
    tracker.update(1.0, batch_size=32, loss=4.5, parts={"data": 0.2})
    summary = tracker.summary()
    assert summary["steps_per_second"] == pytest.approx(5 / 3)
    assert summary["utterances_per_second"] == pytest.approx((4 * 64 + 32) / 3)
    assert summary["effective_batch"] == pytest.approx(57.6)
    assert summary["data_wait_share"] == pytest.approx(0.6 / 3)
    assert summary["overhead_share"] == pytest.approx((3 - 0.6 - 1.2 - 0.2) / 3)
    assert summary["loss"] == pytest.approx(2.5)
    assert summary["accumulation_share"] == 0.75
    assert summary["precision"] == "bf16" and summary["process_peak_bytes"] > 1 << 20


def test_window_begins_anew_and_the_total_stays():
    tracker = PerformanceTracker(0)
    tracker.update(1.0, batch_size=10)
    assert tracker.take_window()["utterances_per_second"] == 10.0
    assert tracker.take_window() == {}
    tracker.update(1.0, batch_size=30)
    assert tracker.take_window()["utterances_per_second"] == 30.0
    assert tracker.summary()["utterances_per_second"] == 20.0


def test_summary_is_logged_at_the_interval(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    tracker = PerformanceTracker(log_interval=2)
    tracker.update(0.5, batch_size=8)
    assert "performance" not in caplog.text
    tracker.update(0.5, batch_size=8)
    assert "16.0 utterances/s" in caplog.text
    assert "steps" in PerformanceTracker().log_summary()


def test_numbers_without_sense_are_refused():
    with pytest.raises(ValueError, match="log_interval -1"):
        PerformanceTracker(-1)
    with pytest.raises(ValueError, match="accumulation_steps 0"):
        PerformanceTracker(accumulation_steps=0)
