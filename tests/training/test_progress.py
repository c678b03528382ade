"""Output and records of a run: one bar, TensorBoard, a profile; records removed on resuming."""

import json
import logging

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from torch import nn

from speakernet import terminal
from speakernet.evaluation.plots import new_figure, save_figure
from speakernet.training.options import RuntimeOptions
from speakernet.training.profiler import StepProfiler
from speakernet.training.progress import Progress, RunSpeed
from speakernet.training.trackers import TEST_FIGURES, Trackers
from tests.outcomes import records_of

VALUES = {
    "loss": 2.5,
    "utterances_per_second": 200.0,
    "data_wait_share": 0.05,
    "run_time_left": "0:12:31",
}


@pytest.fixture
def shown(tmp_path, monkeypatch, caplog):
    """A run's progress without a terminal, logging at every batch."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.0)
    return Progress(tmp_path)


def test_bar(shown, caplog, tmp_path):
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
    assert [record["step"] for record in records_of(tmp_path)] == [1, 2]


def test_records_after_the_last_checkpoint(tmp_path):
    """An epoch's record has its last step, after which the checkpoint may have been written."""
    first = Progress(tmp_path)
    first.open(0)
    first.record("step", 2, 1, {"loss": 1.0})
    num_lines = first.num_lines
    first.record("epoch", 2, 1, {"loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "st')
    again = Progress(tmp_path)
    again.open(2, num_lines)
    again.record("epoch", 2, 1, {"loss": float("nan")})
    again.close()
    records = records_of(tmp_path)
    assert [record["kind"] for record in records] == ["step", "epoch"] and again.num_lines == 2
    assert num_lines == 1 and records[1]["loss"] is None


def test_rates_since_the_last_record():
    tracker = RunSpeed("bf16", 4, torch.device("cpu"))
    for _ in range(4):
        tracker.update(0.5, 64, {"data": 0.1, "forward_backward": 0.3, "optimizer": 0.05})
    tracker.update(1.0, 32, {"data": 0.2})
    summary = tracker.summary()
    assert summary["steps_per_second"] == pytest.approx(5 / 3)
    assert summary["overhead_share"] == pytest.approx((3 - 0.6 - 1.2 - 0.2) / 3)
    assert tracker.take_window()["utterances_per_second"] == pytest.approx(96)
    assert tracker.take_window() == {}
    tracker.update(1.0, 30, {})
    assert tracker.take_window()["utterances_per_second"] == 30.0
    assert tracker.take_epoch()["utterances_per_second"] == pytest.approx((4 * 64 + 62) / 4)


CONFIGURATION = {
    "data": {"batch_size": 64, "speed_factors": [1.0]},
    "model": {"options": {"channels": 16}},
}


def evaluation(eer):
    costs = {"min_dcf": {"0.01": eer / 10, "0.05": 0.2}, "min_dcf_interval": {"0.01": [0.1, 0.9]}}
    facts = {"eer_percent": eer, "eer_interval_percent": [eer - 1, eer + 1], **costs}
    return {**facts, "num_trials": 100, "note": ""}


@pytest.fixture(autouse=True)
def _ordered_event_files(monkeypatch):
    """Event files created in the same second are ordered by their suffix as text, so .10 precedes
    .9.
    """
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))


def train(folder, first, last):
    """Steps first..last with an evaluation after each tenth."""
    progress = Progress(folder, trackers=["tensorboard"], configuration=CONFIGURATION)
    progress.open(first - 1)
    for step in range(first, last + 1):
        values = {"loss": 1 / step, "margin": 0.2, "learning_rate": 0.1 if step < 15 else 0.01}
        progress.record("step", step, 1 + step // 10, values)
        if step % 10 == 0:
            progress.record("evaluation", step, step // 10, evaluation(30 / step))
    progress.close()


def read(folder):
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def points(events, tag):
    return [(point.step, point.value) for point in events.Scalars(tag)]


def test_resume_replaces_later_steps(tmp_path):
    train(tmp_path, 1, 16)
    train(tmp_path, 12, 20)
    assert [step for step, _ in points(read(tmp_path), "step/loss")] == list(range(1, 21))


def test_final_evaluation(tmp_path):
    train(tmp_path, 1, 10)
    figure, axes = new_figure("x")
    axes.plot([0, 1])
    save_figure(figure, tmp_path / "plots" / "det.png")
    results = {**evaluation(4.0), "performance": {"utterances_per_second": 200.0}}
    trackers = Trackers(["tensorboard"], tmp_path, {}, 10)
    figures = {name: value for name, value in results.items() if name in TEST_FIGURES}
    trackers.results(10, figures, [tmp_path / "plots" / "det.png"], tmp_path / "best.pt")
    trackers.close()
    found = read(tmp_path)
    assert points(found, "test/eer_percent") == [(10, 4.0)]
    assert points(found, "test/eer_interval_percent/high") == [(10, 5.0)]
    assert points(found, "test/performance/utterances_per_second") == [(10, 200.0)]
    assert "test/num_trials" not in found.Tags()["scalars"]
    (image,) = found.Images("test/det")
    assert (
        image.encoded_image_string == (tmp_path / "plots" / "det.png").read_bytes()
        and image.width > image.height
    )


@pytest.mark.parametrize(
    ("num_steps", "expected"), [(5, "trace of 2 steps"), (3, "trace of 1 steps"), (2, "nothing")]
)
def test_profile(tmp_path, caplog, num_steps, expected):
    caplog.set_level(logging.INFO)
    profiler = StepProfiler(RuntimeOptions(profile_steps=2), tmp_path, torch.device("cpu"))
    net = nn.Linear(64, 64)
    for _ in range(num_steps):
        with torch.profiler.record_function("speakernet.forward"):
            loss = net(torch.randn(32, 64)).square().mean()
        with torch.profiler.record_function("speakernet.backward"):
            loss.backward()
        profiler.step()
    profiler.close()
    assert expected in caplog.text
    if num_steps > 2:
        assert json.loads((tmp_path / "steps.pt.trace.json").read_text())["traceEvents"]
        assert (
            "addmm" in caplog.text and "data 0%" in caplog.text and "backward 0%" not in caplog.text
        )
