"""Trackers, which show the numbers of a run beyond its own files: TensorBoard, Weights & Biases,
MLflow.

The library of a tracker is imported only if needed. A tracker that fails is dropped and never ends
a run.
"""

import logging
import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speakernet.files import error_line

logger = logging.getLogger(__name__)

TRACKERS = {
    "tensorboard": ("tensorboard", "speakernet.training.tensorboard:EventFiles"),
    "wandb": ("wandb", "speakernet.training.other_trackers:WeightsAndBiases"),
    "mlflow": ("mlflow", "speakernet.training.other_trackers:MLflow"),
}
"""Name -> (required library, class)."""
# `results.json` also has counts, checksums and times, which are not worth tracking.
TEST_FIGURES = (
    "eer_percent",
    "eer_interval_percent",
    "min_dcf",
    "min_dcf_interval",
    "cllr",
    "min_cllr",
    "act_dcf",
    "test_lists",
    "performance",
)


class Tracker:
    """What every tracker offers. Its constructor takes the run folder, the configuration (empty
    after training) and the step after which it continues.
    """

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Send the numbers of one record."""

    def results(
        self, step: int, figures: Mapping[str, Any], plots: Sequence[Path], model: Path
    ) -> None:
        """Send figures, plots and model file of the final evaluation; `step` is the last of the
        training.
        """

    def close(self) -> None:
        """Flush and end."""


@dataclass
class Trackers(Tracker):
    """The requested trackers behind one interface; each is opened on first use."""

    names: list[str]
    folder: Path
    configuration: Mapping[str, Any]
    step: int
    _open: dict[str, Tracker] = field(default_factory=dict)

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """See `Tracker`; so do the other methods."""
        self._each(lambda tracker: tracker.record(kind, step, values))

    def results(
        self, step: int, figures: Mapping[str, Any], plots: Sequence[Path], model: Path
    ) -> None:
        self._each(lambda tracker: tracker.results(step, figures, plots, model))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        # A run of days must not end because a dashboard is down. Every call is guarded; after a
        # tracker's first failure, which is logged, it is not called again.
        for name in list(self.names):
            try:
                if name not in self._open:
                    _, location = TRACKERS[name]
                    make = pkgutil.resolve_name(location)
                    self._open[name] = make(self.folder, self.configuration, self.step)
                call(self._open[name])
            except Exception as error:
                # Libraries raise anything: a full disk, no network, no account.
                self.names.remove(name)
                reason = error_line(error)
                logger.warning("training.trackers: %s failed and is disabled (%s)", name, reason)


def scalars(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The finite numbers of a record by tag, including those of nested mappings and intervals.

    >>> figures = {"min_dcf": {"0.01": 0.5}, "interval": [3.0, 5.0]}
    >>> dict(scalars("test", {**figures, "note": "none", "is_best": True}))
    {'test/min_dcf/0.01': 0.5, 'test/interval/low': 3.0, 'test/interval/high': 5.0}
    """
    for name, value in values.items():
        tag = f"{kind}/{name}"
        if isinstance(value, Mapping):
            yield from scalars(tag, value)
        # A tracker has no intervals, so each becomes two curves.
        elif isinstance(value, list | tuple) and len(value) == 2:
            yield from scalars(tag, {"low": value[0], "high": value[1]})
        # Python counts a `bool` as an integer.
        elif isinstance(value, bool):
            continue
        elif isinstance(value, int | float) and math.isfinite(value):
            yield tag, value
