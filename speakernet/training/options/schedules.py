"""The options of the schedules of learning rate and margin, and the table of schedules. No torch
here.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from speakernet.options import Component, Count, Epochs, Options, Share

LearningRate = Annotated[float, Gt(0.0), Le(1000.0)]
Factor = Annotated[float, Gt(0.0), Le(1.0)]
Interval = Annotated[float, Gt(0.0), Le(1e6)]
DECAY = 0.95
DECAY_INTERVAL = 10.0  # epochs; voxceleb_trainer's, with its default test_interval


class ScheduleOptions(Options):
    """How learning rate and margin change over the run, as pure functions of the optimizer step."""

    name: str = "cosine"
    """constant, constant_with_warmup, step, linear, cosine, cosine_restarts, polynomial, one_cycle,
    plateau, …"""
    margin: Literal["constant", "linear", "exponential"] = "constant"
    """How the margin of the loss grows from `margin_initial` to its full value."""
    margin_initial: Annotated[float, Ge(0.0), Le(100.0)] = 0.0
    """Margin before the ramp begins."""
    margin_begin_epoch: Epochs = 0.0
    """Epoch (from 0) at which the ramp begins."""
    margin_end_epoch: Epochs = 10.0
    """Epoch at which the margin reaches its full value."""
    warmup_epochs: Epochs = 0.0
    """Epochs of linear rise from (almost) zero before the schedule begins; fractions are fine."""
    warmup_overlaps: bool = False
    """Start the schedule with the run, multiplied by the warm-up (wespeaker), instead of after the
    warm-up."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """A ramp must end after it begins."""
        if self.margin != "constant" and self.margin_end_epoch <= self.margin_begin_epoch:
            yield (
                "margin_end_epoch",
                f"{self.margin_end_epoch}; expected an epoch after margin_begin_epoch "
                f"({self.margin_begin_epoch})",
            )


class ConstantWithWarmupOptions(ScheduleOptions):
    """The full learning rate after `warmup_epochs` of linear rise."""

    name: str = "constant_with_warmup"
    warmup_epochs: Epochs = 1.0
    """Epochs of linear rise from (almost) zero; fractions are fine."""


class FloorOptions(ScheduleOptions):
    """Options of cosine and linear, and the base class of other schedules that end at a floor."""

    final_learning_rate: Annotated[float, Ge(0.0), Le(1000.0)] = 1e-6
    """Learning rate at the end of the run; for plateau, the minimum."""


class StepOptions(ScheduleOptions):
    """The learning rate is multiplied by `decay` every `decay_interval` epochs."""

    name: str = "step"
    decay: Factor = DECAY
    """Factor on the learning rate."""
    decay_interval: Interval = DECAY_INTERVAL
    """Epochs between two reductions."""


class ExponentialOptions(ScheduleOptions):
    """Exponential decay: to `final_learning_rate` at the end, or by `decay` every `decay_interval`
    epochs.
    """

    name: str = "exponential"
    final_learning_rate: LearningRate | Literal["auto"] = "auto"
    """Learning rate at the end of the run; auto: determined by `decay`."""
    decay: Factor | Literal["auto"] = "auto"
    """Factor per decay_interval; auto: the default of step, unless there is a
    final_learning_rate."""
    decay_interval: Interval = DECAY_INTERVAL
    """Epochs per `decay`."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """A final learning rate and a factor contradict each other."""
        yield from super().problems()
        if self.decay != "auto" and self.final_learning_rate != "auto":
            yield (
                "final_learning_rate",
                f"{self.final_learning_rate:g} contradicts decay: {self.decay:g}; exponential uses "
                "only one of them, remove the other",
            )


class CosineRestartsOptions(FloorOptions):
    """Successive half cosines, each `restart_factor` times as long as the previous (SGDR)."""

    name: str = "cosine_restarts"
    restart_epochs: Annotated[float, Gt(0.0), Le(1e6)] = 10.0
    """Length of the first cycle, in epochs."""
    restart_factor: Annotated[float, Ge(1.0), Le(1000.0)] = 2.0
    """Length of each cycle relative to the previous one."""


class PolynomialOptions(FloorOptions):
    """Falls from the top to the floor as (1 - share of the run) to the `power`."""

    name: str = "polynomial"
    power: Annotated[float, Gt(0.0), Le(100.0)] = 2.0
    """Exponent."""


class OneCycleOptions(FloorOptions):
    """Half a cosine up from a 25th of the top, then half a cosine down to the floor (Smith and
    Topin).
    """

    name: str = "one_cycle"
    peak_share: Share = 0.3
    """Share of the run after which the learning rate reaches its top."""


class PlateauOptions(FloorOptions):
    """The top learning rate, multiplied by `decay` whenever `plateau_patience` evaluations did not
    improve the EER.
    """

    name: str = "plateau"
    decay: Factor = DECAY
    """Factor on the learning rate."""
    plateau_patience: Count = 3
    """Evaluations without a better EER before the next reduction."""


SCHEDULES: dict[str, Component] = {
    "constant": Component(
        ScheduleOptions,
        "speakernet.training.schedules:constant",
        "The full learning rate throughout.",
    ),
    "constant_with_warmup": Component(
        ConstantWithWarmupOptions, "speakernet.training.schedules:constant"
    ),
    "step": Component(StepOptions, "speakernet.training.schedules:step"),
    "linear": Component(
        FloorOptions,
        "speakernet.training.schedules:linear",
        "A straight line from the top to the floor.",
    ),
    "cosine": Component(
        FloorOptions,
        "speakernet.training.schedules:cosine",
        "Half a cosine from the top to the floor.",
    ),
    "cosine_restarts": Component(
        CosineRestartsOptions, "speakernet.training.schedules:cosine_restarts"
    ),
    "polynomial": Component(PolynomialOptions, "speakernet.training.schedules:polynomial"),
    "exponential": Component(ExponentialOptions, "speakernet.training.schedules:exponential"),
    "one_cycle": Component(OneCycleOptions, "speakernet.training.schedules:one_cycle"),
    # The shape of plateau is constant; LearningRateSchedule applies its drops, from the observed
    # EERs.
    "plateau": Component(PlateauOptions, "speakernet.training.schedules:constant"),
}
