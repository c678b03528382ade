"""Weights & Biases, MLflow beside TensorBoard, with the real libraries, offline."""

import logging
from pathlib import Path

import pytest

from speakernet.training.options import TrainingOptions
from speakernet.training.progress import Progress
from speakernet.training.tensorboard import EventFiles
from speakernet.training.trackers import TRACKERS, Trackers
from tests.outcomes import records_of

CONFIGURATION = {"model": {"name": "ResNet"}, "training": {"max_epochs": 2}}
FIGURES = {"eer_percent": 4.0, "min_dcf": {"0.01": 0.4}}


def run(folder, name, first, last, *, ends=False):
    """Steps first..last, and the final evaluation."""
    progress = Progress(folder, trackers=[name], configuration=CONFIGURATION)
    progress.open(first - 1)
    for step in range(first, last + 1):
        progress.record("step", step, 1, {"loss": 1 / step, "note": "none"})
    progress.close()
    if ends:
        (folder / "best.pt").write_bytes(b"a model")
        (folder / "det.png").write_bytes(PICTURE)
        after = Trackers([name], folder, {}, last)
        after.results(last, FIGURES, [folder / "det.png"], folder / "best.pt")
        after.close()


PICTURE = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415408d763f8cfc000000301"
    "0100c9fe92ef0000000049454e44ae426082"
)
"""One pixel."""


def test_names():
    assert TrainingOptions().trackers == ("tensorboard",)
    assert set(TrainingOptions.model_fields["trackers"].annotation.__args__[0].__args__) == set(
        TRACKERS
    )


@pytest.mark.slow
@pytest.mark.needs("wandb")
def test_wandb_offline(tmp_path, monkeypatch, caplog):
    from wandb.sdk.wandb_run import Run

    log = Run.log
    rows = []
    configurations = []

    def noted(run, row):
        rows.append(row)
        configurations.append(dict(run.config))
        log(run, row)

    monkeypatch.setattr(Run, "log", noted)
    monkeypatch.setenv("WANDB_MODE", "offline")
    run(tmp_path, "wandb", 1, 2, ends=True)
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    kept = (tmp_path / "wandb.id").read_text()
    # Training and final evaluation, which `wandb sync` joins into one run.
    assert len(files) == 2 and all(kept in file.name for file in files)
    assert configurations[0]["model"] == {"name": "ResNet"}
    assert rows[:2] == [
        {"step/loss": 1.0, "optimizer_step": 1},
        {"step/loss": 0.5, "optimizer_step": 2},
    ]
    assert rows[-1]["test/eer_percent"] == 4.0
    assert list(tmp_path.glob("wandb/*/files/media/images/test/det_*.png"))
    assert "wandb failed" not in caplog.text


@pytest.mark.slow
@pytest.mark.needs("mlflow")
def test_mlflow_in_files(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run(tmp_path / "run", "mlflow", 1, 2)
    monkeypatch.setitem(
        FIGURES, "test_lists", {"my list (E)": {"eer_percent": 5.0}, "a+b": {"eer_percent": 6.0}}
    )
    run(tmp_path / "run", "mlflow", 3, 3, ends=True)
    client = mlflow.MlflowClient((tmp_path / "run" / "mlruns").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("speakernet").experiment_id])
    assert found.info.run_name == "run" and found.info.status == "FINISHED"
    assert found.data.params == {"model.name": "ResNet", "training.max_epochs": "2"}
    losses = client.get_metric_history(found.info.run_id, "step/loss")
    assert [(loss.step, loss.value) for loss in losses] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert found.data.metrics["test/min_dcf/0.01"] == 0.4
    names = ("my list _E_", "a_b")
    assert [found.data.metrics[f"test/test_lists/{name}/eer_percent"] for name in names] == [
        5.0,
        6.0,
    ]
    stored = Path(client.download_artifacts(found.info.run_id, "model/best.pt"))
    assert stored.read_bytes() == b"a model"
    assert [artifact.path for artifact in client.list_artifacts(found.info.run_id, "plots")] == [
        "plots/det.png"
    ]


@pytest.mark.parametrize("broken", ["__init__", "record", "results", "close"])
def test_failing_tracker(tmp_path, monkeypatch, caplog, broken):
    def fail(self, *arguments):
        raise RuntimeError("no network\nat all")

    monkeypatch.setattr(EventFiles, broken, fail)
    caplog.set_level(logging.WARNING)
    run(tmp_path, "tensorboard", 1, 3, ends=True)
    assert len(records_of(tmp_path)) == 3
    failures = [message for message in caplog.messages if "tensorboard" in message]
    # Training and final evaluation.
    assert all("RuntimeError: no network at all" in message for message in failures)
    assert len(failures) == (1 if broken == "results" else 2)
