"""Learning rate and margin as pure functions of the optimizer step.

Everything is computed from the number of steps done, so a resumed run needs no schedule state. The one exception is
`plateau`, which also needs the EERs of the past evaluations; it keeps them as plain numbers.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from speakernet.registry import lookup

# The first steps of a warm-up must move the weights a little, or the first step is wasted.
_WARMUP_FLOOR = 1e-3


@dataclasses.dataclass(frozen=True)
class ScheduleOptions:
    """What the shapes need; each uses its own part. Epochs may be fractions."""

    top: float
    """Learning rate at the top."""
    floor: float = 0.0
    """Learning rate at the end."""
    decay: float | None = 0.95
    """Factor of `step` and `plateau`; of `exponential` too, which falls to the floor where this is None."""
    decay_interval: float = 10.0
    power: float = 2.0
    restart_epochs: float = 10.0
    restart_factor: float = 2.0
    peak_share: float = 0.3
    plateau_patience: int = 3


Shape = Callable[[ScheduleOptions, float, float], float]


def constant(options: ScheduleOptions, epoch: float, num_epochs: float) -> float:
    """Always the top."""
    return options.top


def step(options: ScheduleOptions, epoch: float, num_epochs: float) -> float:
    """Times `decay` after each `decay_interval` epochs.

    >>> step(ScheduleOptions(top=1.0, decay=0.5, decay_interval=10), 25, 40)
    0.25
    """
    # The tiny term keeps 9.9999999 (a rounded 10) from missing its step.
    return options.top * _factor(options) ** math.floor(epoch / options.decay_interval + 1e-9)


def exponential(options: ScheduleOptions, epoch: float, num_epochs: float) -> float:
    """As `step`, but smoothly; without a `decay` from the top to the floor, in equal factors.

    >>> exponential(ScheduleOptions(top=1.0, floor=0.01, decay=None), 20, 40)
    0.1
    """
    if options.decay is None:
        return float(options.top * (options.floor / options.top) ** _share(epoch, num_epochs))
    return float(options.top * options.decay ** (epoch / options.decay_interval))


def linear(options: ScheduleOptions, epoch: float, num_epochs: float) -> float:
    """A straight line from the top to the floor."""
    return options.top + (options.floor - options.top) * _share(epoch, num_epochs)


def polynomial(options: ScheduleOptions, epoch: float, num_epochs: float) -> float:
    """From the top to the floor as (1 - share of the run) to the `power`."""
    return options.floor + (options.top - options.floor) * (1 - _share(epoch, num_epochs)) ** options.power


def cosine(options: ScheduleOptions, epoch: float, num_epochs: float) -> float:
    """Half a cosine from the top to the floor.

    >>> cosine(ScheduleOptions(top=1.0), 20, 40)
    0.5
    """
    return _half_cosine(options.top, options.floor, _share(epoch, num_epochs))


def cosine_restarts(options: ScheduleOptions, epoch: float, num_epochs: float) -> float:
    """Half cosines one after the other, each `restart_factor` times as long as the one before (SGDR)."""
    length, begin = options.restart_epochs, 0.0
    while epoch >= begin + length - 1e-9:
        begin += length
        length *= options.restart_factor
    return _half_cosine(options.top, options.floor, max(0.0, epoch - begin) / length)


def one_cycle(options: ScheduleOptions, epoch: float, num_epochs: float) -> float:
    """Half a cosine up from a 25th of the top, then half a cosine down to the floor (Smith and Topin)."""
    share = _share(epoch, num_epochs)
    if share < options.peak_share:
        return _half_cosine(options.top / 25.0, options.top, share / options.peak_share)
    rest = 1.0 - options.peak_share
    return _half_cosine(options.top, options.floor, (share - options.peak_share) / rest if rest else 1.0)


SCHEDULES: dict[str, Shape] = {
    "constant": constant,
    "step": step,
    "linear": linear,
    "cosine": cosine,
    "cosine_restarts": cosine_restarts,
    "polynomial": polynomial,
    "exponential": exponential,
    "one_cycle": one_cycle,
    # The shape of plateau is constant; its drops come from the observed EERs (LearningRateSchedule).
    "plateau": constant,
}


class LearningRateSchedule:
    """The learning rate of each optimizer step: linear warm-up, then one of the shapes over the epochs that are left.

    Args:
        name: a key of SCHEDULES.
        options: the shape's numbers.
        steps_per_epoch: optimizer steps in one epoch.
        num_epochs: epochs of the whole run.
        warmup_epochs: length of the warm-up; the shape's own clock starts at 0 where it ends.
        warmup_overlaps: the shape's clock starts with the run instead, and the warm-up is a factor on it.

    Raises:
        ValueError: an unknown name, or options that this shape cannot have.
    """

    def __init__(
        self,
        name: str,
        options: ScheduleOptions,
        *,
        steps_per_epoch: int,
        num_epochs: int,
        warmup_epochs: float = 0.0,
        warmup_overlaps: bool = False,
    ) -> None:
        if options.decay is None and (name in ("step", "plateau") or (name == "exponential" and options.floor <= 0)):
            raise ValueError(f"{name} needs a decay" + (", or a floor above 0" if name == "exponential" else ""))
        self.name = name
        self.options = options
        self.steps_per_epoch = max(1, steps_per_epoch)
        self.num_epochs = num_epochs
        self.warmup_epochs = warmup_epochs
        self._shape_begins = 0.0 if warmup_overlaps else warmup_epochs
        self._shape = lookup(SCHEDULES, name, "schedule")
        self._observed_eers: list[float] = []

    def __call__(self, step_number: float) -> float:
        """Learning rate of the step that comes after `step_number` finished ones of `steps_per_epoch`."""
        epoch = step_number / self.steps_per_epoch
        warmth = max(_WARMUP_FLOOR, epoch / self.warmup_epochs) if epoch < self.warmup_epochs else 1.0
        if epoch < self._shape_begins:
            return self.options.top * warmth
        rate = warmth * self._shape(self.options, epoch - self._shape_begins, self.num_epochs - self._shape_begins)
        drops = plateau_drops(self._observed_eers, self.options.plateau_patience) if self.name == "plateau" else 0
        return max(rate * _factor(self.options) ** drops, self.options.floor) if drops else rate

    def observe(self, eer_percent: float) -> None:
        """Tell the schedule an evaluation's result; only plateau listens."""
        self._observed_eers.append(float(eer_percent))

    def state_dict(self) -> dict[str, Any]:
        """The EERs observed so far; everything else follows from the step."""
        return {"observed_eers": list(self._observed_eers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` was taken."""
        self._observed_eers = list(state["observed_eers"])


def plateau_drops(eers: list[float], patience: int) -> int:
    """How often `patience` evaluations in a row brought no better EER.

    >>> plateau_drops([10.0, 8.0, 8.5, 8.1, 7.0], patience=2)
    1
    """
    best, waited, drops = math.inf, 0, 0
    for eer in eers:
        if eer < best:
            best, waited = eer, 0
            continue
        waited += 1
        if waited >= patience:
            drops, waited = drops + 1, 0
    return drops


class MarginSchedule:
    """The margin of each step: constant, or a linear or exponential ramp between two epochs.

    The exponential ramp is wespeaker's: initial + (full - initial) * (1 - 0.001 ** share), steep first, then level,
    here divided by 0.999 so that it ends exactly at the full margin.
    """

    def __init__(
        self,
        full: float,
        *,
        kind: str = "constant",
        initial: float = 0.0,
        begin_epoch: float = 0.0,
        end_epoch: float = 1.0,
        steps_per_epoch: int = 1,
    ) -> None:
        if kind not in ("constant", "linear", "exponential"):
            raise ValueError(f"margin schedule {kind!r}; expected constant, linear or exponential")
        self.full = full
        self.kind = kind
        self.initial = initial
        self.begin_epoch = begin_epoch
        self.end_epoch = end_epoch
        self.steps_per_epoch = max(1, steps_per_epoch)

    def __call__(self, step_number: float) -> float:
        """Margin of the step that comes after `step_number` finished ones of `steps_per_epoch`."""
        if self.kind == "constant":
            return self.full
        share = _share(step_number / self.steps_per_epoch - self.begin_epoch, self.end_epoch - self.begin_epoch)
        if self.kind == "exponential":
            share = (1.0 - 0.001**share) / 0.999
        return self.initial + (self.full - self.initial) * share


def _factor(options: ScheduleOptions) -> float:
    assert options.decay is not None, "LearningRateSchedule asks for it"
    return options.decay


def _share(epoch: float, num_epochs: float) -> float:
    """How much of `num_epochs` has passed, 0 to 1."""
    if num_epochs <= 0:
        return 1.0
    return min(1.0, max(0.0, epoch / num_epochs))


def _half_cosine(first: float, last: float, share: float) -> float:
    return last + (first - last) * 0.5 * (1.0 + math.cos(math.pi * share))
