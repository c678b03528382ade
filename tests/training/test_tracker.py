"""The tracker's arithmetic, worked out by hand."""

import pytest
import torch

from speakernet.training.progress import PerformanceTracker


def test_rates_and_shares():
    tracker = PerformanceTracker("bf16", 4, torch.device("cpu"))
    for _ in range(4):
        tracker.update(0.5, 64, {"data": 0.1, "forward_backward": 0.3, "optimizer": 0.05})
    tracker.update(1.0, 32, {"data": 0.2})
    summary = tracker.summary()
    assert summary["steps_per_second"] == pytest.approx(5 / 3)
    assert summary["utterances_per_second"] == pytest.approx((4 * 64 + 32) / 3)
    assert summary["effective_batch"] == pytest.approx(57.6)
    assert summary["data_wait_share"] == pytest.approx(0.6 / 3)
    assert summary["overhead_share"] == pytest.approx((3 - 0.6 - 1.2 - 0.2) / 3)
    assert summary["accumulation_share"] == 0.75
    assert summary["precision"] == "bf16" and summary["process_peak_bytes"] > 1 << 20


def test_window_begins_anew_and_the_total_stays():
    tracker = PerformanceTracker("no", 1, torch.device("cpu"))
    tracker.update(1.0, 10, {})
    assert tracker.take_window()["utterances_per_second"] == 10.0
    assert tracker.take_window() == {}
    tracker.update(1.0, 30, {})
    assert tracker.take_window()["utterances_per_second"] == 30.0
    assert tracker.summary()["utterances_per_second"] == 20.0
