"""Where the numbers of a run are shown beside its own files: TensorBoard, Weights & Biases, MLflow, a CSV.

A tracker is made of a run folder, the configuration (empty after the training) and the step after which it goes on. It
has `record(kind, step, values)`, `results(step, figures, plots, model)` for the final evaluation, and `close()`. Its
library is imported when it is asked for. One that fails gets nothing more, and never ends a run.
"""

import contextlib
import importlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from speakernet.files import GrowingFile, atomic_write, error_line

logger = logging.getLogger(__name__)

TRACKERS = {
    "tensorboard": ("tensorboard", "speakernet.training.tensorboard:EventFiles"),
    "wandb": ("wandb", "speakernet.training.wandb_tracker:WeightsAndBiases"),
    "mlflow": ("mlflow", "speakernet.training.mlflow_tracker:MLflow"),
    "csv": ("csv", "speakernet.training.trackers:CurvesAsCsv"),
}
"""Name -> the library that it needs, and the class."""
PROJECT = "speakernet"
# Beside these, results hold counts, checksums and times, which are not curves of quality.
TEST_FIGURES = (
    *("eer_percent", "eer_interval_percent", "min_dcf", "min_dcf_interval", "cllr", "min_cllr", "act_dcf"),
    *("test_lists", "performance"),
)


class Trackers:
    """Those that were asked for, as one."""

    def __init__(self, names: Sequence[str], folder: Path, configuration: Mapping[str, Any], step: int) -> None:
        self._open: dict[str, Any] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            with self._surviving(name):
                module, _, kind = TRACKERS[name][1].partition(":")
                self._open[name] = getattr(importlib.import_module(module), kind)(folder, configuration, step)

    def each(self, action: str, *arguments: Any) -> None:
        """Call a method of every tracker."""
        for name in list(self._open):
            with self._surviving(name):
                getattr(self._open[name], action)(*arguments)

    @contextlib.contextmanager
    def _surviving(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Whatever a library raises: a full disk, no network, no account.
            self._open.pop(name, None)
            logger.warning("training.trackers: %s gets no more of this run (%s)", name, error_line(error))


class CurvesAsCsv:
    """`metrics.csv` in the run folder: step, name and value a line."""

    def __init__(self, folder: Path, configuration: Mapping[str, Any], step: int) -> None:
        path = folder / "metrics.csv"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else ["step,name,value"]
        # What a killed run wrote after its last checkpoint comes again.
        kept = [line for line in lines if not line[:1].isdigit() or int(line.partition(",")[0]) <= step]
        with atomic_write(path) as file:
            file.writelines(f"{line}\n" for line in kept)
        self._file = GrowingFile(path)

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """A line for each number."""
        lines = (f"{step},{tag},{value!r}\n" for tag, value in scalars(kind, values))
        self._file.append("".join(lines).encode())

    def results(self, step: int, figures: Mapping[str, Any], plots: Sequence[Path], model: Path) -> None:
        """The figures; drawings and model are in the folder."""
        self.record("test", step, figures)

    def close(self) -> None:
        """Every line is written at once."""


def final_figures(results: Mapping[str, Any]) -> dict[str, Any]:
    """What trackers are given of `results.json`."""
    return {name: results[name] for name in TEST_FIGURES if name in results}


def scalars(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The finite numbers of a record by tag, those of nested mappings and of intervals too.

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
