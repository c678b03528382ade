"""A tracker for MLflow, configured by MLflow's environment variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, …).

The run folder stores MLflow's run id, so a resumed run and its final evaluation continue the same MLflow run.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlflow

from speakernet.training.trackers import PROJECT, scalars


class MLflow:
    """A run of MLFLOW_EXPERIMENT_NAME (default `speakernet`), stored in `mlruns/` unless MLFLOW_TRACKING_URI is set."""

    def __init__(self, folder: Path, configuration: Mapping[str, Any], step: int) -> None:
        # Newer versions store runs in files, as is done without an address, only with this switch.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or Path("mlruns").absolute().as_uri())
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        kept = folder / "mlflow.id"
        known = kept.read_text(encoding="utf-8") if kept.exists() else None
        run = mlflow.start_run(known, run_name=folder.name)
        if known is None:
            kept.write_text(run.info.run_id, encoding="utf-8")
            # Only once: MLflow refuses changed parameters, such as the epochs of a continued run.
            mlflow.log_params({f"{section}.{key}": of[key] for section, of in configuration.items() for key in of})

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Log the numbers of one record; characters that MLflow refuses in names (of lists) become underscores."""
        mlflow.log_metrics({re.sub(r"[^\w./ -]", "_", tag): value for tag, value in scalars(kind, values)}, step)

    def results(self, step: int, figures: Mapping[str, Any], plots: Sequence[Path], model: Path) -> None:
        """Log figures, and plots and model file as artifacts."""
        self.record("test", step, figures)
        for path in (*plots, model):
            mlflow.log_artifact(str(path), "plots" if path in plots else "model")

    def close(self) -> None:
        """Mark the run as finished."""
        mlflow.end_run()
