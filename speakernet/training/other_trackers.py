"""Weights & Biases and MLflow, by their own environment variables (WANDB_MODE, MLFLOW_TRACKING_URI, …).

A run that goes on, and its final evaluation, find the run of the service by the name kept in the run folder.
"""

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speakernet.training.trackers import scalars

PROJECT = "speakernet"
MOST_PARAMETERS = 100
"""That MLflow takes at once."""


class WeightsAndBiases:
    """A run of the project `speakernet`, or of WANDB_PROJECT; WANDB_MODE=offline writes files for `wandb sync`."""

    def __init__(self, folder: Path, configuration: Mapping[str, Any], step: int) -> None:
        # Late: either library may not be installed.
        import wandb

        self._wandb, kept = wandb, folder / "wandb.id"
        if not kept.exists():
            kept.write_text(secrets.token_hex(4), encoding="utf-8")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=kept.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=folder,
            config=dict(configuration) or None,
            settings=wandb.Settings(console="off", silent=True),
        )
        # Its own steps only grow, and those of a resumed run go back to its last checkpoint.
        self._run.define_metric("*", step_metric="optimizer_step")

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """The numbers of one record."""
        self._run.log({**dict(scalars(kind, values)), "optimizer_step": step})

    def results(self, step: int, figures: Mapping[str, Any], plots: Sequence[Path], model: Path) -> None:
        """Figures as the summary too, drawings as images, the model file as an artifact."""
        pictures = {f"test/{path.stem}": self._wandb.Image(str(path)) for path in plots}
        self._run.log({**dict(scalars("test", figures)), **pictures, "optimizer_step": step})
        self._run.log_artifact(str(model), name=f"model-{self._run.id}", type="model")

    def close(self) -> None:
        """End the session; the run can be continued."""
        self._run.finish()


class MLflow:
    """A run of the experiment `speakernet`, or of MLFLOW_EXPERIMENT_NAME; without MLFLOW_TRACKING_URI in `mlruns/`."""

    def __init__(self, folder: Path, configuration: Mapping[str, Any], step: int) -> None:
        # Without an address it keeps its runs in files, which newer versions do only if they are asked to.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        # Late: either library may not be installed.
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric, kept = Metric, folder / "mlflow.id"
        self._client = mlflow.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or Path("mlruns").absolute().as_uri())
        if not kept.exists():
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            experiment = self._client.get_experiment_by_name(name)
            number = experiment.experiment_id if experiment else self._client.create_experiment(name)
            run = self._client.create_run(number, run_name=folder.name)
            # Once: it refuses parameters that change, such as the epochs of a run that is continued.
            given = [Param(f"{section}.{key}", str(of[key])) for section, of in configuration.items() for key in of]
            for start in range(0, len(given), MOST_PARAMETERS):
                self._client.log_batch(run.info.run_id, params=given[start : start + MOST_PARAMETERS])
            kept.write_text(run.info.run_id, encoding="utf-8")
        self.run_id = kept.read_text(encoding="utf-8").strip()
        self._client.update_run(self.run_id, "RUNNING")

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """The numbers of one record."""
        now = round(1000 * time.time())
        metrics = [self._metric(tag, value, now, step) for tag, value in scalars(kind, values)]
        self._client.log_batch(self.run_id, metrics=metrics)

    def results(self, step: int, figures: Mapping[str, Any], plots: Sequence[Path], model: Path) -> None:
        """Figures, and drawings and model file as artifacts."""
        self.record("test", step, figures)
        for path in (*plots, model):
            self._client.log_artifact(self.run_id, str(path), "plots" if path in plots else "model")

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self.run_id)
