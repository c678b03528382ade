"""The outcomes of steps, which stay on the device until many are fetched at once."""

import dataclasses
import logging
from collections.abc import Callable

import torch

from speakernet import distributed
from speakernet.training.precision import Precision
from speakernet.training.state import TrainingState
from speakernet.training.step import StepOutcome

logger = logging.getLogger(__name__)

NUM_NAMES_SHOWN = 8
"""File names of a bad batch in the log; a whole batch would hide the rest."""
MEANS = ("loss", "accuracy_percent", "grad_norm")


class NonFiniteError(ValueError):
    """Too many steps in a row, or all steps of an epoch, had a non-finite loss or gradient."""


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
        columns = [torch.stack([*map(torch.Tensor.float, taken.results)]) for _, taken in waiting]
        rows = torch.stack(columns).tolist()  # the one synchronisation: (steps, 5)
        loss_scale = float(precision.scale)
        # In the order of the steps: a good step ends a streak of bad ones.
        for (step, outcome), (*means, is_bad, loss_is_bad) in zip(waiting, rows, strict=True):
            if not is_bad:
                state.bad_streak = 0
                state.epoch_loss_sum += means[0]
                state.epoch_accuracy_sum += means[1]
                state.epoch_good_steps += 1
                self._good.append(means)
            elif precision.scales and not loss_is_bad and loss_scale >= 1.0:
                # An overflow under a large loss scale: the scale has been halved and the run
                # continues.
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
