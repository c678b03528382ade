"""Learning rate and margin as pure functions of the optimizer step.

Everything follows from the number of steps done, so a resumed run needs no schedule state. The
exception is `plateau`, which also needs the EERs of past evaluations and stores them as plain
numbers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from speakernet.options import Choice, lookup
from speakernet.terminal import text_table
from speakernet.training.options import TrainingOptions
from speakernet.training.options.schedules import (
    DECAY,
    SCHEDULES,
    CosineRestartsOptions,
    ExponentialOptions,
    FloorOptions,
    OneCycleOptions,
    PlateauOptions,
    PolynomialOptions,
    ScheduleOptions,
    StepOptions,
)

# With a rate of exactly 0 the first step of a warm-up would be wasted.
_WARMUP_FLOOR = 1e-3
SHOWN_STEPS = 2_000_000
"""Steps of an epoch in a table of the schedule, which is made before the list is read.

So many that the last step of an epoch has the rate at its end, but for a schedule that falls there.
"""


def constant(options: ScheduleOptions, top: float, epoch: float, num_epochs: float) -> float:
    """The top learning rate throughout."""
    return top


def step(options: StepOptions, top: float, epoch: float, num_epochs: float) -> float:
    """Multiplied by `decay` every `decay_interval` epochs.

    >>> step(StepOptions(decay=0.5, decay_interval=10), 1.0, 25, 40)
    0.25
    """
    # The tiny term makes 9.9999999 (a rounded 10) count as 10.
    return top * options.decay ** math.floor(epoch / options.decay_interval + 1e-9)


def exponential(options: ExponentialOptions, top: float, epoch: float, num_epochs: float) -> float:
    """A smooth `step`; with `final_learning_rate` it falls from the top to that by a constant
    factor per epoch.

    >>> exponential(ExponentialOptions(final_learning_rate=0.01), 1.0, 20, 40)
    0.1
    """
    if options.final_learning_rate != "auto":
        return float(top * (options.final_learning_rate / top) ** _share(epoch, num_epochs))
    decay = DECAY if options.decay == "auto" else options.decay
    return float(top * decay ** (epoch / options.decay_interval))


def linear(options: FloorOptions, top: float, epoch: float, num_epochs: float) -> float:
    """A straight line from the top to the floor."""
    return top + (options.final_learning_rate - top) * _share(epoch, num_epochs)


def polynomial(options: PolynomialOptions, top: float, epoch: float, num_epochs: float) -> float:
    """Falls from the top to the floor as (1 - share of the run) to the `power`."""
    floor = options.final_learning_rate
    return floor + (top - floor) * (1 - _share(epoch, num_epochs)) ** options.power


def cosine(options: FloorOptions, top: float, epoch: float, num_epochs: float) -> float:
    """Half a cosine from the top to the floor.

    >>> cosine(FloorOptions(final_learning_rate=0.0), 1.0, 20, 40)
    0.5
    """
    return _half_cosine(top, options.final_learning_rate, _share(epoch, num_epochs))


def cosine_restarts(
    options: CosineRestartsOptions, top: float, epoch: float, num_epochs: float
) -> float:
    """Successive half cosines, each `restart_factor` times as long as the previous (SGDR)."""
    length = options.restart_epochs
    begin = 0.0
    # The tiny term makes 9.9999999 (a rounded 10) start the next cycle instead of ending this one.
    while epoch >= begin + length - 1e-9:
        begin += length
        length *= options.restart_factor
    return _half_cosine(top, options.final_learning_rate, max(0.0, epoch - begin) / length)


def one_cycle(options: OneCycleOptions, top: float, epoch: float, num_epochs: float) -> float:
    """Half a cosine up from a 25th of the top, then half a cosine down to the floor (Smith and
    Topin).
    """
    share = _share(epoch, num_epochs)
    peak = options.peak_share
    if share < peak:
        return _half_cosine(top / 25.0, top, share / peak)
    return _half_cosine(top, options.final_learning_rate, _share(share - peak, 1.0 - peak))


class LearningRateSchedule:
    """The learning rate of each optimizer step: linear warm-up, then the named shape over the
    remaining epochs.

    Args:
        options: options of the shape and the warm-up. With `warmup_overlaps` the shape starts with
            the run and the warm-up multiplies it; otherwise the shape starts when the warm-up ends.
        top: peak learning rate.
        steps_per_epoch: optimizer steps in one epoch.
        num_epochs: epochs of the whole run.
        factor: multiplies every learning rate, floor included, to suit the batch size.

    Raises:
        ValueError: unknown schedule name.
    """

    def __init__(
        self,
        options: ScheduleOptions,
        top: float,
        *,
        steps_per_epoch: int,
        num_epochs: int,
        factor: float = 1.0,
    ) -> None:
        # A fine-tuning recipe may lower the top but not the floor; without this the rate would rise
        # towards the end.
        if isinstance(options, FloorOptions):
            # The floor must not exceed the top.
            options = options.model_copy(
                update={"final_learning_rate": min(options.final_learning_rate, top)}
            )
        self.options = options
        self.top = top
        self.factor = factor
        self.steps_per_epoch = max(1, steps_per_epoch)
        self.num_epochs = num_epochs
        self._shape = lookup(SCHEDULES, options.name, "schedule").load()
        self._shape_begins = 0.0 if options.warmup_overlaps else options.warmup_epochs
        self.observed_eers: list[float] = []
        """EERs of the evaluations so far, in percent; only plateau uses them."""

    def __call__(self, step_number: float) -> float:
        """Learning rate of the step that follows `step_number` finished steps."""
        epoch = step_number / self.steps_per_epoch
        warmup = self.options.warmup_epochs
        # In epochs, not steps, so that the rate continues smoothly after a resume with a different
        # batch size.
        warmth = 1.0
        if epoch < warmup:
            start = self.options.warmup_start
            warmth = max(_WARMUP_FLOOR, start + (1.0 - start) * epoch / warmup)
        if epoch < self._shape_begins:
            return self.factor * self.top * warmth
        begin = self._shape_begins
        shape = self._shape(self.options, self.top, epoch - begin, self.num_epochs - begin)
        # With `warmup_overlaps` the shape falls from the start of the run, as in wespeaker, so most
        # shapes never reach the top.
        rate = self.factor * warmth * shape
        if not isinstance(self.options, PlateauOptions):
            return rate
        # Recounted from all EERs each time, so a resume needs no further state.
        drops = plateau_drops(self.observed_eers, self.options.plateau_patience)
        floor = self.factor * self.options.final_learning_rate
        return max(rate * self.options.decay**drops, floor) if drops else rate

    def state_dict(self) -> dict[str, Any]:
        """The EERs observed so far; the rest follows from the step."""
        return {"observed_eers": list(self.observed_eers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.observed_eers = list(state["observed_eers"])


def plateau_drops(eers: list[float], patience: int) -> int:
    """How often `patience` evaluations in a row did not improve the EER.

    >>> plateau_drops([10.0, 8.0, 8.5, 8.1, 7.0], patience=2)
    1
    """
    best = math.inf
    waited = 0
    drops = 0
    for eer in eers:
        if eer < best:
            best = eer
            waited = 0
            continue
        waited += 1
        if waited >= patience:
            drops = drops + 1
            waited = 0
    return drops


class MarginSchedule:
    """The margin of each step: constant, or a linear or exponential ramp between two epochs.

    The exponential ramp is wespeaker's: initial + (full - initial) * (1 - 0.001 ** share), steep at
    first and then flat, here divided by 0.999 so that it ends exactly at the full margin.
    """

    def __init__(self, options: ScheduleOptions, full: float, *, steps_per_epoch: int) -> None:
        self.options = options
        self.full = full
        self.steps_per_epoch = max(1, steps_per_epoch)

    def __call__(self, step_number: float) -> float:
        """Margin of the step that follows `step_number` finished steps."""
        ramp = self.options
        if ramp.margin == "constant":
            return self.full
        length = ramp.margin_end_epoch - ramp.margin_begin_epoch
        share = _share(step_number / self.steps_per_epoch - ramp.margin_begin_epoch, length)
        if ramp.margin == "exponential":
            # Without the division the ramp would end 0.1 % below the full margin.
            share = (1.0 - 0.001**share) / 0.999
        return ramp.margin_initial + (self.full - ramp.margin_initial) * share


@dataclass(frozen=True)
class Schedules:
    """What changes from step to step."""

    learning_rate: LearningRateSchedule
    margin: MarginSchedule | None = None
    """None if the loss has no margin."""


def batch_factor(options: TrainingOptions, utterances_per_batch: int) -> Choice[float]:
    """The factor for all learning rates if the batch is not the one they were chosen for."""
    batch = utterances_per_batch * options.accumulation_steps
    ratio = batch / (options.reference_batch or batch)
    factor = {"off": 1.0, "linear": ratio, "sqrt": ratio**0.5}[options.batch_scaling]
    return Choice(
        factor,
        f"{batch} utterances per step instead of {options.reference_batch}; "
        f"training.batch_scaling: {options.batch_scaling}",
    )


class ScheduledEpoch(NamedTuple):
    """Learning rate and margin of the first and last step of an epoch, counted from 1.

    There is no margin if the loss has none.
    """

    stage: str
    epoch: int
    learning_rates: tuple[float, float]
    margins: tuple[float, float] | None


def scheduled_epochs(stages: Mapping[str, Schedules]) -> list[ScheduledEpoch]:
    """For each stage, the first and last epochs, the end of warm-up, and start, middle and end of
    the margin ramp.
    """
    scheduled = []
    for name, schedules in stages.items():
        rate = schedules.learning_rate
        margin = schedules.margin
        for epoch in _shown_epochs(rate):
            # The next step belongs to the next epoch, in which a step schedule may have fallen.
            first = epoch * rate.steps_per_epoch
            last = first + rate.steps_per_epoch - 1
            margins = (margin(first), margin(last)) if margin else None
            scheduled.append(ScheduledEpoch(name, epoch + 1, (rate(first), rate(last)), margins))
    return scheduled


def _shown_epochs(schedule: LearningRateSchedule) -> list[int]:
    """Epochs at which rate or margin change their course, counted from 0."""
    options = schedule.options
    num_epochs = schedule.num_epochs
    epochs = {0, num_epochs - 1, max(0, math.ceil(options.warmup_epochs) - 1)}
    if options.margin != "constant":
        begin = options.margin_begin_epoch
        end = options.margin_end_epoch
        epochs |= {int(begin), int((begin + end) / 2), math.ceil(end) - 1, math.ceil(end)}
    # A ramp may end after the run does.
    return sorted(epochs & set(range(num_epochs)))


def schedule_table(stages: Mapping[str, Schedules]) -> str:
    """`scheduled_epochs` as a table of text."""
    rows = [("epoch", "learning rate", "margin")]
    for epoch in scheduled_epochs(stages):
        name = f"{epoch.epoch} of the {epoch.stage} stage" if epoch.stage else str(epoch.epoch)
        margins = _span(epoch.margins) if epoch.margins else "none"
        rows.append((name, _span(epoch.learning_rates), margins))
    lines = text_table(rows)
    of_all = [schedules.learning_rate.options for schedules in stages.values()]
    if any(isinstance(options, PlateauOptions) for options in of_all):
        lines.append(
            "plateau: multiplies the rate by schedule.decay whenever the EER stops falling, which "
            "is not shown here"
        )
    return "\n".join(lines)


def _span(values: tuple[float, float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:.3g}" for value in values))


def _share(epoch: float, num_epochs: float) -> float:
    """The share of `num_epochs` that has passed, 0 to 1."""
    if num_epochs <= 0:
        return 1.0
    return min(1.0, max(0.0, epoch / num_epochs))


def _half_cosine(first: float, last: float, share: float) -> float:
    return last + (first - last) * 0.5 * (1.0 + math.cos(math.pi * share))
