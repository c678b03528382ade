"""What a run shows and writes while it trains: one bar, metrics.jsonl, TensorBoard; on the main process only.

It is handed plain numbers and never touches a tensor. The other ranks get an object that does nothing.
"""

import json
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from speakernet.files import GrowingFile, atomic_write
from speakernet.run_folder import METRICS
from speakernet.terminal import Bar

if TYPE_CHECKING:
    from speakernet.training.tensorboard import EventFiles

logger = logging.getLogger(__name__)

# What is shown of a run's numbers, in this order.
_SHOWN = {
    "loss": "loss {:.3f}",
    "utterances_per_second": "{:.0f} utt/s",
    "run_time_left": "{} left",
    "data_wait_share": "waits {:.0%}",
}
REFRESH_SECONDS = 5.0
"""What is shown is never much older than this, however rarely numbers are recorded."""
SHOWN_WAIT = 0.1
"""Waiting for data for a smaller share of the time is not worth a word."""


class Progress:
    """Writes the numbers of one run, and shows the last of them.

    Args:
        folder: the run folder; None shows and writes nothing (other ranks, tests).
        show_bar: whether to show how far the run is: drawn in a terminal, lines of the log elsewhere.
        tensorboard: whether to write event files.
        configuration: section -> option -> plain value, for TensorBoard.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        show_bar: bool = True,
        tensorboard: bool = True,
        configuration: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.folder = folder
        self.show_bar = show_bar and folder is not None
        self._tensorboard = tensorboard and folder is not None
        self.num_lines = 0
        """Of metrics.jsonl."""
        self._file: GrowingFile | None = None
        self._configuration = configuration
        self._events: EventFiles | None = None
        self._bar: Bar | None = None
        self._share_of_batch = 0.0
        self._epoch = self._numbers = ""
        self._shown_at = time.monotonic()

    def open(self, step: int, num_lines: int | None = None) -> None:
        """Begin or go on after `step`: what a killed run wrote after its last checkpoint is removed.

        Args:
            step: optimizer steps done.
            num_lines: of metrics.jsonl that the run had then; None where it is not known.
        """
        if self.folder is None:
            return
        path, records = self.folder / METRICS, []
        if path.exists():
            try:
                records = _drop_after(path, step, num_lines)
            except OSError as error:
                logger.warning("%s keeps its lines after step %d, which come a second time: %s", path, step, error)
        self.num_lines = len(records)
        self._file = GrowingFile(path)
        if self._tensorboard:
            # Imported here: it takes a second that other commands should not pay.
            from speakernet.training.tensorboard import EventFiles

            self._events = EventFiles(self.folder, self._configuration)
            self._events.open(step, records)

    def start_epoch(self, epoch: int, max_epochs: int, num_batches: int, done: int) -> None:
        """Go on with an epoch (from 0) of `num_batches`, of which `done` were done before a resume.

        One bar shows the whole run, with an epoch as its unit.
        """
        self._epoch = f"epoch {epoch + 1}/{max_epochs}"
        self._share_of_batch = 1 / max(1, num_batches)
        place = epoch + done * self._share_of_batch
        if self._bar is None:
            self._bar = Bar("training", max_epochs, done=place, note=self._note, is_shown=self.show_bar)
        self._bar.done = place

    def advance(self) -> None:
        """One more batch."""
        if self._bar is not None:
            self._bar.update(self._share_of_batch)

    @property
    def is_due(self) -> bool:
        """Whether what is shown is too old, and `show` should be called."""
        return self.show_bar and time.monotonic() - self._shown_at >= REFRESH_SECONDS

    def show(self, values: Mapping[str, Any]) -> None:
        """Take the numbers of now into the bar; those that are not there are left out."""
        self._shown_at = time.monotonic()
        shown = {key: form.format(values[key]) for key, form in _SHOWN.items() if key in values}
        if values.get("data_wait_share", 0.0) < SHOWN_WAIT:
            shown.pop("data_wait_share", None)
        self._numbers = ", ".join(shown.values())

    def _note(self) -> str:
        return ", ".join(filter(None, [self._epoch, self._numbers]))

    def record(self, kind: str, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        """Write one line of metrics.jsonl, the numbers to TensorBoard, and show those of a step.

        Args:
            kind: step, epoch or evaluation.
            step: optimizer steps done.
            epoch: epochs begun (the first is 1).
            values: numbers, strings and plain containers.
        """
        if self._file is not None:
            line = {"kind": kind, "step": step, "epoch": epoch, **_plain(values)}
            # `allow_nan=False`: NaN is no JSON, and other programs stop at it.
            self.num_lines += self._file.append((json.dumps(line, allow_nan=False) + "\n").encode())
        if self._events is not None:
            self._events.record(kind, step, values)
        if kind == "step":
            self.show(values)

    def close(self) -> None:
        """Flush and close everything."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._events is not None:
            self._events.close()
            self._events = None


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as JSON can hold them: a number that is not finite becomes null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }


def _drop_after(path: Path, step: int, num_lines: int | None) -> list[dict[str, Any]]:
    """Keep the complete lines up to `step`, no more than so many: what follows will be written again.

    Returns:
        What they hold.
    """
    kept: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            logger.warning("%s: leaving out a line that was cut off", path)
            continue
        if record.get("step", 0) <= step:
            kept.append(record)
    kept = kept[:num_lines]
    with atomic_write(path) as file:
        file.writelines(json.dumps(record) + "\n" for record in kept)
    return kept
