"""TensorBoard: curves with intervals, hyperparameters, the configuration, and the final figures and drawings."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from speakernet.evaluation.plots import new_figure, save_png
from speakernet.training.progress import Progress
from speakernet.training.tensorboard import add_test_results

CONFIGURATION = {
    "data": {"train_list": "/lists/train.txt", "batch_size": 64, "speed_factors": [1.0]},
    "model": {"name": "ResNet", "options": {"channels": 16}},
    "training": {"save_path": "exps/a"},
}


def evaluation(eer: float) -> dict:
    interval = [eer - 1, eer + 1]
    return {
        "eer_percent": eer,
        "eer_interval_percent": interval,
        "min_dcf": {"0.01": eer / 10, "0.05": 0.2},
        "min_dcf_interval": {"0.01": [0.1, 0.9]},
        "num_trials": 100,
        "trials_checksum": 12345,
        "note": "",
    }


def train(folder: Path, first: int, last: int) -> None:
    """Steps first..last with an evaluation after each tenth."""
    progress = Progress(folder, show_bar=False, configuration=CONFIGURATION)
    progress.open(first - 1)
    for step in range(first, last + 1):
        values = {"loss": 1 / step, "margin": 0.2, "learning_rate": 0.1 if step < 15 else 0.01}
        progress.record("step", step, 1 + step // 10, values)
        if step % 10 == 0:
            progress.record("evaluation", step, step // 10, evaluation(30 / step))
    progress.close()


def read(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def points(found: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in found.Scalars(tag)]


def test_costs_and_intervals_are_curves(tmp_path: Path) -> None:
    train(tmp_path, 1, 20)
    found = read(tmp_path)
    tags = set(found.Tags()["scalars"])
    assert points(found, "evaluation/eer_percent") == [(10, 3.0), (20, 1.5)]
    assert points(found, "evaluation/eer_interval_percent/low") == [(10, 2.0), (20, 0.5)]
    assert points(found, "evaluation/min_dcf/0.01") == [(10, pytest.approx(0.3)), (20, pytest.approx(0.15))]
    assert {"evaluation/min_dcf/0.05", "evaluation/min_dcf_interval/0.01/high"} <= tags
    assert len(points(found, "step/loss")) == 20


def test_a_resume_replaces_later_steps(tmp_path: Path) -> None:
    train(tmp_path, 1, 16)
    train(tmp_path, 12, 20)
    assert [step for step, _ in points(read(tmp_path), "step/loss")] == list(range(1, 21))


def test_the_final_evaluation_brings_its_figures_and_drawings(tmp_path: Path) -> None:
    train(tmp_path, 1, 10)
    figure, axes = new_figure("x")
    axes.plot([0, 1])
    save_png(figure, tmp_path / "plots" / "det.png")
    results = {**evaluation(4.0), "cllr": 0.3, "performance": {"utterances_per_second": 200.0}}
    add_test_results(tmp_path, 10, results, [tmp_path / "plots" / "det.png"])
    found = read(tmp_path)
    assert points(found, "test/eer_percent") == [(10, 4.0)]
    assert points(found, "test/eer_interval_percent/high") == [(10, 5.0)]
    assert points(found, "test/cllr") == [(10, pytest.approx(0.3))]
    assert points(found, "test/performance/utterances_per_second") == [(10, 200.0)]
    assert "test/num_trials" not in found.Tags()["scalars"]
    (image,) = found.Images("test/det")
    assert image.encoded_image_string == (tmp_path / "plots" / "det.png").read_bytes() and image.width > image.height
