"""The state of a run, requests to stop it, and its output: progress bar, metrics.jsonl, trackers,
speed.

Only the main process writes and displays. Step results stay on the device until `RecentSteps`
fetches many at once.
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

from speakernet import distributed
from speakernet.files import GrowingFile, atomic_write, human_bytes
from speakernet.machine.memory import process_peak_bytes
from speakernet.machine.threads import HANGUP, STOP_SIGNALS
from speakernet.parallel.group import request_everywhere, requested
from speakernet.run_folder import METRICS
from speakernet.terminal import Bar
from speakernet.training.options import TrainingOptions
from speakernet.training.precision import Precision
from speakernet.training.step import StepOutcome
from speakernet.training.trackers import Trackers

logger = logging.getLogger(__name__)

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
NUM_NAMES_SHOWN = 8
"""File names of a bad batch in the log; a whole batch would hide the rest."""
PARTS = ("data", "forward_backward", "optimizer")
ADVISED_SHARE = 0.10
"""Share of time spent waiting for data above which a change is worthwhile."""
SLOW_DISK_BYTES_A_SECOND = 100e6
STOP = "stop"
"""The key under which ranks share the number of a signal."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of a run."""

    name: str = ""
    """Name in the log and in model files; empty if the run has a single stage."""
    more_epochs: str = "--max_epoch {}"
    """How to request more epochs; {} is replaced by their number."""
    steps_before: int | None = None
    """Steps of the earlier stages, whose weights this one starts from; None for the first stage."""
    given: Mapping[str, Any] | None = None
    """Facts about the initial model (file, licence …), as plain values; None without one."""
    chosen_by: Mapping[str, Any] | None = None
    """The list that selects the best model; None if no model is selected."""
    on_start: Callable[[], None] = lambda: None
    """Called on rank 0 when training starts or resumes."""
    corpus: Mapping[str, Any] | None = None
    """Facts about the training list (speakers, hours …), as plain values."""


WHOLE_RUN = Stage()


@dataclasses.dataclass
class TrainingState:
    """The position of a run; with the state of its components, this is all that a resume needs."""

    epoch: int = 0
    """Finished epochs."""
    batch: int = 0
    """Finished batches of the current epoch."""
    step: int = 0
    """Optimizer steps taken, including those undone."""
    best_eer_percent: float = math.inf
    best_epoch: int = 0
    """0 is the initial model."""
    initial_eer_percent: float | None = None
    """EER of the initial model; None without one."""
    best_stage: str = ""
    """The stage that produced best.pt."""
    evaluations_without_gain: int = 0
    bad_steps: int = 0
    """Steps undone because of non-finite numbers."""
    bad_streak: int = 0
    overflows: int = 0
    """Steps undone because an fp16 gradient overflowed, which is routine while the scale adapts."""
    utterances: int = 0
    seconds: float = 0.0
    """Training time, evaluations included, over all starts and resumes."""
    epoch_loss_sum: float = 0.0
    epoch_accuracy_sum: float = 0.0
    epoch_good_steps: int = 0
    stopped_early: bool = False
    awaits_evaluation: bool = False
    """Whether the last epoch is trained but not evaluated, because the run was stopped during its
    evaluation."""
    averaged: bool = False
    """Whether the mean of the last checkpoints has been tried."""
    metrics_lines: int = 0
    """Lines of metrics.jsonl up to this state; a resume removes and rewrites those after them."""
    trials_checksum: int = 0
    """Checksum of the trials of the best EER."""

    def load(self, values: Mapping[str, Any]) -> None:
        """Restore saved values; fields that only one of two versions has are ignored."""
        vars(self).update({name: value for name, value in values.items() if name in vars(self)})

    def epochs_done(self, options: TrainingOptions) -> bool:
        """Whether all epochs are trained and evaluated, or the run stopped early."""
        return (
            self.epoch >= options.max_epochs or self.stopped_early
        ) and not self.awaits_evaluation

    def is_finished(self, options: TrainingOptions) -> bool:
        """Whether nothing is left to do, including the average of the last checkpoints."""
        return self.epochs_done(options) and (self.averaged or options.average_checkpoints == 0)

    def forget_best(self) -> None:
        """Reset the best result: there is no best.pt to beat."""
        self.best_eer_percent = math.inf
        self.best_epoch = 0
        self.best_stage = ""
        self.evaluations_without_gain = 0


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop (Ctrl-C, SIGTERM, SIGHUP, SIGUSR1) and has written last.pt."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_status = 128 + number
        """The command's exit status, as shells report it for a process ended by the signal."""


@dataclasses.dataclass(eq=False)
class StopRequest:
    """Remembers the first signal: the current step finishes, last.pt is written, the run ends.

    A second signal (except SIGHUP) ends the run immediately. Any rank may receive the signal; all
    ranks end after the same step.
    """

    number: int = 0
    """The signal that this process received; 0 if none."""
    agreed: int = 0
    """The signal that ends the run, known to all ranks."""
    _is_passed_on: bool = False

    def is_requested(self) -> bool:
        """Whether this rank knows of a signal on any rank; for work that can stop at any moment."""
        if not self.number:
            # A signal may arrive during this query: an empty answer must not erase it.
            if distributed.world_size() > 1 and (received := requested(STOP)):
                self.number = received
        elif not self._is_passed_on:
            request_everywhere(STOP, self.number)
            self._is_passed_on = True
        return self.number != 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside the block; does nothing outside the main thread, where Python
        forbids it.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # `nohup` makes a run ignore SIGHUP so that it outlives its terminal.
        ignored = {HANGUP} if HANGUP and signal.getsignal(HANGUP) == signal.SIG_IGN else set()
        before = {
            number: signal.signal(number, self._remember)
            for number in STOP_SIGNALS
            if number not in ignored
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _remember(self, number: int, _frame: Any) -> None:
        if not self.number:
            # The handler only records and logs it: it may have interrupted torch or a file write at
            # any line.
            self.number = number
            logger.warning("stopping after this step; a second signal stops immediately")
        # A closing terminal may send SIGHUP twice, and a service manager sends it along with
        # SIGTERM.
        elif number != HANGUP:
            raise KeyboardInterrupt


class NonFiniteError(ValueError):
    """Too many steps in a row, or all steps of an epoch, had a non-finite loss or gradient."""


@dataclasses.dataclass(eq=False)
class RecentSteps:
    """Outcomes that are still on the device; `fetch_into` adds them to the run's state in one
    transfer.
    """

    max_bad_steps: int
    file_names: Callable[[torch.Tensor], list[str]]
    outcomes: list[tuple[int, StepOutcome]] = dataclasses.field(default_factory=list)
    _good: list[tuple[float, float, float]] = dataclasses.field(default_factory=list)
    _latest: dict[str, float] = dataclasses.field(default_factory=dict)

    def fetch_into(self, state: TrainingState, precision: Precision) -> None:
        """Fetch all outcomes. Every rank calls it after the same step: a bad step gathers file
        names from all.
        """
        if not self.outcomes:
            return
        columns = [
            torch.stack(
                [one.loss, one.accuracy, one.grad_norm, one.is_bad.float(), one.loss_is_bad.float()]
            )
            for _, one in self.outcomes
        ]
        rows = torch.stack(columns).tolist()  # the one synchronisation: (steps, 5)
        loss_scale = float(precision.scale) if precision.scales else 1.0
        outcomes = self.outcomes
        self.outcomes = []
        for (step, outcome), (loss, accuracy, norm, is_bad, loss_is_bad) in zip(
            outcomes, rows, strict=True
        ):
            # In the order of the steps: a good step ends a streak of bad ones.
            if not is_bad:
                state.bad_streak = 0
                self._good.append((loss, accuracy, norm))
                state.epoch_loss_sum += loss
                state.epoch_accuracy_sum += accuracy
                state.epoch_good_steps += 1
            elif precision.scales and not loss_is_bad and loss_scale >= 1.0:
                # An overflow under a large loss scale: the scale has been halved and the run
                # continues.
                state.overflows += 1
            else:
                self._count_bad(state, step, outcome, loss, norm)
        self._latest |= {
            "bad_steps": state.bad_steps,
            **({"loss_scale": loss_scale} if precision.scales else {}),
        }

    def means(self) -> dict[str, float]:
        """Means over the good steps fetched since `take` (without any, the previous means), and
        counts.
        """
        if not self._good:
            return dict(self._latest)
        means = [sum(column) / len(self._good) for column in zip(*self._good, strict=True)]
        return {
            **self._latest,
            **dict(zip(("loss", "accuracy_percent", "grad_norm"), means, strict=True)),
        }

    def take(self) -> dict[str, float]:
        """Return the means and start new ones."""
        self._latest = self.means()
        self._good = []
        return dict(self._latest)

    def _count_bad(
        self, state: TrainingState, step: int, outcome: StepOutcome, loss: float, norm: float
    ) -> None:
        state.bad_steps += 1
        state.bad_streak += 1
        names = self.file_names(torch.cat(distributed.gather_objects(outcome.indices)))
        shown = ", ".join(names[:NUM_NAMES_SHOWN]) + (" …" if len(names) > NUM_NAMES_SHOWN else "")
        logger.warning(
            "step %d undone: loss %g, gradient norm %g (%d bad steps so far); utterances: %s",
            step,
            loss,
            norm,
            state.bad_steps,
            shown,
        )
        if state.bad_streak >= self.max_bad_steps:
            raise NonFiniteError(
                f"{state.bad_streak} steps in a row had a non-finite loss or gradient (the last is "
                f"step {step}); the weights are those before the first of them. Lower "
                f"optimizer.learning_rate, try --mixed-precision no, or check the audio of: {shown}"
            )


def rates(window: Mapping[str, float]) -> dict[str, float]:
    """Rates and time shares from the sums over some steps; empty if no time has passed.

    >>> window = {"steps": 1, "utterances": 64, "seconds": 0.5}
    >>> window |= {"data": 0.1, "forward_backward": 0.3, "optimizer": 0.1}
    >>> rates(window)["utterances_per_second"], rates(window)["data_wait_share"]
    (128.0, 0.2)
    """
    if window["seconds"] <= 0:
        return {}
    seconds = window["seconds"]
    parts = {name: window[name] for name in PARTS}
    return {
        "steps_per_second": window["steps"] / seconds,
        "utterances_per_second": window["utterances"] / seconds,
        "step_seconds": seconds / window["steps"],
        "effective_batch": window["utterances"] / window["steps"],
        "data_wait_share": parts["data"] / seconds,
        "forward_backward_share": parts["forward_backward"] / seconds,
        "optimizer_share": parts["optimizer"] / seconds,
        # Clock rounding may make the difference negative.
        "overhead_share": max(0.0, seconds - sum(parts.values())) / seconds,
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
        found: dict[str, Any] = {
            **rates(self.total),
            "steps": self.total["steps"],
            "precision": self.precision,
            "accumulation_steps": self.accumulation_steps,
            # The share of a step's passes that accumulation adds to the first.
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
    for key, what in (
        ("process_peak_bytes", "peak memory"),
        ("device_peak_bytes", "peak memory of the GPU"),
    ):
        facts += [f"{what} {human_bytes(performance[key])}"] if key in performance else []
    if "gpu_utilisation_percent" in performance:
        facts.append(f"GPU busy {performance['gpu_utilisation_percent']:.0f} % of the time")
    return ", ".join(facts)


class Progress:
    """Writes the numbers of a run, and shows the latest in a bar."""

    def __init__(
        self,
        folder: Path | None,
        *,
        show_bar: bool = True,
        trackers: Sequence[str] = (),
        configuration: Mapping[str, Any] = MappingProxyType({}),
        steps_before: int = 0,
    ) -> None:
        self.folder = folder
        self.show_bar = show_bar and folder is not None
        # Trackers show a stage as a separate run whose steps continue from the previous stage.
        self._steps_before = steps_before
        self._names = trackers
        self._configuration = configuration
        self.num_lines = 0
        """Lines of metrics.jsonl."""
        self._file: GrowingFile | None = None
        self._trackers: Trackers | None = None
        self._bar: Bar | None = None
        self._epoch = self._numbers = ""
        self._shown_at = time.monotonic()

    def open(self, step: int, num_lines: int = 0) -> None:
        """Start, or continue after `step` with `num_lines` records; later ones, left by a killed
        run, are removed.
        """
        if self.folder is None:
            return
        path = self.folder / METRICS
        if path.exists():
            kept = path.read_text(encoding="utf-8").splitlines(keepends=True)[:num_lines]
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
        shown = [
            key
            for key in _SHOWN
            if key in values and (key != "data_wait_share" or values[key] >= SHOWN_WAIT)
        ]
        self._numbers = ", ".join(_SHOWN[key].format(values[key]) for key in shown)

    def _note(self) -> str:
        return ", ".join(filter(None, [self._epoch, self._numbers]))

    def record(self, kind: str, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        """Write a `step`, `epoch` or `evaluation` record to metrics.jsonl and the trackers; `epoch`
        counts from 1.
        """
        if self._file is not None:
            # NaN is not valid JSON, and other programs fail on it.
            plain = {
                k: None if isinstance(v, float) and not math.isfinite(v) else v
                for k, v in values.items()
            }
            line = json.dumps(
                {"kind": kind, "step": step, "epoch": epoch, **plain}, allow_nan=False
            )
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
    """Cores that the run may use."""
    is_packed: bool
    """Whether the corpus is packed or in memory."""
    is_compressed: bool
    """Whether files must be decoded."""
    augments_on_cpu: bool
    has_gpu: bool
    read_bytes_a_second: float = 0.0
    """0 if not measured."""
    is_on_disk: bool = False
    """Whether the packed corpus is larger than memory."""


def data_wait_advice(wait_share: float, facts: LoadingFacts) -> str:
    """The first change to try in a run that waits for data; empty if it hardly waits.

    >>> data_wait_advice(0.05, LoadingFacts(0, 8, False, False, True, True))
    ''
    """
    speed = facts.read_bytes_a_second
    more = facts.cores - 1
    what = "decodes a file" if facts.is_compressed else "opens a file"
    # A slow disk comes first, because it limits all else; the rest is ordered from the cheapest to
    # the most expensive.
    remedies = (
        (
            0 < speed < SLOW_DISK_BYTES_A_SECOND and not facts.is_packed,
            f"the disk reads {speed / 1e6:.0f} MB/s; pack the corpus onto a faster one (speakernet "
            "pack)",
        ),
        # Costs nothing: the GPU is idle while it waits.
        (facts.augments_on_cpu and facts.has_gpu, "let the GPU augment (augment.device: auto)"),
        (
            facts.is_on_disk and not facts.augments_on_cpu,
            "the packed corpus is larger than memory; move it to a faster disk on this machine",
        ),
        # One core is left for the training process itself.
        (
            facts.num_workers < more,
            f"raise data.num_workers from {facts.num_workers} to {more} (this run may use "
            f"{facts.cores} cores)",
        ),
        (not facts.is_packed, f"pack the corpus (speakernet pack), since every crop {what}"),
        (
            facts.augments_on_cpu,
            "all cores are busy augmenting; lower augment.probability or use more cores",
        ),
        (
            True,
            "the corpus is packed or in memory and all cores are busy; only more cores or faster "
            "memory help",
        ),
    )
    advice = next(remedy for applies, remedy in remedies if applies)
    is_worth_it = wait_share > ADVISED_SHARE
    return (
        f"training waits for data {100 * wait_share:.0f} % of the time: {advice}"
        if is_worth_it
        else ""
    )
