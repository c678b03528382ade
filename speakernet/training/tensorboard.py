"""A tracker for TensorBoard: curves with their intervals, the configuration, figures of the final
evaluation.

Importing this file imports TensorBoard, which takes a second, so `trackers` does it only if
requested.
"""

import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from torch.utils.tensorboard import SummaryWriter

from speakernet.training.trackers import Tracker, scalars

FLUSH_SECONDS = 5
"""A killed run loses at most the events of this many seconds."""


class EventFiles(Tracker):
    """Event files of one training run, continued after `step`: TensorBoard hides what a killed run
    wrote beyond it.
    """

    def __init__(self, folder: Path, configuration: Mapping[str, Any], step: int) -> None:
        threading.excepthook = _hide_writer_failures
        # torch writes the purge step only if it is above 0.
        self._writer = SummaryWriter(str(folder), purge_step=step + 1, flush_secs=FLUSH_SECONDS)
        if configuration:
            lines = yaml.safe_dump(
                dict(configuration), sort_keys=False, allow_unicode=True
            ).splitlines()
            # TensorBoard renders Markdown, in which four spaces mark code.
            self._writer.add_text("configuration", "".join(f"    {line}\n" for line in lines), step)

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write the numbers of one record."""
        # Not collected here, because TensorBoard buffers its writes.
        for tag, value in scalars(kind, values):
            self._writer.add_scalar(tag, value, step)

    def results(
        self, step: int, figures: Mapping[str, Any], plots: Sequence[Path], model: Path
    ) -> None:
        """Add figures and plots."""
        self.record("test", step, figures)
        for path in plots:
            # The finished files: drawing the plots again would need the scores.
            content = path.read_bytes()
            # Width and height are in the first block of every PNG.
            width, height = struct.unpack(">II", content[16:24])
            image = Summary.Image(
                encoded_image_string=content, width=width, height=height, colorspace=4
            )
            summary = Summary(value=[Summary.Value(tag=f"test/{path.stem}", image=image)])
            self._writer._get_file_writer().add_summary(summary, step)

    def close(self) -> None:
        """Flush and close the files."""
        self._writer.close()


def _hide_writer_failures(arguments: threading.ExceptHookArgs) -> None:
    """Hide the traceback if a failing disk ends TensorBoard's thread: the next record warns of the
    same error.
    """
    is_its_own = type(arguments.thread).__module__.startswith("tensorboard.")
    if not (is_its_own and issubclass(arguments.exc_type, OSError)):
        threading.__excepthook__(arguments)
