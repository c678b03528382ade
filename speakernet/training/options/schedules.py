"""The options of schedules of learning rate and margin, and their table. No torch is imported here."""

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
    """How learning rate and margin change over the run; both are pure functions of the optimizer step."""

    name: str = "cosine"
    """constant, constant_with_warmup, step, linear, cosine, cosine_restarts, polynomial, one_cycle, plateau, …"""
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
    """The schedule begins with the run and the warm-up is a factor on it (wespeaker), not a stretch before it."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """A ramp has to end after it began."""
        if self.margin != "constant" and self.margin_end_epoch <= self.margin_begin_epoch:
            yield (
                "margin_end_epoch",
                f"{self.margin_end_epoch}; expected an epoch after margin_begin_epoch ({self.margin_begin_epoch})",
            )


class ConstantWithWarmupOptions(ScheduleOptions):
    """The full learning rate after `warmup_epochs` of linear rise."""

    name: str = "constant_with_warmup"
    warmup_epochs: Epochs = 1.0
    """Epochs of linear rise from (almost) zero; fractions are fine."""


class FloorOptions(ScheduleOptions):
    """Options of cosine and linear, and the base of other schedules that end at a floor."""

    final_learning_rate: Annotated[float, Ge(0.0), Le(1000.0)] = 1e-6
    """The learning rate at the end; the minimum of plateau."""


class StepOptions(ScheduleOptions):
    """Times `decay` after each `decay_interval` epochs."""

    name: str = "step"
    decay: Factor = DECAY
    """The factor."""
    decay_interval: Interval = DECAY_INTERVAL
    """Epochs between two factors."""


class ExponentialOptions(ScheduleOptions):
    """Down in equal factors: to `final_learning_rate` at the end, or by `decay` every `decay_interval` epochs."""

    name: str = "exponential"
    final_learning_rate: LearningRate | Literal["auto"] = "auto"
    """Where the learning rate ends; auto: it falls by `decay`."""
    decay: Factor | Literal["auto"] = "auto"
    """The factor; auto: that of step, if there is no final_learning_rate."""
    decay_interval: Interval = DECAY_INTERVAL
    """Epochs per factor."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """An end and a factor contradict each other."""
        yield from super().problems()
        if self.decay != "auto" and self.final_learning_rate != "auto":
            yield (
                "final_learning_rate",
                f"{self.final_learning_rate:g} together with decay: {self.decay:g}; exponential falls to the one or by "
                "the other: give one of them",
            )


class CosineRestartsOptions(FloorOptions):
    """Half cosines one after the other, each `restart_factor` times as long as the one before (SGDR)."""

    name: str = "cosine_restarts"
    restart_epochs: Annotated[float, Gt(0.0), Le(1e6)] = 10.0
    """Length of the first cycle, in epochs."""
    restart_factor: Annotated[float, Ge(1.0), Le(1000.0)] = 2.0
    """Each cycle is this many times as long as the one before."""


class PolynomialOptions(FloorOptions):
    """From the top to the floor as (1 - share of the run) to the `power`."""

    name: str = "polynomial"
    power: Annotated[float, Gt(0.0), Le(100.0)] = 2.0
    """Exponent."""


class OneCycleOptions(FloorOptions):
    """Half a cosine up from a 25th of the top, then half a cosine down to the floor (Smith and Topin)."""

    name: str = "one_cycle"
    peak_share: Share = 0.3
    """Share of the run after which the learning rate reaches its top."""


class PlateauOptions(FloorOptions):
    """The top, times `decay` whenever `plateau_patience` evaluations brought no better EER."""

    name: str = "plateau"
    decay: Factor = DECAY
    """The factor."""
    plateau_patience: Count = 3
    """Evaluations without a better EER before the next factor."""


SCHEDULES: dict[str, Component] = {
    "constant": Component(
        ScheduleOptions, "speakernet.training.schedules:constant", "The full learning rate throughout."
    ),
    "constant_with_warmup": Component(ConstantWithWarmupOptions, "speakernet.training.schedules:constant"),
    "step": Component(StepOptions, "speakernet.training.schedules:step"),
    "linear": Component(
        FloorOptions, "speakernet.training.schedules:linear", "A straight line from the top to the floor."
    ),
    "cosine": Component(
        FloorOptions, "speakernet.training.schedules:cosine", "Half a cosine from the top to the floor."
    ),
    "cosine_restarts": Component(CosineRestartsOptions, "speakernet.training.schedules:cosine_restarts"),
    "polynomial": Component(PolynomialOptions, "speakernet.training.schedules:polynomial"),
    "exponential": Component(ExponentialOptions, "speakernet.training.schedules:exponential"),
    "one_cycle": Component(OneCycleOptions, "speakernet.training.schedules:one_cycle"),
    # The shape of plateau is constant; its drops come from the observed EERs (LearningRateSchedule).
    "plateau": Component(PlateauOptions, "speakernet.training.schedules:constant"),
}
