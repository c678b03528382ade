"""The second stage of a run: a larger margin and longer crops, in a folder of its own within the run folder.

And the learning rate and margin of both stages as a table, without any data.
"""

import dataclasses
import gc
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speakernet.assembly.data import build_training_loader, reserved_for_training
from speakernet.assembly.inputs import Inputs
from speakernet.assembly.model import build_loss
from speakernet.assembly.training import Validate, build_schedules, build_trainer
from speakernet.checkpoint import read_own_checkpoint
from speakernet.config.schema import Config, replaced
from speakernet.files import place
from speakernet.models.speaker_net import SpeakerNet
from speakernet.parallel import distributed
from speakernet.random import derive_seed
from speakernet.run_folder import AVERAGE, BEST, CHECKPOINTS, LAST, SECOND_STAGE, move_aside
from speakernet.terminal import counted
from speakernet.training.checkpoints import find_checkpoint
from speakernet.training.optimizers import WeightAverage
from speakernet.training.options import LARGEST_SEED
from speakernet.training.options.schedules import CosineOptions, ExponentialOptions
from speakernet.training.state import Stage, StopRequest

logger = logging.getLogger(__name__)

STAGE = "large-margin stage"
# Key of the stage's own random draws, beside the run's seed.
STAGE_STREAM = 104
# The table needs no list, and so no number of speakers.
_CLASSES = 2


def large_margin_config(config: Config) -> Config:
    """The configuration of the second stage: longer crops, larger margin, small learning rate, voices as recorded.

    Source: Thienpondt et al. 2021, "The IDLab VoxCeleb speaker recognition challenge 2020 system description"; the fall
    of the learning rate is that of wespeaker's `resnet_lm.yaml` or of 3D-Speaker's `eres2netv2_lm.yaml`.
    """
    training = config.training
    rate, final = training.large_margin_learning_rate, training.large_margin_final_learning_rate
    is_cosine = training.large_margin_schedule == "cosine"
    schedule = (CosineOptions if is_cosine else ExponentialOptions)(
        final_learning_rate=rate / 4 if final == "auto" else final,
        warmup_epochs=training.large_margin_warmup_epochs,
        warmup_overlaps=not is_cosine,
    )
    loss = config.loss.with_margin(training.large_margin).model_dump()
    for values in (loss, *(one for one in loss.values() if isinstance(one, dict))):
        # As wespeaker: the larger margin replaces the penalty on the nearest other speakers.
        if "inter_top_k" in values:
            values["inter_top_k"] = 0
    return replaced(
        config,
        data={
            "crop_frames": training.large_margin_crop_frames,
            "crop_frames_max": 0,
            "batch_size": training.large_margin_batch_size or config.data.batch_size,
        },
        augment={
            "speed_factors": [1.0],
            "warp_factors": [1.0],
            "real_share": "auto",
            "real_epochs": 0,
            "enabled": config.augment.enabled and training.large_margin_augment,
        },
        loss=loss,
        optimizer={"learning_rate": rate},
        schedule=schedule.model_dump(),
        training={
            "max_epochs": training.large_margin_epochs,
            "test_interval": min(training.test_interval, training.large_margin_epochs),
            "large_margin_epochs": 0,
            "average_checkpoints": 0,
            "freeze_epochs": 0,
            "patience": 0,
        },
        # Its epochs are counted from 0 again: with the run's own seed they would repeat the draws of the first ones.
        runtime={"seed": derive_seed(config.runtime.seed, STAGE_STREAM) % LARGEST_SEED},
    )


def train_large_margin_stage(
    config: Config,
    net: SpeakerNet,
    loss: nn.Module,
    inputs: Inputs,
    validate: Validate,
    run_folder: str | Path,
    first_stage_steps: int,
    *,
    stop: StopRequest | None = None,
    chosen_by: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The second stage, in `<run folder>/large_margin`; its best model replaces best.pt if its EER is lower.

    Called after the first stage with the same network and head. It begins with what the first stage evaluated: the
    average of its checkpoints, or the moving average of its weights, if it keeps one. Like the first it resumes when
    called again; if the first stage has continued since (`first_stage_steps`), it starts over.
    """
    whole, config, folder = config, large_margin_config(config), Path(run_folder)
    margin = whole.training.large_margin
    # The first stage's loader, corpus, optimizer and averages hang together in cycles, which Python frees at leisure.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    usual, loss.margin = loss.margin, margin  # type: ignore[assignment]
    for module in loss.modules():
        if hasattr(module, "inter_top_k"):
            module.inter_top_k = 0  # type: ignore[assignment]
    logger.info(
        "%s: %s, margin %g, crops of %d frames, learning rate %g",
        *(STAGE, counted(config.training.max_epochs, "epoch"), margin),
        *(config.data.crop_frames, config.optimizer.learning_rate),
    )
    if isinstance(usual, float) and margin < usual:
        logger.warning("training.large_margin: %g is below the first stage's %g", margin, usual)
    distributed.from_main(lambda: _set_aside_older_stage(folder / SECOND_STAGE, first_stage_steps))
    if not distributed.from_main((folder / SECOND_STAGE / LAST).exists):
        _begin_with_evaluated_weights(whole, net, loss, folder)
    loader = build_training_loader(config, inputs, reserved_bytes=reserved_for_training(config, net, inputs.device))
    try:
        best = distributed.from_main(lambda: read_own_checkpoint(folder / BEST)["training_summary"])
        given = best.get("initial_model")
        stage = Stage(STAGE, "--training.large_margin_epochs", first_stage_steps, given, chosen_by)
        trainer = build_trainer(
            config,
            net,
            loss,
            loader,
            validate,
            folder / SECOND_STAGE,
            inputs.device,
            stage=stage,
            stop=stop,
        )
        summary = trainer.train()
    finally:
        loader.close()
    is_wanted = config.training.final_model == "last"
    distributed.from_main(lambda: adopt_better(folder / BEST, folder / SECOND_STAGE / BEST, is_wanted=is_wanted))
    return summary


def _begin_with_evaluated_weights(config: Config, net: nn.Module, loss: nn.Module, folder: Path) -> None:
    """Give the network the average of checkpoints, else the moving average, if the first stage was judged by one."""
    training = config.training
    if training.average_checkpoints:
        contents = distributed.from_main(lambda: read_own_checkpoint(folder / CHECKPOINTS / AVERAGE))
        # What a model file does not hold (the position in keyed draws) stays as it is.
        net.load_state_dict({**net.state_dict(), **contents["weights"]})
        loss.load_state_dict(contents["head"])
        logger.info("%s: begins with the average of the checkpoints of the first stage", STAGE)
    elif training.ema_decay:
        average = WeightAverage(net, training.ema_decay)
        average.load_state_dict(
            distributed.from_main(lambda: read_own_checkpoint(folder / LAST)["training"]["average"])
        )
        average.swap()
        logger.info("%s: begins with the moving average of the weights of the first stage", STAGE)


def _set_aside_older_stage(folder: Path, first_stage_steps: int) -> None:
    found = find_checkpoint(folder)
    before = found[1].get("training", {}).get("first_stage_steps") if found else None
    if before not in (None, first_stage_steps):
        logger.warning(
            "the large-margin stage followed step %d of the first stage, which is at step %d now: it starts over, the "
            "old one is moved to %s",
            before,
            first_stage_steps,
            move_aside(folder).name,
        )


def adopt_better(best: Path, candidate: Path, *, is_wanted: bool) -> bool:
    """Replace the model file `best` by `candidate` if its held-out EER is lower, or it is wanted; logs which."""
    before, after = (read_own_checkpoint(path)["training_summary"] for path in (best, candidate))
    eer_before, eer_after = before["best_eer_percent"], after["best_eer_percent"]
    if before == after:
        logger.info("%s: EER %.2f %%; best.pt is its model already", STAGE, eer_after)
        return False
    is_better = is_wanted or bool(eer_after < eer_before)
    verdict = "kept" if is_better else "not kept"
    logger.info("%s: EER %.2f %%, best.pt before %.2f %%: %s", STAGE, eer_after, eer_before, verdict)
    if is_better:
        place(candidate, best)
    return is_better


@dataclasses.dataclass(frozen=True)
class ScheduledEpoch:
    """Learning rate and margin (if the loss has one) at the beginning and end of an epoch, counted from 1."""

    stage: str
    epoch: int
    learning_rates: tuple[float, float]
    margins: tuple[float, float] | None


def scheduled_epochs(config: Config) -> list[ScheduledEpoch]:
    """Of both stages: the first and last epoch, and those in which warm-up and margin ramp begin, are half way, end."""
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
    note = "plateau: multiplied by schedule.decay whenever the EER stops falling; not known beforehand"
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
