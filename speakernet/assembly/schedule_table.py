"""Learning rate and margin of a run's telling epochs as a table, both stages, without any data."""

import dataclasses
import math
from collections.abc import Iterable

from speakernet.assembly.large_margin import STAGE, large_margin_config
from speakernet.assembly.model import build_loss
from speakernet.assembly.training import build_schedules
from speakernet.config.schema import Config

# The table needs no list, and so no number of speakers.
_CLASSES = 2


@dataclasses.dataclass(frozen=True)
class ScheduledEpoch:
    """What the steps of one epoch are given: values at its beginning and at its end."""

    stage: str
    """Empty for the first."""
    epoch: int
    """Counted from 1."""
    learning_rates: tuple[float, float]
    margins: tuple[float, float] | None
    """None for a loss without a margin."""


def scheduled_epochs(config: Config) -> list[ScheduledEpoch]:
    """The first epoch, those in which warm-up and margin ramp begin, are half way and end, and the last; both stages.

    Raises:
        ValueError: a schedule that cannot be built.
    """
    stages = [("", config)]
    if config.training.large_margin_epochs:
        stages.append((STAGE, large_margin_config(config)))
    return [one for name, stage in stages for one in _of_stage(name, stage)]


def schedule_table(config: Config) -> str:
    """`scheduled_epochs` as lines of text."""
    rows = [("epoch", "learning rate", "margin")]
    for one in scheduled_epochs(config):
        name = f"{one.epoch} of the {one.stage}" if one.stage else str(one.epoch)
        rows.append((name, _span(one.learning_rates), _span(one.margins) if one.margins else "none"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    note = "plateau: multiplied by schedule.decay where the EER stays; not known beforehand"
    return "\n".join([*lines, note] if config.schedule.name == "plateau" else lines)


def _of_stage(name: str, config: Config) -> Iterable[ScheduledEpoch]:
    # A step of its own for each epoch: the schedules count in fractions of one.
    loss = build_loss(config, _CLASSES)
    learning_rate, margin = build_schedules(config, loss, steps_per_epoch=1)
    for epoch in _telling_epochs(config):
        yield ScheduledEpoch(
            name,
            epoch + 1,
            (learning_rate(epoch), learning_rate(epoch + 1)),
            (margin(epoch), margin(epoch + 1)) if margin else None,
        )


def _telling_epochs(config: Config) -> list[int]:
    """Epochs, from 0."""
    schedule, last = config.schedule, config.training.max_epochs - 1
    found = {0, last}
    if schedule.warmup_epochs:
        found.add(math.ceil(schedule.warmup_epochs) - 1)
    if schedule.margin != "constant":
        begin, end = schedule.margin_begin_epoch, schedule.margin_end_epoch
        found |= {int(begin), int((begin + end) / 2), math.ceil(end) - 1, math.ceil(end)}
    # A ramp may end after the run does.
    return sorted(epoch for epoch in found if 0 <= epoch <= last)


def _span(values: tuple[float, float]) -> str:
    first, last = (f"{value:.3g}" for value in values)
    return first if first == last else f"{first} to {last}"
