"""Where a run is (`TrainingState`): plain values, saved as they are; its stage; and requests to stop it."""

import contextlib
import dataclasses
import logging
import math
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from speakernet.machine.threads import HANGUP, STOP_SIGNALS
from speakernet.parallel import distributed
from speakernet.parallel.group import request_everywhere, requested
from speakernet.training.options import TrainingOptions

logger = logging.getLogger(__name__)

STOP = "stop"
"""The name by which the ranks leave each other the number of a signal."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """Which stage of a larger run this is."""

    name: str = ""
    """In the log and the model files; empty for a run of its own."""
    epochs_option: str = "--max_epoch"
    """The option to raise for more epochs."""
    first_stage_steps: int | None = None
    """Steps of the stage before, whose weights this one began with."""
    given: Mapping[str, Any] | None = None
    """What is known of the initial model (file, licence …), in plain values."""
    chosen_by: Mapping[str, Any] | None = None
    """The list that chooses the model; None if nothing is chosen."""


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
    evaluated_epoch: int = 0
    """The epoch of the last evaluation."""
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

    def epoch_means(self) -> dict[str, float]:
        """Loss and accuracy over the good steps of the epoch."""
        # Of no good step there is no mean: 0 would read as a perfect loss.
        good = self.epoch_good_steps or math.nan
        return {"loss": self.epoch_loss_sum / good, "accuracy_percent": self.epoch_accuracy_sum / good}


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop (Ctrl-C, SIGTERM, SIGHUP, SIGUSR1) and has written last.pt."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_status = 128 + number
        """Of the command, as shells give it for a process that the signal ended."""


class StopRequest:
    """Remembers the first signal: the step under way is finished, last.pt is written, the run ends.

    The second signal ends the run at once. Of several ranks any may be asked; all end after the same step.
    """

    def __init__(self) -> None:
        self.number = 0
        """Of the signal that this process got; 0: none."""
        self.agreed = 0
        """Of the one that ends the run, known to all ranks."""
        self._is_passed_on = False

    def agree(self) -> None:
        """Agree on a signal that some rank got; every rank calls it."""
        self.agreed = self.agreed or max(distributed.gather_objects(self.number))

    def is_requested(self) -> bool:
        """Whether some rank was asked, as far as is known here: for work that can be left at any moment."""
        if not self.number:
            self.number = requested(STOP)
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
