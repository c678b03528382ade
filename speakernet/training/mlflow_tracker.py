"""MLflow, by its own environment variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, …).

A run that goes on, and its final evaluation, find the run of the service by the name kept in the run folder.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlflow

from speakernet.training.trackers import PROJECT, scalars


class MLflow:
    """A run of the experiment `speakernet`, or of MLFLOW_EXPERIMENT_NAME; without MLFLOW_TRACKING_URI in `mlruns/`."""

    def __init__(self, folder: Path, configuration: Mapping[str, Any], step: int) -> None:
        # Without an address it keeps its runs in files, which newer versions do only if they are asked to.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or Path("mlruns").absolute().as_uri())
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        kept = folder / "mlflow.id"
        known = kept.read_text(encoding="utf-8") if kept.exists() else None
        run = mlflow.start_run(known, run_name=folder.name)
        if known is None:
            kept.write_text(run.info.run_id, encoding="utf-8")
            # Once: it refuses parameters that change, such as the epochs of a run that is continued.
            mlflow.log_params({f"{section}.{key}": of[key] for section, of in configuration.items() for key in of})

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """The numbers of one record."""
        mlflow.log_metrics(dict(scalars(kind, values)), step)

    def results(self, step: int, figures: Mapping[str, Any], plots: Sequence[Path], model: Path) -> None:
        """Figures, and drawings and model file as artifacts."""
        self.record("test", step, figures)
        for path in (*plots, model):
            mlflow.log_artifact(str(path), "plots" if path in plots else "model")

    def close(self) -> None:
        """Mark the run as finished."""
        mlflow.end_run()
