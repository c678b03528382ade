"""The trackers other than TensorBoard: Weights & Biases, MLflow.

Both are configured by their own environment variables. The run folder stores their run
ids, so a resumed run and its final evaluation continue the same run there.
"""

import importlib
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speakernet.training.trackers import Tracker, scalars

PROJECT = "speakernet"


class MLflow(Tracker):
    """A run of MLFLOW_EXPERIMENT_NAME (default `speakernet`), stored in the run folder's `mlruns`
    unless MLFLOW_TRACKING_URI is set.
    """

    def __init__(self, folder: Path, configuration: Mapping[str, Any], step: int) -> None:
        self._mlflow = importlib.import_module("mlflow")
        # Without an address, runs are stored in files, which newer versions do only with this
        # switch.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        id_file = folder / "mlflow.id"
        run_id = id_file.read_text("utf-8") if id_file.exists() else None
        store = folder / "mlruns"
        if run_id and not store.exists():
            # Before version 0.4.0, runs were stored in the working directory.
            store = Path("mlruns")
        self._mlflow.set_tracking_uri(
            os.environ.get("MLFLOW_TRACKING_URI") or store.absolute().as_uri()
        )
        self._mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        run = self._mlflow.start_run(run_id, run_name=folder.name)
        if run_id is None:
            id_file.write_text(run.info.run_id, encoding="utf-8")
            # Only once: MLflow refuses changed parameters, such as the epochs of a continued run.
            parameters = {}
            for section, options in configuration.items():
                for name, value in options.items():
                    parameters[f"{section}.{name}"] = value
            self._mlflow.log_params(parameters)

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Log the numbers of one record; characters that MLflow refuses in names (of lists) become
        underscores.
        """
        self._mlflow.log_metrics(
            {re.sub(r"[^\w./ -]", "_", tag): value for tag, value in scalars(kind, values)}, step
        )

    def results(
        self, step: int, figures: Mapping[str, Any], plots: Sequence[Path], model: Path
    ) -> None:
        """Log figures, and plots and model file as artifacts."""
        self.record("test", step, figures)
        for path in plots:
            self._mlflow.log_artifact(str(path), "plots")
        self._mlflow.log_artifact(str(model), "model")

    def close(self) -> None:
        """Mark the run as finished."""
        self._mlflow.end_run()


class WeightsAndBiases(Tracker):
    """A run of the project WANDB_PROJECT (default `speakernet`); WANDB_MODE=offline writes files
    for `wandb sync`.
    """

    def __init__(self, folder: Path, configuration: Mapping[str, Any], step: int) -> None:
        self._wandb = importlib.import_module("wandb")
        id_file = folder / "wandb.id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4), encoding="utf-8")
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=id_file.read_text("utf-8").strip(),
            resume="allow",
            dir=folder,
            config=dict(configuration) or None,
            settings=self._wandb.Settings(console="off", silent=True),
        )
        # wandb's own steps can only increase, but a resumed run goes back to its last checkpoint.
        self._run.define_metric("*", step_metric="optimizer_step")

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Log the numbers of one record."""
        self._run.log({**dict(scalars(kind, values)), "optimizer_step": step})

    def results(
        self, step: int, figures: Mapping[str, Any], plots: Sequence[Path], model: Path
    ) -> None:
        """Log figures, plots as images, and the model file as an artifact."""
        pictures = {f"test/{path.stem}": self._wandb.Image(str(path)) for path in plots}
        self._run.log({**dict(scalars("test", figures)), **pictures, "optimizer_step": step})
        # Named after the run, because artifacts of one name become versions of one model.
        self._run.log_artifact(str(model), name=f"model-{self._run.id}", type="model")

    def close(self) -> None:
        """Finish the wandb session; the run can be resumed."""
        self._run.finish()
