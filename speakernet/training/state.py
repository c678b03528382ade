"""Where a run stands: its stage, the position that a resume continues from, and the outcomes of the
latest steps, which stay on the device until many are fetched at once.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from speakernet import distributed
from speakernet.training.options import TrainingOptions
from speakernet.training.precision import Precision
from speakernet.training.step import StepOutcome

logger = logging.getLogger(__name__)

NUM_NAMES_SHOWN = 8
"""File names of a bad batch in the log; a whole batch would hide the rest."""
MEANS = ("loss", "accuracy_percent", "grad_norm")


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of a run: facts for the log and its files, and functions of the caller."""

    name: str = ""
    """Name in the log and in model files; empty if the run has a single stage."""
    more_epochs: str = "--max_epoch {}"
    """How to request more epochs; {} is replaced by their number."""
    is_first: bool = True
    """Whether no stage comes before it."""
    steps_before: int = 0
    """Steps of the earlier stages, whose weights this one starts from."""
    initial_model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Facts about the initial model (file, licence …), as plain values; empty without one."""
    chosen_by: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The list that selects the best model; empty if no model is selected."""
    changed_lists: Sequence[str] = ()
    """Names of the lists whose contents have changed since the run was finished."""
    corpus: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Facts about the training list (speakers, hours …), as plain values."""
    on_start: Callable[[], None] = lambda: None
    """Called on rank 0 when training starts or resumes."""
    advise: Callable[[float], str] = lambda data_wait_share: ""
    """What to change if this share of the time is spent waiting for data; empty: nothing."""


WHOLE_RUN = Stage()


@dataclasses.dataclass
class TrainingState:
    """The position of a run; with the state of its components, this is all that a resume needs."""

    epoch: int = 0
    """Finished epochs."""
    micro_batch: int = 0
    """Finished micro-batches of the current epoch; saved as `batch`."""
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
    """Checksum of the trials of the best EER; 0 if nothing was evaluated yet."""

    def state_dict(self) -> dict[str, Any]:
        """The values by the names that run folders of all versions have."""
        # All fields, so that a new one cannot be forgotten; a field therefore has to be a plain
        # value.
        values = vars(self).copy()
        values["batch"] = values.pop("micro_batch")
        return values

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restore saved values; fields that only one of two versions has are ignored."""
        # Checkpoints of all versions have to load: fields may come and go, but a name must keep its
        # meaning.
        fields = vars(self)
        for name, value in values.items():
            if name == "batch":
                name = "micro_batch"
            if name in fields:
                fields[name] = value

    def has_finished_epochs(self, options: TrainingOptions) -> bool:
        """Whether all epochs are trained and evaluated, or the run stopped early."""
        # The options are those of this start, so a finished run continues if max_epochs is raised.
        has_all = self.epoch >= options.max_epochs or self.stopped_early
        return has_all and not self.awaits_evaluation

    def is_finished(self, options: TrainingOptions) -> bool:
        """Whether nothing is left to do, including the average of the last checkpoints."""
        has_average = self.averaged or options.average_checkpoints == 0
        return self.has_finished_epochs(options) and has_average

    def set_best(self, eer_percent: float, epoch: int, stage: str) -> None:
        """Remember which model best.pt holds."""
        self.best_eer_percent = eer_percent
        self.best_epoch = epoch
        self.best_stage = stage

    def forget_best(self) -> None:
        """Reset the best result: there is no best.pt to beat."""
        self.set_best(math.inf, 0, "")
        self.evaluations_without_gain = 0


class NonFiniteError(ValueError):
    """Too many steps in a row, or all steps of an epoch, had a non-finite loss or gradient."""


# Looking at a number of the device makes the host wait until every queued step is done, and the
# device is idle until the next one is queued. So outcomes wait here as tensors, and many are read
# by one transfer. The price is that a bad step is noticed late, but never later than the number of
# bad steps that ends the run, and each was undone on the device when it happened.
@dataclasses.dataclass(eq=False)
class RecentSteps:
    """Outcomes that are still on the device; `fetch_into` adds them to the run's state in one
    transfer.
    """

    max_bad_steps: int
    file_names: Callable[[torch.Tensor], list[str]]
    waiting: list[tuple[int, StepOutcome]] = dataclasses.field(default_factory=list)
    """Number and outcome of each step."""
    _good: list[list[float]] = dataclasses.field(default_factory=list)
    _latest: dict[str, float] = dataclasses.field(default_factory=dict)

    def fetch_into(self, state: TrainingState, precision: Precision) -> None:
        """Fetch all outcomes. Every rank calls it after the same step: a bad step gathers file
        names from all.
        """
        if not self.waiting:
            return
        waiting = self.waiting
        self.waiting = []
        rows = []
        for _, outcome in waiting:
            rows.append(torch.stack([value.float() for value in outcome.results]))
        fetched = torch.stack(rows).tolist()  # the one synchronisation: (steps, 5)
        loss_scale = float(precision.scale)
        # In the order of the steps: a good step ends a streak of bad ones.
        for (step, outcome), values in zip(waiting, fetched, strict=True):
            *means, is_bad, loss_is_bad = values
            # One bad step would make the mean of the whole epoch NaN.
            if not is_bad:
                state.bad_streak = 0
                state.epoch_loss_sum += means[0]
                state.epoch_accuracy_sum += means[1]
                state.epoch_good_steps += 1
                self._good.append(means)
            # In fp16 the scale rises until a gradient overflows, and is halved then, so some steps
            # are undone by design. They count as bad only if the loss itself is not finite, or the
            # scale is too small to be the cause.
            elif precision.scales and not loss_is_bad and loss_scale >= 1.0:
                state.overflows += 1
            else:
                self._count_bad(state, step, outcome, means)
        self._latest["bad_steps"] = state.bad_steps
        if precision.scales:
            self._latest["loss_scale"] = loss_scale

    def means(self) -> dict[str, float]:
        """Means over the good steps fetched since `take` (without any, the previous means), and
        counts.
        """
        if not self._good:
            return dict(self._latest)
        means = [sum(column) / len(self._good) for column in zip(*self._good, strict=True)]
        return {**self._latest, **dict(zip(MEANS, means, strict=True))}

    def take(self) -> dict[str, float]:
        """Return the means and start new ones."""
        self._latest = self.means()
        self._good = []
        return dict(self._latest)

    def _count_bad(
        self, state: TrainingState, step: int, outcome: StepOutcome, means: list[float]
    ) -> None:
        state.bad_steps += 1
        state.bad_streak += 1
        # Files of all ranks, because any rank's share of the batch may hold the broken one.
        names = self.file_names(torch.cat(distributed.gather_objects(outcome.indices)))
        shown = ", ".join(names[:NUM_NAMES_SHOWN])
        if len(names) > NUM_NAMES_SHOWN:
            shown += " …"
        numbers = f"loss {means[0]:g}, gradient norm {means[2]:g}"
        count = f"{state.bad_steps} bad steps so far"
        logger.warning("step %d undone: %s (%s); utterances: %s", step, numbers, count, shown)
        if state.bad_streak >= self.max_bad_steps:
            raise NonFiniteError(
                f"{state.bad_streak} steps in a row had a non-finite loss or gradient (the last is "
                f"step {step}); the weights are those before the first of them. Lower "
                f"optimizer.learning_rate, try --mixed-precision no, or check the audio of: {shown}"
            )
