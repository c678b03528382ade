"""What TensorBoard shows of a run: curves with their intervals, the settings, and the figures of the final evaluation.

A curve that never changes says one number and hides those that do: its points are held back until it changes. Importing
this file imports TensorBoard, which takes a second: whoever needs it imports it late.
"""

import contextlib
import math
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from torch.utils.tensorboard.summary import custom_scalars, hparams, scalar, text

from speakernet.training.event_file import EventFile

# A single point of these is worth seeing, and two equal ones are news.
ALWAYS_SHOWN = ("evaluation/eer_", "evaluation/min_dcf", "step/loss", "epoch/loss")
EER, EER_LOW, EER_HIGH = (
    f"evaluation/eer_{name}" for name in ("percent", "interval_percent/low", "interval_percent/high")
)
MIN_DCF = "evaluation/min_dcf/0.01"
TEST_EER = "test/eer_percent"
# Where something lies or what the machine is: no settings that two runs are compared by.
NO_HYPERPARAMETERS = ("_path", "_list", "num_workers", "threads")
# Beside these, results hold counts, checksums and times, which are no curves of quality.
TEST_FIGURES = ("eer_percent", "eer_interval_percent", "min_dcf", "min_dcf_interval", "cllr", "min_cllr", "act_dcf")


class EventFiles:
    """Event files of one training run.

    Args:
        folder: the run folder.
        configuration: section -> option -> plain value; shown as text and as hyperparameters.
    """

    def __init__(self, folder: Path, configuration: Mapping[str, Any]) -> None:
        self._folder, self._configuration = folder, configuration
        self._curves = _Curves()
        self._file: EventFile | None = None

    def open(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Begin or go on after `step`.

        Args:
            step: events of later steps, which a killed run left, are not shown.
            records: lines of metrics.jsonl up to that step: which curves have changed so far.
        """
        self._file = EventFile(self._folder, step)
        for record in records:
            for tag, value in scalars(str(record.get("kind", "")), record):
                self._curves.due(tag, value, int(record.get("step", 0)))
        if self._configuration:
            lines = yaml.safe_dump(dict(self._configuration), sort_keys=False, allow_unicode=True).splitlines()
            # Four spaces make it code in Markdown, as TensorBoard shows text.
            self._file.add(text("configuration", "".join(f"    {line}\n" for line in lines)), step)
            for summary in hparams(hyperparameters(self._configuration), dict.fromkeys((EER, MIN_DCF, TEST_EER), 0.0)):
                self._file.add(summary, step)
        self._file.add(custom_scalars({"evaluation": {"EER (%)": ["Margin", [EER, EER_LOW, EER_HIGH]]}}), step)

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Take in the numbers of one record."""
        assert self._file is not None, "opened before anything is recorded"
        for tag, value in scalars(kind, values):
            for at, one, moment in self._curves.due(tag, value, step):
                self._file.add(scalar(tag, one), at, moment)

    def close(self) -> None:
        """Let go of the files."""
        if self._file is not None:
            self._file.close()
            self._file = None


class _Curves:
    """Which points of which curves are due: none while a curve has one value, then all that its course needs."""

    def __init__(self) -> None:
        self._changing: set[str] = set()
        self._held: dict[str, list[tuple[int, float, float]]] = {}

    def due(self, tag: str, value: float, step: int) -> list[tuple[int, float, float]]:
        """Take in a point; returns (step, value, moment) of those to be written now."""
        point = (step, value, time.time())
        if tag in self._changing or tag.startswith(ALWAYS_SHOWN):
            return [point]
        held = self._held.setdefault(tag, [])
        if not held or held[0][1] == value:
            # Of an even stretch its two ends are enough.
            self._held[tag] = [*held[:1], point]
            return []
        self._changing.add(tag)
        return [*self._held.pop(tag), point]


def add_test_results(folder: Path, step: int, results: Mapping[str, Any], plots: Sequence[Path]) -> None:
    """Add the final evaluation to a run's events: its figures with their intervals, and drawings.

    Args:
        folder: the run folder.
        step: of the end of the training.
        results: as in `results.json`.
        plots: PNG files.
    """
    with contextlib.closing(EventFile(folder, step)) as file:
        for tag, value in scalars("test", {name: results.get(name) for name in TEST_FIGURES}):
            file.add(scalar(tag, value), step)
        for path in plots:
            # Ready-made: drawing them once more would need the scores.
            content = path.read_bytes()
            # The first block of every PNG.
            width, height = struct.unpack(">II", content[16:24])
            image = Summary.Image(encoded_image_string=content, width=width, height=height, colorspace=4)
            summary = Summary(value=[Summary.Value(tag=f"test/{path.stem}", image=image)])
            file.add(summary, step)


def scalars(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The finite numbers of a record by tag; those of nested mappings and of intervals likewise.

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


def hyperparameters(configuration: Mapping[str, Any], prefix: str = "") -> dict[str, bool | float | str]:
    """Dotted option -> value, without paths and whatever else only says where a run was made."""
    found: dict[str, bool | float | str] = {}
    for name, value in configuration.items():
        if isinstance(value, Mapping):
            found |= hyperparameters(value, f"{prefix}{name}.")
        elif not name.endswith(NO_HYPERPARAMETERS) and value not in (None, ""):
            found[f"{prefix}{name}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return found
