"""Brings the numbers of finished steps from the device to the host, many at a time, and judges the non-finite ones."""

import logging
from collections.abc import Callable

import torch

from speakernet.parallel import distributed
from speakernet.training.precision import Precision
from speakernet.training.state import TrainingState
from speakernet.training.step import StepOutcome

logger = logging.getLogger(__name__)

# File names of a bad batch that the log shows; the whole batch would bury the rest of the log.
NUM_NAMES_SHOWN = 8


class NonFiniteError(ValueError):
    """Too many steps in a row, or all of an epoch, gave a loss or gradient that is not finite."""


def check_epoch(state: TrainingState, *, is_last: bool) -> None:
    """Look at an epoch that has just been counted: whether any of its steps changed the weights.

    Under fp16 the scale of the loss may be too large for a whole short epoch, which the next one mends; not the last.

    Raises:
        NonFiniteError: all of them were undone.
    """
    if state.epoch_good_steps:
        return
    what = f"epoch {state.epoch}: every step was undone or left out, so the weights are those before it"
    if state.bad_streak or is_last:
        raise NonFiniteError(
            f"{what}, and there is nothing to evaluate. Lower optimizer.learning_rate, try --mixed-precision no, or "
            "look at the audio of the utterances that the log names"
        )
    logger.warning("%s: gradients overflowed under the loss scale of fp16, which has been lowered", what)


class RecentSteps:
    """Outcomes that still lie on the device; `fetch_into` adds them to the run's state in one transfer.

    Args:
        max_bad_steps: bad steps in a row after which the run stops.
        file_names: from rows of the training list to files, for the log.
    """

    def __init__(self, max_bad_steps: int, file_names: Callable[[torch.Tensor], list[str]]) -> None:
        self.max_bad_steps = max_bad_steps
        self.file_names = file_names
        self._good: list[tuple[float, float, float]] = []
        self._latest: dict[str, float] = {}
        self._outcomes: list[tuple[int, StepOutcome]] = []

    def __len__(self) -> int:
        return len(self._outcomes)

    def add(self, step: int, outcome: StepOutcome) -> None:
        """Keep a step's outcome for the next fetch."""
        self._outcomes.append((step, outcome))

    def fetch_into(self, state: TrainingState, scale: Precision) -> None:
        """Fetch everything kept; counts, sums and streaks go into `state`.

        Raises:
            NonFiniteError: `max_bad_steps` in a row were undone.
        """
        if not self._outcomes:
            return
        columns = [
            torch.stack([one.loss, one.accuracy, one.grad_norm, one.is_bad.float(), one.loss_is_bad.float()])
            for _, one in self._outcomes
        ]
        rows = torch.stack(columns).tolist()  # the one synchronisation: (steps, 5)
        loss_scale = float(scale.scale) if scale.scales else 1.0
        outcomes, self._outcomes = self._outcomes, []
        good = []
        for (step, outcome), (loss, accuracy, norm, is_bad, loss_is_bad) in zip(outcomes, rows, strict=True):
            # In the order of the steps: a good one between bad ones clears the streak.
            if not is_bad:
                state.bad_streak = 0
                good.append((loss, accuracy, norm))
            elif scale.scales and not loss_is_bad and loss_scale >= 1.0:
                # An overflow under a large loss scale: the scale has been halved and the run goes on.
                state.overflows += 1
            else:
                self._count_bad(state, step, outcome, loss, norm)
        state.epoch_loss_sum += sum(loss for loss, _, _ in good)
        state.epoch_accuracy_sum += sum(accuracy for _, accuracy, _ in good)
        state.epoch_good_steps += len(good)
        self._good += good
        self._latest["bad_steps"] = state.bad_steps
        if scale.scales:
            self._latest["loss_scale"] = loss_scale

    def means(self) -> dict[str, float]:
        """Means over the good steps fetched since `take` (those of then where there was none), and counts."""
        if not self._good:
            return dict(self._latest)
        means = [sum(column) / len(self._good) for column in zip(*self._good, strict=True)]
        return {**self._latest, **dict(zip(("loss", "accuracy_percent", "grad_norm"), means, strict=True))}

    def take(self) -> dict[str, float]:
        """The means, which begin anew."""
        self._latest, self._good = self.means(), []
        return dict(self._latest)

    def _count_bad(self, state: TrainingState, step: int, outcome: StepOutcome, loss: float, norm: float) -> None:
        state.bad_steps += 1
        state.bad_streak += 1
        names = self.file_names(torch.cat(distributed.gather_objects(outcome.indices)))
        more = f" and {len(names) - NUM_NAMES_SHOWN} more" if len(names) > NUM_NAMES_SHOWN else ""
        shown = ", ".join(names[:NUM_NAMES_SHOWN]) + more
        logger.warning(
            "step %d undone: loss %g, gradient norm %g (%d such steps so far); its utterances: %s",
            step,
            loss,
            norm,
            state.bad_steps,
            shown,
        )
        if state.bad_streak >= self.max_bad_steps:
            raise NonFiniteError(
                f"{state.bad_streak} steps in a row gave a loss or gradient that is not finite (the last at step "
                f"{step}); the weights are those before the first of them. Lower optimizer.learning_rate, try "
                f"--mixed-precision no, or look at the audio of: {shown}"
            )
