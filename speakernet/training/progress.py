"""Where a run is, requests to stop it, and what it shows and writes: one bar, metrics.jsonl, trackers, its speed.

Only the main process writes and shows. Numbers of steps stay on the device until `RecentSteps` fetches many at a time.
"""

import contextlib
import dataclasses
import json
import logging
import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from speakernet.files import GrowingFile, atomic_write, human_bytes
from speakernet.machine.memory import process_peak_bytes
from speakernet.machine.threads import HANGUP, STOP_SIGNALS
from speakernet.parallel import distributed
from speakernet.parallel.group import request_everywhere, requested
from speakernet.run_folder import METRICS
from speakernet.terminal import Bar
from speakernet.training.options import TrainingOptions
from speakernet.training.precision import Precision
from speakernet.training.step import StepOutcome
from speakernet.training.trackers import Trackers

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
"""Waiting for data for a smaller share of the time is not shown."""
NUM_NAMES_SHOWN = 8
"""File names of a bad batch in the log; the whole batch would bury the rest."""
PARTS = ("data", "forward_backward", "optimizer")
ADVISED_SHARE = 0.10
"""Waiting for data for a smaller share of the time is not worth a change."""
SLOW_DISK_BYTES_A_SECOND = 100e6
STOP = "stop"
"""The name by which the ranks leave each other the number of a signal."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """Which stage of a larger run this is."""

    name: str = ""
    """In the log and the model files; empty for a run of its own."""
    epochs_option: str = "--max_epoch"
    """The option to raise for more epochs."""
    steps_before: int | None = None
    """Steps of the stages before, whose weights this one began with; None: it is the first."""
    given: Mapping[str, Any] | None = None
    """What is known of the initial model (file, licence …), in plain values."""
    chosen_by: Mapping[str, Any] | None = None
    """The list that chooses the model; None if nothing is chosen."""
    on_start: Callable[[], None] = lambda: None
    """Called when training begins or goes on, on rank 0."""


WHOLE_RUN = Stage()


@dataclasses.dataclass
class TrainingState:
    """Where the run is; together with the state of its components this is all that a resume needs."""

    epoch: int = 0
    """Epochs finished."""
    batch: int = 0
    """Batches done of the epoch that is under way."""
    step: int = 0
    """Optimizer steps done, undone ones included."""
    best_eer_percent: float = math.inf
    best_epoch: int = 0
    """0: the initial model."""
    initial_eer_percent: float | None = None
    """Of the initial model; None without one."""
    best_stage: str = ""
    """The stage that best.pt comes from."""
    evaluations_without_gain: int = 0
    bad_steps: int = 0
    """Steps undone because of non-finite numbers."""
    bad_streak: int = 0
    overflows: int = 0
    """Steps undone because an fp16 gradient overflowed: routine, the scale adapts."""
    utterances: int = 0
    seconds: float = 0.0
    """Training time, evaluations included, over all starts."""
    epoch_loss_sum: float = 0.0
    epoch_accuracy_sum: float = 0.0
    epoch_good_steps: int = 0
    stopped_early: bool = False
    awaits_evaluation: bool = False
    """Whether the last epoch is trained and not yet evaluated: the run was stopped in its evaluation."""
    averaged: bool = False
    """Whether the mean of the last checkpoints has been tried."""
    metrics_lines: int = 0
    """Lines of metrics.jsonl that belong to the run as it is; what follows them is done, and written, again."""
    trials_checksum: int = 0
    """Of the trials that the best EER was measured on."""

    def load(self, values: Mapping[str, Any]) -> None:
        """Take saved values; what an earlier or later version does not have, or has beyond these, changes nothing."""
        vars(self).update({name: value for name, value in values.items() if name in vars(self)})

    def epochs_done(self, options: TrainingOptions) -> bool:
        """Whether all epochs are trained and evaluated, or the run was stopped early."""
        return (self.epoch >= options.max_epochs or self.stopped_early) and not self.awaits_evaluation

    def is_finished(self, options: TrainingOptions) -> bool:
        """Whether nothing is left to do, the average of the last checkpoints included."""
        return self.epochs_done(options) and (self.averaged or options.average_checkpoints == 0)

    def forget_best(self) -> None:
        """There is no best.pt to beat."""
        self.best_eer_percent, self.best_epoch, self.best_stage = math.inf, 0, ""
        self.evaluations_without_gain = 0


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop (Ctrl-C, SIGTERM, SIGHUP, SIGUSR1) and has written last.pt."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_status = 128 + number
        """Of the command, as shells give it for a process that the signal ended."""


@dataclasses.dataclass(eq=False)
class StopRequest:
    """Remembers the first signal: the step under way is finished, last.pt is written, the run ends.

    The second signal ends the run at once. Of several ranks any may be asked; all end after the same step.
    """

    number: int = 0
    """Of the signal that this process got; 0: none."""
    agreed: int = 0
    """Of the one that ends the run, known to all ranks."""
    _is_passed_on: bool = False

    def is_requested(self) -> bool:
        """Whether some rank was asked, as far as is known here: for work that can be left at any moment."""
        if not self.number:
            # A signal may arrive while the others are asked: no answer must not erase it.
            if distributed.world_size() > 1 and (asked := requested(STOP)):
                self.number = asked
        elif not self._is_passed_on:
            request_everywhere(STOP, self.number)
            self._is_passed_on = True
        return self.number != 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals inside the block; does nothing outside the main thread, where Python forbids it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # `nohup` starts a run that ignores the end of its terminal, and is to outlive it.
        ignored = {HANGUP} if HANGUP and signal.getsignal(HANGUP) == signal.SIG_IGN else set()
        before = {number: signal.signal(number, self._remember) for number in STOP_SIGNALS if number not in ignored}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _remember(self, number: int, _frame: Any) -> None:
        if not self.number:
            # Nothing more in a handler: it may have interrupted torch or the writing of a file at any line.
            self.number = number
            logger.warning("stopping after this step; press Ctrl-C again to stop now")
        # A terminal that is closed may say so twice, and a service manager sends it beside SIGTERM.
        elif number != HANGUP:
            raise KeyboardInterrupt


class NonFiniteError(ValueError):
    """Too many steps in a row, or all of an epoch, gave a loss or gradient that is not finite."""


@dataclasses.dataclass(eq=False)
class RecentSteps:
    """Outcomes that still lie on the device; `fetch_into` adds them to the run's state in one transfer."""

    max_bad_steps: int
    file_names: Callable[[torch.Tensor], list[str]]
    outcomes: list[tuple[int, StepOutcome]] = dataclasses.field(default_factory=list)
    _good: list[tuple[float, float, float]] = dataclasses.field(default_factory=list)
    _latest: dict[str, float] = dataclasses.field(default_factory=dict)

    def fetch_into(self, state: TrainingState, precision: Precision) -> None:
        """Fetch everything kept. Every rank calls it after the same step: a bad one gathers its file names."""
        if not self.outcomes:
            return
        columns = [
            torch.stack([one.loss, one.accuracy, one.grad_norm, one.is_bad.float(), one.loss_is_bad.float()])
            for _, one in self.outcomes
        ]
        rows = torch.stack(columns).tolist()  # the one synchronisation: (steps, 5)
        loss_scale = float(precision.scale) if precision.scales else 1.0
        outcomes, self.outcomes = self.outcomes, []
        for (step, outcome), (loss, accuracy, norm, is_bad, loss_is_bad) in zip(outcomes, rows, strict=True):
            # In the order of the steps: a good one between bad ones clears the streak.
            if not is_bad:
                state.bad_streak = 0
                self._good.append((loss, accuracy, norm))
                state.epoch_loss_sum += loss
                state.epoch_accuracy_sum += accuracy
                state.epoch_good_steps += 1
            elif precision.scales and not loss_is_bad and loss_scale >= 1.0:
                # An overflow under a large loss scale: the scale has been halved and the run continues.
                state.overflows += 1
            else:
                self._count_bad(state, step, outcome, loss, norm)
        self._latest |= {"bad_steps": state.bad_steps, **({"loss_scale": loss_scale} if precision.scales else {})}

    def means(self) -> dict[str, float]:
        """Means over the good steps fetched since `take` (else the last ones), and counts."""
        if not self._good:
            return dict(self._latest)
        means = [sum(column) / len(self._good) for column in zip(*self._good, strict=True)]
        return {**self._latest, **dict(zip(("loss", "accuracy_percent", "grad_norm"), means, strict=True))}

    def take(self) -> dict[str, float]:
        """The means; the next ones are over later steps."""
        self._latest, self._good = self.means(), []
        return dict(self._latest)

    def _count_bad(self, state: TrainingState, step: int, outcome: StepOutcome, loss: float, norm: float) -> None:
        state.bad_steps += 1
        state.bad_streak += 1
        names = self.file_names(torch.cat(distributed.gather_objects(outcome.indices)))
        shown = ", ".join(names[:NUM_NAMES_SHOWN]) + (" …" if len(names) > NUM_NAMES_SHOWN else "")
        logger.warning(
            "step %d undone: loss %g, gradient norm %g (bad steps so far: %d); its utterances: %s",
            *(step, loss, norm, state.bad_steps, shown),
        )
        if state.bad_streak >= self.max_bad_steps:
            raise NonFiniteError(
                f"{state.bad_streak} steps in a row gave a loss or gradient that is not finite (the last at step "
                f"{step}); the weights are those before the first of them. Lower optimizer.learning_rate, try "
                f"--mixed-precision no, or look at the audio of: {shown}"
            )


def rates(window: Mapping[str, float]) -> dict[str, float]:
    """Rates and shares of the sums over some steps; empty while no time has passed.

    >>> window = {"steps": 1, "utterances": 64, "seconds": 0.5, "data": 0.1, "forward_backward": 0.3, "optimizer": 0.1}
    >>> rates(window)["utterances_per_second"], rates(window)["data_wait_share"]
    (128.0, 0.2)
    """
    if window["seconds"] <= 0:
        return {}
    seconds, parts = window["seconds"], {name: window[name] for name in PARTS}
    return {
        "steps_per_second": window["steps"] / seconds,
        "utterances_per_second": window["utterances"] / seconds,
        "step_seconds": seconds / window["steps"],
        "effective_batch": window["utterances"] / window["steps"],
        "data_wait_share": parts["data"] / seconds,
        "forward_backward_share": parts["forward_backward"] / seconds,
        "optimizer_share": parts["optimizer"] / seconds,
        # Rounding of the clock may make it negative.
        "overhead_share": max(0.0, seconds - sum(parts.values())) / seconds,
    }


class PerformanceTracker:
    """Speed and memory of a run: since the last window was taken, in this epoch, and in all."""

    def __init__(self, precision: str, accumulation_steps: int, device: torch.device) -> None:
        self.precision, self.accumulation_steps, self.device = precision, accumulation_steps, device
        self.total, self.epoch, self.window = Counter[str](), Counter[str](), Counter[str]()

    def update(self, seconds: float, utterances: int, parts: Mapping[str, float]) -> None:
        """Count one optimizer step; `parts` are the seconds of `PARTS`."""
        for window in (self.total, self.epoch, self.window):
            window.update({"steps": 1, "utterances": utterances, "seconds": seconds, **parts})  # type: ignore[dict-item]

    def take_window(self) -> dict[str, float]:
        """The rates since the last call."""
        window, self.window = self.window, Counter()
        return rates(window)

    def take_epoch(self) -> dict[str, float]:
        """The rates of the epoch."""
        window, self.epoch = self.epoch, Counter()
        return rates(window)

    def summary(self, gpu_utilisation_percent: float | None = None) -> dict[str, Any]:
        """Everything since the start, with memory, utilisation and precision."""
        found: dict[str, Any] = {
            **rates(self.total),
            "steps": self.total["steps"],
            "precision": self.precision,
            "accumulation_steps": self.accumulation_steps,
            # The extra passes that accumulation makes inside one step.
            "accumulation_share": (self.accumulation_steps - 1) / self.accumulation_steps,
            "process_peak_bytes": process_peak_bytes(),
        }
        if self.device.type == "cuda":
            found["device_peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
            found["device_reserved_bytes"] = torch.cuda.max_memory_reserved(self.device)
        if gpu_utilisation_percent is not None:
            found["gpu_utilisation_percent"] = gpu_utilisation_percent
        return found


def performance_sentence(performance: Mapping[str, Any]) -> str:
    """Speed, waiting, memory and utilisation of a run in one line; empty if no step was taken.

    >>> performance_sentence({"utterances_per_second": 128.4, "data_wait_share": 0.2, "process_peak_bytes": 3 << 30})
    'training: 128 utterances/s, waited for data 20 % of the time, peak memory 3.0 GiB'
    """
    if "utterances_per_second" not in performance:
        return ""
    facts = [
        f"training: {performance['utterances_per_second']:.0f} utterances/s",
        f"waited for data {100 * performance['data_wait_share']:.0f} % of the time",
    ]
    for key, what in (("process_peak_bytes", "peak memory"), ("device_peak_bytes", "peak memory of the GPU")):
        facts += [f"{what} {human_bytes(performance[key])}"] if key in performance else []
    if "gpu_utilisation_percent" in performance:
        facts.append(f"GPU busy {performance['gpu_utilisation_percent']:.0f} % of the time")
    return ", ".join(facts)


class Progress:
    """Writes the numbers of one run, and shows the last of them."""

    def __init__(
        self,
        folder: Path | None,
        *,
        show_bar: bool = True,
        trackers: Sequence[str] = (),
        configuration: Mapping[str, Any] = MappingProxyType({}),
        steps_before: int = 0,
    ) -> None:
        self.folder, self.show_bar = folder, show_bar and folder is not None
        # Trackers show a stage as a run of its own, whose steps go on from the one before.
        self._steps_before = steps_before
        self._names, self._configuration = trackers, configuration
        self.num_lines = 0
        """Of metrics.jsonl."""
        self._file: GrowingFile | None = None
        self._trackers: Trackers | None = None
        self._bar: Bar | None = None
        self._epoch = self._numbers = ""
        self._shown_at = time.monotonic()

    def open(self, step: int, num_lines: int = 0) -> None:
        """Begin or continue after `step` and so many records: what a killed run wrote after them is removed."""
        if self.folder is None:
            return
        path = self.folder / METRICS
        if path.exists():
            kept = path.read_text(encoding="utf-8").splitlines(keepends=True)[:num_lines]
            self.num_lines = len(kept)
            with atomic_write(path) as file:
                file.writelines(kept)
        self._file = GrowingFile(path)
        self._trackers = Trackers([*self._names], self.folder, self._configuration, self._steps_before + step)

    def start_epoch(self, epoch: int, max_epochs: int, num_batches: int, done: int) -> None:
        """Show an epoch (from 0) of `num_batches`, of which `done` were done before a resume; one bar for the run."""
        self._epoch, self._share_of_batch = f"epoch {epoch + 1}/{max_epochs}", 1 / max(1, num_batches)
        position = epoch + done * self._share_of_batch
        if self._bar is None:
            self._bar = Bar("training", max_epochs, done=position, note=self._note, is_shown=self.show_bar)
        self._bar.done = position

    def advance(self, num_batches: int) -> None:
        """So many more batches are done."""
        if self._bar is not None:
            self._bar.update(num_batches * self._share_of_batch)

    @property
    def is_due(self) -> bool:
        """Whether what is shown is too old, and `show` should be called."""
        return self.show_bar and time.monotonic() - self._shown_at >= REFRESH_SECONDS

    def show(self, values: Mapping[str, Any]) -> None:
        """Take numbers into the bar; those that are not there are left out."""
        self._shown_at = time.monotonic()
        shown = [key for key in _SHOWN if key in values and (key != "data_wait_share" or values[key] >= SHOWN_WAIT)]
        self._numbers = ", ".join(_SHOWN[key].format(values[key]) for key in shown)

    def _note(self) -> str:
        return ", ".join(filter(None, [self._epoch, self._numbers]))

    def record(self, kind: str, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        """Write a `step`, `epoch` (from 1) or `evaluation` to metrics.jsonl and the trackers; show that of a step."""
        if self._file is not None:
            # NaN is not JSON, and other programs stop at it.
            plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
            line = json.dumps({"kind": kind, "step": step, "epoch": epoch, **plain}, allow_nan=False)
            self.num_lines += self._file.append(f"{line}\n".encode())
        if self._trackers is not None:
            self._trackers.each("record", kind, self._steps_before + step, values)
        if kind == "step":
            self.show(values)

    def close(self) -> None:
        """Flush and close everything."""
        if self._bar is not None:
            self._bar.close()
        if self._trackers is not None:
            self._trackers.each("close")
        self._bar = self._file = self._trackers = None


@dataclasses.dataclass(frozen=True)
class LoadingFacts:
    """How a run loads its data."""

    num_workers: int
    cores: int
    """That the run may use."""
    is_packed: bool
    """The corpus is packed or in memory."""
    is_compressed: bool
    """Files must be decoded."""
    augments_on_cpu: bool
    has_gpu: bool
    read_bytes_a_second: float = 0.0
    """0 if it was not measured."""
    is_on_disk: bool = False
    """The packed corpus is larger than memory."""


def data_wait_advice(wait_share: float, facts: LoadingFacts) -> str:
    """The cheapest change that can help a run that waits for its data; empty if it hardly waits.

    >>> data_wait_advice(0.05, LoadingFacts(0, 8, False, False, True, True))
    ''
    """
    speed, more = facts.read_bytes_a_second, facts.cores - 1
    what = "files are decoded" if facts.is_compressed else "a file is opened"
    # From the cheapest to the dearest; the first that fits.
    cures = (
        (
            0 < speed < SLOW_DISK_BYTES_A_SECOND and not facts.is_packed,
            f"the disk gives {speed / 1e6:.0f} MB/s; pack the corpus onto a faster one (speakernet pack)",
        ),
        # Free: the GPU idles while it waits.
        (facts.augments_on_cpu and facts.has_gpu, "let the GPU augment (augment.device: auto)"),
        (
            facts.is_on_disk and not facts.augments_on_cpu,
            "the packed corpus is larger than memory; move it to a faster disk on this machine",
        ),
        # One core is left to the training process itself.
        (
            facts.num_workers < more,
            f"raise data.num_workers from {facts.num_workers} to {more} (this run may use {facts.cores} cores)",
        ),
        (not facts.is_packed, f"pack the corpus (speakernet pack): {what} for every crop"),
        (facts.augments_on_cpu, "all cores are busy augmenting; lower augment.probability or use more cores"),
        (True, "the corpus is packed or in memory, and all cores are busy: only more cores or faster memory help"),
    )
    advice = next(cure for fits, cure in cures if fits)
    is_worth_it = wait_share > ADVISED_SHARE
    return f"training waits for data {100 * wait_share:.0f} % of the time: {advice}" if is_worth_it else ""
