"""What a run shows and writes while it trains: progress line, metrics.jsonl, TensorBoard; on the main process only.

It is handed plain numbers and never touches a tensor. The other ranks get an object that does nothing.
"""

import json
import logging
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TextIO

from tqdm import tqdm

from speakernet.files import atomic_write
from speakernet.run_folder import METRICS

if TYPE_CHECKING:
    from speakernet.training.tensorboard import EventFiles

logger = logging.getLogger(__name__)

# Where no terminal shows a progress line, its numbers go to the log, at most this often.
LINE_SECONDS = 30.0
# What the progress line shows, in this order, as (key, label, format).
_SHOWN = (
    ("loss", "loss", "{:.3f}"),
    ("accuracy_percent", "acc", "{:.1f}%"),
    ("utterances_per_second", "utt/s", "{:.0f}"),
    ("data_wait_share", "data", "{:.0%}"),
    ("learning_rate", "lr", "{:.2e}"),
    ("run_time_left", "left", "{}"),
)


class Progress:
    """Writes the numbers of one run.

    Args:
        folder: the run folder; None shows and writes nothing (other ranks, tests).
        show_bar: whether to draw the progress line where there is a terminal; its numbers go to the log elsewhere.
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
        self.show_bar = show_bar and folder is not None and sys.stderr.isatty()
        self._writes_lines = show_bar and folder is not None and not self.show_bar
        self._last_line = time.monotonic()
        self._tensorboard = tensorboard and folder is not None
        self._file: TextIO | None = None
        self._configuration = configuration
        self._events: EventFiles | None = None
        self._bar: tqdm | None = None

    def open(self, step: int) -> None:
        """Begin or go on after `step`: records of later steps, which a killed run left, are removed."""
        if self.folder is None:
            return
        path = self.folder / METRICS
        if path.exists():
            _drop_after(path, step)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        if self._tensorboard:
            # Imported here: it takes a second that other commands should not pay.
            from speakernet.training.tensorboard import EventFiles

            self._events = EventFiles(self.folder, self._configuration)
            self._events.open(step, map(json.loads, path.read_text(encoding="utf-8").splitlines()))

    def start_epoch(self, epoch: int, max_epochs: int, num_batches: int, done: int) -> None:
        """Begin a progress line of `num_batches`, of which `done` were done before a resume."""
        if self.show_bar:
            self._bar = tqdm(
                total=num_batches,
                initial=done,
                desc=f"epoch {epoch + 1}/{max_epochs}",
                unit="batch",
                dynamic_ncols=True,
                leave=False,
            )

    def advance(self) -> None:
        """One more batch."""
        if self._bar is not None:
            self._bar.update()

    def end_epoch(self) -> None:
        """Close the progress line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def record(self, kind: str, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        """Write one line of metrics.jsonl, the numbers to TensorBoard, and refresh the progress line.

        Args:
            kind: step, epoch or evaluation.
            step: optimizer steps done.
            epoch: epochs begun (the first is 1).
            values: numbers, strings and plain containers.
        """
        if self._file is not None:
            line = {"kind": kind, "step": step, "epoch": epoch, **_plain(values)}
            # `allow_nan=False`: NaN is no JSON, and other programs stop at it.
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            # A killed run keeps its last lines, and the report can be made while it trains.
            self._file.flush()
        if self._events is not None:
            self._events.record(kind, step, values)
        if kind == "step":
            self._show(step, {label: form.format(values[key]) for key, label, form in _SHOWN if key in values})

    def _show(self, step: int, shown: dict[str, str]) -> None:
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
        elif self._writes_lines and time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            logger.info("step %d: %s", step, ", ".join(f"{label} {value}" for label, value in shown.items()))

    def close(self) -> None:
        """Flush and close everything."""
        self.end_epoch()
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


def _drop_after(path: Path, step: int) -> None:
    """Keep the complete lines up to `step`: what follows will be written again."""
    kept: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            logger.warning("%s: leaving out a line that was cut off", path)
            continue
        if record.get("step", 0) <= step:
            kept.append(line)
    with atomic_write(path) as file:
        file.writelines(line + "\n" for line in kept)


def clock(seconds: float) -> str:
    """A duration for people.

    >>> clock(3725)
    '1:02:05'
    """
    whole = round(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
