"""What TensorBoard shows of a run: curves with their intervals, the configuration, figures of the final evaluation.

Importing this file imports TensorBoard, which takes a second: whoever needs it imports it late.
"""

import logging
import math
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from torch.utils.tensorboard import SummaryWriter

from speakernet.files import error_line

logger = logging.getLogger(__name__)

# Beside these, results hold counts, checksums and times, which are not curves of quality.
TEST_FIGURES = (
    *("eer_percent", "eer_interval_percent", "min_dcf", "min_dcf_interval", "cllr", "min_cllr", "act_dcf"),
    *("test_lists", "performance"),
)
FLUSH_SECONDS = 5
"""A killed run loses no more than this."""


class EventFiles:
    """Event files of one training run from after `step` on: events of later steps, of a killed run, are not shown.

    `configuration` (section -> option -> value) is shown as text.
    """

    def __init__(self, folder: Path, configuration: Mapping[str, Any], step: int) -> None:
        threading.excepthook = _without_its_traceback
        # torch writes the step at which earlier files end only if it is above 0.
        self._writer: SummaryWriter | None = SummaryWriter(str(folder), purge_step=step + 1, flush_secs=FLUSH_SECONDS)
        if configuration:
            lines = yaml.safe_dump(dict(configuration), sort_keys=False, allow_unicode=True).splitlines()
            # Four spaces make it code in Markdown, as TensorBoard shows text.
            self._writer.add_text("configuration", "".join(f"    {line}\n" for line in lines), step)

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Take in the numbers of one record; a disk that is full costs the curves, never the run."""
        if self._writer is None:
            return
        try:
            for tag, value in scalars(kind, values):
                self._writer.add_scalar(tag, value, step)
        except OSError as error:
            logger.warning("TensorBoard cannot be written any more: %s", error_line(error))
            self._writer = None

    def close(self) -> None:
        """Write what is left."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except OSError as error:
                logger.warning("TensorBoard's curves are incomplete: %s", error_line(error))


def _without_its_traceback(arguments: threading.ExceptHookArgs) -> None:
    """A disk that fails ends TensorBoard's thread; the next record raises the same error, which is warned about."""
    is_its_own = type(arguments.thread).__module__.startswith("tensorboard.")
    if not (is_its_own and issubclass(arguments.exc_type, OSError)):
        threading.__excepthook__(arguments)


def add_test_results(folder: Path, step: int, results: Mapping[str, Any], plots: Sequence[Path]) -> None:
    """Add the final evaluation (`results.json` and drawings as PNG) to a run's events; `step` ended the training."""
    with SummaryWriter(str(folder)) as writer:
        for tag, value in scalars("test", {name: results.get(name) for name in TEST_FIGURES}):
            writer.add_scalar(tag, value, step)
        for path in plots:
            # Ready-made: drawing them once more would need the scores.
            content = path.read_bytes()
            # The first block of every PNG.
            width, height = struct.unpack(">II", content[16:24])
            image = Summary.Image(encoded_image_string=content, width=width, height=height, colorspace=4)
            summary = Summary(value=[Summary.Value(tag=f"test/{path.stem}", image=image)])
            writer._get_file_writer().add_summary(summary, step)


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
