"""Event files: TensorBoard reads what was written, and hides what a resumed run replaced."""

from pathlib import Path

import pytest
from torch.utils.tensorboard.summary import scalar

from speakernet import appending
from speakernet.training.progress import Progress
from speakernet.training.tensorboard import EventFile


def drawn(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Curve -> its points, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder)).Reload()
    return {tag: [(point.step, point.value) for point in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_reads_the_curves(tmp_path: Path) -> None:
    shown = Progress(tmp_path, show_bar=False)
    shown.open(0)
    for step in (1, 2, 3):
        shown.record("step", step, 1, {"loss": step / 2, "left": "0:01", "bad": float("nan"), "is": True})
    # Before it is closed: a killed run keeps its curves.
    assert drawn(tmp_path) == {"step/loss": [(1, 0.5), (2, 1.0), (3, 1.5)]}
    shown.close()


def test_a_resumed_run_takes_back_what_it_does_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = EventFile(tmp_path, 0)
    for step in (1, 2, 3):
        first.add(scalar("step/loss", 1.0), step)
    monkeypatch.setattr("speakernet.training.tensorboard.time.time", lambda: 4e9)
    again = EventFile(tmp_path, 1)
    again.add(scalar("step/loss", 9.0), 2)
    assert drawn(tmp_path) == {"step/loss": [(1, 1.0), (2, 9.0)]}


def test_a_full_disk_costs_points_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_arguments) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(appending, "_write_whole", full)
    curves = EventFile(tmp_path, 0)
    curves.add(scalar("step/loss", 1.0), 1)
    monkeypatch.undo()
    curves.add(scalar("step/loss", 2.0), 2)
    curves.close()
    assert drawn(tmp_path) == {"step/loss": [(2, 2.0)]} and caplog.text.count("No space left") == 1
