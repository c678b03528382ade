"""Where the numbers of a run are shown beside its own files: TensorBoard, Weights & Biases, MLflow, a CSV.

A tracker is made of a run folder, the configuration (empty after the training) and the step after which it goes on. It
has `record(kind, step, values)`, `results(step, figures, plots, model)` for the final evaluation, and `close()`. Its
library is imported when it is asked for. One that fails gets nothing more, and never ends a run.
"""

import importlib
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speakernet.files import error_line

logger = logging.getLogger(__name__)

TRACKERS = {
    "tensorboard": ("tensorboard", "speakernet.training.tensorboard:EventFiles"),
    "wandb": ("wandb", "speakernet.training.wandb_tracker:WeightsAndBiases"),
    "mlflow": ("mlflow", "speakernet.training.mlflow_tracker:MLflow"),
    "csv": ("csv", "speakernet.training.csv_tracker:CurvesAsCsv"),
}
"""Name -> the library that it needs, and the class."""
PROJECT = "speakernet"
# Beside these, `results.json` holds counts, checksums and times, which are not curves of quality.
TEST_FIGURES = (
    *("eer_percent", "eer_interval_percent", "min_dcf", "min_dcf_interval", "cllr", "min_cllr", "act_dcf"),
    *("test_lists", "performance"),
)


@dataclass
class Trackers:
    """Those that were asked for, as one; each is opened when there is something to tell it."""

    names: list[str]
    folder: Path
    configuration: Mapping[str, Any]
    step: int
    _open: dict[str, Any] = field(default_factory=dict)

    def each(self, action: str, *arguments: Any) -> None:
        """Call a method of every tracker."""
        for name in list(self.names):
            try:
                if name not in self._open:
                    module, _, kind = TRACKERS[name][1].partition(":")
                    make = getattr(importlib.import_module(module), kind)
                    self._open[name] = make(self.folder, self.configuration, self.step)
                getattr(self._open[name], action)(*arguments)
            except Exception as error:
                # Whatever a library raises: a full disk, no network, no account.
                self.names.remove(name)
                logger.warning("training.trackers: %s gets no more of this run (%s)", name, error_line(error))


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
