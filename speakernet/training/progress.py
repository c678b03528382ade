"""The output of a run: progress bar, metrics.jsonl, trackers, speed.

Only the main process writes and displays.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from speakernet.files import atomic_write, human_bytes
from speakernet.machine.memory import process_peak_bytes
from speakernet.run_folder import METRICS, GrowingFile
from speakernet.terminal import Bar
from speakernet.training.trackers import Trackers

# The numbers in the progress bar, in this order.
_SHOWN = {
    "loss": "loss {:.3f}",
    "utterances_per_second": "{:.0f} utt/s",
    "run_time_left": "{} left",
    "data_wait_share": "waits {:.0%}",
}
REFRESH_SECONDS = 5.0
"""The bar is refreshed this often, however rarely numbers are recorded."""
SHOWN_WAIT = 0.1
"""Minimum share of time spent waiting for data that the bar shows."""
PARTS = ("data", "forward_backward", "optimizer")


def rates(window: Mapping[str, float]) -> dict[str, float]:
    """Rates and time shares from the sums over some steps; empty if no time has passed.

    >>> window = {"steps": 1, "utterances": 64, "seconds": 0.5}
    >>> window |= {"data": 0.1, "forward_backward": 0.3, "optimizer": 0.1}
    >>> rates(window)["utterances_per_second"], rates(window)["data_wait_share"]
    (128.0, 0.2)
    """
    seconds = window["seconds"]
    if seconds <= 0:
        return {}
    # Clock rounding may make the difference negative.
    overhead = max(0.0, seconds - sum(window[part] for part in PARTS))
    return {
        "steps_per_second": window["steps"] / seconds,
        "utterances_per_second": window["utterances"] / seconds,
        "step_seconds": seconds / window["steps"],
        "effective_batch": window["utterances"] / window["steps"],
        "data_wait_share": window["data"] / seconds,
        "forward_backward_share": window["forward_backward"] / seconds,
        "optimizer_share": window["optimizer"] / seconds,
        "overhead_share": overhead / seconds,
    }


class RunSpeed:
    """Speed and memory of a run: since the last window, in this epoch, and in total."""

    def __init__(self, precision: str, accumulation_steps: int, device: torch.device) -> None:
        self.precision = precision
        self.accumulation_steps = accumulation_steps
        self.device = device
        self.total = Counter[str]()
        self.epoch = Counter[str]()
        self.window = Counter[str]()

    def update(self, seconds: float, utterances: int, parts: Mapping[str, float]) -> None:
        """Count one optimizer step; `parts` has the seconds of each of `PARTS`."""
        # Only sums, so that a step costs a few additions; rates are computed when they are needed.
        for window in (self.total, self.epoch, self.window):
            window.update({"steps": 1, "utterances": utterances, "seconds": seconds, **parts})  # type: ignore[dict-item]

    def take_window(self) -> dict[str, float]:
        """The rates since the last call."""
        window = self.window
        self.window = Counter()
        return rates(window)

    def take_epoch(self) -> dict[str, float]:
        """The rates of the epoch."""
        window = self.epoch
        self.epoch = Counter()
        return rates(window)

    def summary(self, gpu_utilisation_percent: float | None = None) -> dict[str, Any]:
        """Everything since the start, with memory, utilisation and precision."""
        figures: dict[str, Any] = {
            **rates(self.total),
            "steps": self.total["steps"],
            "precision": self.precision,
            "accumulation_steps": self.accumulation_steps,
            # The share of a step's passes that accumulation adds to the first.
            "accumulation_share": (self.accumulation_steps - 1) / self.accumulation_steps,
            "process_peak_bytes": process_peak_bytes(),
        }
        if self.device.type == "cuda":
            figures["device_peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
            figures["device_reserved_bytes"] = torch.cuda.max_memory_reserved(self.device)
        if gpu_utilisation_percent is not None:
            figures["gpu_utilisation_percent"] = gpu_utilisation_percent
        return figures


def performance_sentence(performance: Mapping[str, Any]) -> str:
    """Speed, waiting time, memory and utilisation of a run in one line; empty if it took no step.

    >>> rates = {"utterances_per_second": 128.4, "data_wait_share": 0.2}
    >>> performance_sentence({**rates, "process_peak_bytes": 3 << 30})
    'training: 128 utterances/s, waited for data 20 % of the time, peak memory 3.0 GiB'
    """
    if "utterances_per_second" not in performance:
        return ""
    facts = [
        f"training: {performance['utterances_per_second']:.0f} utterances/s",
        f"waited for data {100 * performance['data_wait_share']:.0f} % of the time",
    ]
    if "process_peak_bytes" in performance:
        facts.append(f"peak memory {human_bytes(performance['process_peak_bytes'])}")
    if "device_peak_bytes" in performance:
        facts.append(f"peak memory of the GPU {human_bytes(performance['device_peak_bytes'])}")
    if "gpu_utilisation_percent" in performance:
        facts.append(f"GPU busy {performance['gpu_utilisation_percent']:.0f} % of the time")
    return ", ".join(facts)


# metrics.jsonl and last.pt are written at different times, so after a kill the file may have lines
# of steps that the resumed run takes again. The checkpoint counts the lines that belong to it, and
# `open` cuts the file there: a curve never shows a step twice, and numbers of steps that were lost
# do not stay.
class Progress:
    """Writes the numbers of a run, and shows the latest in a bar."""

    def __init__(
        self,
        folder: Path | None,
        *,
        trackers: Sequence[str] = (),
        configuration: Mapping[str, Any] = MappingProxyType({}),
        steps_before: int = 0,
    ) -> None:
        self.folder = folder
        self.show_bar = folder is not None
        # Trackers show a stage as a separate run whose steps continue from the previous stage.
        self._steps_before = steps_before
        self._names = trackers
        self._configuration = configuration
        self.num_lines = 0
        """Lines of metrics.jsonl."""
        self._file: GrowingFile | None = None
        self._trackers: Trackers | None = None
        self._bar: Bar | None = None
        self._epoch = ""
        self._numbers: list[str] = []
        self._shown_at = time.monotonic()

    def open(self, step: int, num_lines: int = 0) -> None:
        """Start, or continue after `step` with `num_lines` records; later ones, left by a killed
        run, are removed.
        """
        if self.folder is None:
            return
        path = self.folder / METRICS
        if path.exists():
            # Written to a new file and renamed, so that a kill leaves the old file.
            kept = path.read_text("utf-8").splitlines(keepends=True)[:num_lines]
            self.num_lines = len(kept)
            with atomic_write(path) as file:
                file.writelines(kept)
        self._file = GrowingFile(path)
        self._trackers = Trackers(
            [*self._names], self.folder, self._configuration, self._steps_before + step
        )

    def start_epoch(self, epoch: int, max_epochs: int, num_batches: int, done: int) -> None:
        """Show an epoch (from 0) of `num_batches`, `done` of them before a resume, in the run's
        single bar.
        """
        self._epoch = f"epoch {epoch + 1}/{max_epochs}"
        # A single bar for the run, in epochs: its estimate includes evaluations and does not start
        # again in every epoch.
        self._share_of_batch = 1 / max(1, num_batches)
        position = epoch + done * self._share_of_batch
        if self._bar is None:
            self._bar = Bar(
                "training", max_epochs, done=position, note=self._note, is_shown=self.show_bar
            )
        self._bar.done = position

    def advance(self, num_batches: int) -> None:
        """Count `num_batches` more batches as done."""
        if self._bar is not None:
            self._bar.update(num_batches * self._share_of_batch)

    @property
    def is_due(self) -> bool:
        """Whether the bar is out of date, so that `show` should be called."""
        return self.show_bar and time.monotonic() - self._shown_at >= REFRESH_SECONDS

    def show(self, values: Mapping[str, Any]) -> None:
        """Show numbers in the bar; missing ones are left out."""
        self._shown_at = time.monotonic()
        values = dict(values)
        if values.get("data_wait_share", 0.0) < SHOWN_WAIT:
            values.pop("data_wait_share", None)
        self._numbers = [form.format(values[key]) for key, form in _SHOWN.items() if key in values]

    def _note(self) -> str:
        return ", ".join([self._epoch, *self._numbers])

    def record(self, kind: str, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        """Write a `step`, `epoch` or `evaluation` record to metrics.jsonl and the trackers; `epoch`
        counts from 1.
        """
        if self._file is not None:
            record = {"kind": kind, "step": step, "epoch": epoch, **values}
            # A mean over no good step is NaN, because 0 would look like a perfect loss.
            for name, value in record.items():
                # NaN is not valid JSON, and other programs fail on it.
                if isinstance(value, float) and not math.isfinite(value):
                    record[name] = None
            line = json.dumps(record, allow_nan=False)
            self.num_lines += self._file.append(f"{line}\n".encode())
        if self._trackers is not None:
            self._trackers.record(kind, self._steps_before + step, values)
        if kind == "step":
            self.show(values)

    def close(self) -> None:
        """Flush and close everything."""
        if self._bar is not None:
            self._bar.close()
        if self._trackers is not None:
            self._trackers.close()
        self._bar = self._file = self._trackers = None
