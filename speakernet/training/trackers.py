"""Trackers, which show the numbers of a run beyond its own files: TensorBoard, Weights & Biases, MLflow, CSV.

A tracker is created with a run folder, the configuration (empty after training) and the step after which it continues.
It has `record(kind, step, values)`, `results(step, figures, plots, model)` for the final evaluation, and `close()`. Its
library is imported only if needed. A tracker that fails is dropped and never ends a run.

The two services are configured by their own environment variables. The run folder stores their run ids, so a resumed
run and its final evaluation continue the same run there.
"""

import importlib
import logging
import math
import os
import pkgutil
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speakernet.files import GrowingFile, atomic_write, error_line

logger = logging.getLogger(__name__)

TRACKERS = {
    "tensorboard": ("tensorboard", "speakernet.training.tensorboard:EventFiles"),
    "wandb": ("wandb", f"{__name__}:WeightsAndBiases"),
    "mlflow": ("mlflow", f"{__name__}:MLflow"),
    "csv": ("csv", f"{__name__}:CurvesAsCsv"),
}
"""Name -> (required library, class)."""
PROJECT = "speakernet"
# `results.json` also has counts, checksums and times, which are not worth tracking.
TEST_FIGURES = (
    *("eer_percent", "eer_interval_percent", "min_dcf", "min_dcf_interval", "cllr", "min_cllr", "act_dcf"),
    *("test_lists", "performance"),
)


@dataclass
class Trackers:
    """The requested trackers behind one interface; each is opened on first use."""

    names: list[str]
    folder: Path
    configuration: Mapping[str, Any]
    step: int
    _open: dict[str, Any] = field(default_factory=dict)

    def each(self, action: str, *arguments: Any) -> None:
        """Call a method on every tracker."""
        for name in list(self.names):
            try:
                if name not in self._open:
                    make = pkgutil.resolve_name(TRACKERS[name][1])
                    self._open[name] = make(self.folder, self.configuration, self.step)
                getattr(self._open[name], action)(*arguments)
            except Exception as error:
                # Libraries raise anything: a full disk, no network, no account.
                self.names.remove(name)
                logger.warning("training.trackers: %s failed and gets no more records (%s)", name, error_line(error))


class CurvesAsCsv:
    """`metrics.csv` in the run folder, with step, name and value on each line."""

    def __init__(self, folder: Path, configuration: Mapping[str, Any], step: int) -> None:
        path = folder / "metrics.csv"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else ["step,name,value"]
        # A resumed run repeats the steps that a killed run took after its last checkpoint.
        kept = [line for line in lines if not line[:1].isdigit() or int(line.partition(",")[0]) <= step]
        if not configuration:
            # After training: the final evaluation may be repeated.
            kept = [line for line in kept if not line.startswith(f"{step},test/")]
        with atomic_write(path) as file:
            file.writelines(f"{line}\n" for line in kept)
        self._file = GrowingFile(path)

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write one line per number."""
        lines = (f"{step},{tag},{value!r}\n" for tag, value in scalars(kind, values))
        self._file.append("".join(lines).encode())

    def results(self, step: int, figures: Mapping[str, Any], plots: Sequence[Path], model: Path) -> None:
        """Write the figures; plots and model are already in the folder."""
        self.record("test", step, figures)

    def close(self) -> None:
        """Nothing to do: every line is written immediately."""


class MLflow:
    """A run of MLFLOW_EXPERIMENT_NAME (default `speakernet`), stored in `mlruns/` unless MLFLOW_TRACKING_URI is set."""

    def __init__(self, folder: Path, configuration: Mapping[str, Any], step: int) -> None:
        self._mlflow = importlib.import_module("mlflow")
        # Newer versions store runs in files, the default without an address, only with this switch.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or Path("mlruns").absolute().as_uri())
        self._mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        kept = folder / "mlflow.id"
        known = kept.read_text(encoding="utf-8") if kept.exists() else None
        run = self._mlflow.start_run(known, run_name=folder.name)
        if known is None:
            kept.write_text(run.info.run_id, encoding="utf-8")
            # Only once: MLflow refuses changed parameters, such as the epochs of a continued run.
            self._mlflow.log_params(
                {f"{section}.{key}": of[key] for section, of in configuration.items() for key in of}
            )

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Log the numbers of one record; characters that MLflow refuses in names (of lists) become underscores."""
        self._mlflow.log_metrics({re.sub(r"[^\w./ -]", "_", tag): value for tag, value in scalars(kind, values)}, step)

    def results(self, step: int, figures: Mapping[str, Any], plots: Sequence[Path], model: Path) -> None:
        """Log figures, and plots and model file as artifacts."""
        self.record("test", step, figures)
        for path in (*plots, model):
            self._mlflow.log_artifact(str(path), "plots" if path in plots else "model")

    def close(self) -> None:
        """Mark the run as finished."""
        self._mlflow.end_run()


class WeightsAndBiases:
    """A run of the project WANDB_PROJECT (default `speakernet`); WANDB_MODE=offline writes files for `wandb sync`."""

    def __init__(self, folder: Path, configuration: Mapping[str, Any], step: int) -> None:
        self._wandb = importlib.import_module("wandb")
        kept = folder / "wandb.id"
        if not kept.exists():
            kept.write_text(secrets.token_hex(4), encoding="utf-8")
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=kept.read_text(encoding="utf-8").strip(),
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

    def results(self, step: int, figures: Mapping[str, Any], plots: Sequence[Path], model: Path) -> None:
        """Log figures, plots as images, and the model file as an artifact."""
        pictures = {f"test/{path.stem}": self._wandb.Image(str(path)) for path in plots}
        self._run.log({**dict(scalars("test", figures)), **pictures, "optimizer_step": step})
        self._run.log_artifact(str(model), name=f"model-{self._run.id}", type="model")

    def close(self) -> None:
        """Finish the wandb session; the run can be resumed."""
        self._run.finish()


def scalars(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The finite numbers of a record by tag, including those of nested mappings and intervals.

    >>> dict(scalars("test", {"min_dcf": {"0.01": 0.5}, "interval": [3.0, 5.0], "note": "none", "is_best": True}))
    {'test/min_dcf/0.01': 0.5, 'test/interval/low': 3.0, 'test/interval/high': 5.0}
    """
    for name, value in values.items():
        tag = f"{kind}/{name}"
        if isinstance(value, Mapping):
            yield from scalars(tag, value)
        elif isinstance(value, list | tuple) and len(value) == 2:
            yield from scalars(tag, dict(zip(("low", "high"), value, strict=True)))
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield tag, value
