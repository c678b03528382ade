"""The second stage of a run: a larger margin and longer crops, in a folder of its own within the run folder."""

import gc
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speakernet.assembly.data import build_training_loader
from speakernet.assembly.inputs import Inputs
from speakernet.assembly.placement import reserved_for_training
from speakernet.assembly.training import Validate, build_trainer
from speakernet.checkpoint import read_own_checkpoint
from speakernet.config.schema import Config, replaced
from speakernet.files import place
from speakernet.models.speaker_net import SpeakerNet
from speakernet.parallel import distributed
from speakernet.random import derive_seed
from speakernet.run_folder import AVERAGE, BEST, CHECKPOINTS, LAST, SECOND_STAGE, move_aside
from speakernet.training.interrupts import StopRequest
from speakernet.training.options import LARGEST_SEED
from speakernet.training.options.schedules import CosineOptions, ExponentialOptions
from speakernet.training.state import Stage
from speakernet.training.store import find_checkpoint

logger = logging.getLogger(__name__)

STAGE = "large-margin stage"
# Key of the stage's own random draws, beside the run's seed.
STAGE_STREAM = 104


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
        loss=config.loss.with_margin(training.large_margin).model_dump(),
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
    stop: StopRequest | None = None,
    chosen_by: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The second stage, in `<run folder>/large_margin`; its best model replaces best.pt where its EER is lower.

    Call it after the first stage with the same network and head, once nothing else of that stage is held any more: its
    memory is given back here. List, audio and lookup table are the first stage's (`inputs`). It begins with the average
    of the first stage's checkpoints where there is one. Like the first it resumes by being called again; where the
    first stage has gone on since (`first_stage_steps`), it begins anew.
    """
    stage = large_margin_config(config)
    # The first stage's loader, corpus, optimizer and averages hang together in circles, which Python frees at leisure.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    usual, loss.margin = loss.margin, config.training.large_margin  # type: ignore[assignment]
    folder = Path(run_folder)
    logger.info(
        "%s: %d epochs, margin %g, crops of %d frames, learning rate %g",
        STAGE,
        stage.training.max_epochs,
        config.training.large_margin,
        stage.data.crop_frames,
        stage.optimizer.learning_rate,
    )
    if isinstance(usual, float) and config.training.large_margin < usual:
        logger.warning("training.large_margin: %g is below the first stage's %g", config.training.large_margin, usual)
    distributed.from_main(lambda: _set_aside_older_stage(folder / SECOND_STAGE, first_stage_steps))
    begins = not distributed.from_main((folder / SECOND_STAGE / LAST).exists)
    if config.training.average_checkpoints and begins:
        _begin_with_average(net, loss, folder / CHECKPOINTS / AVERAGE)
    reserved = reserved_for_training(stage, net, inputs.device)
    loader = build_training_loader(stage, inputs, reserved_bytes=reserved)
    try:
        best = distributed.from_main(lambda: read_own_checkpoint(folder / BEST)["training_summary"])
        place = Stage(STAGE, "--training.large_margin_epochs", first_stage_steps, best.get("initial_model"))
        stage_folder = folder / SECOND_STAGE
        trainer = build_trainer(
            stage, net, loss, loader, validate, stage_folder, inputs.device, stage=place, stop=stop, chosen_by=chosen_by
        )
        summary = trainer.train()
    finally:
        loader.close()
    is_wanted = config.training.final_model == "last"
    distributed.from_main(lambda: adopt_better(folder / BEST, folder / SECOND_STAGE / BEST, is_wanted=is_wanted))
    return summary


def _begin_with_average(net: nn.Module, loss: nn.Module, path: Path) -> None:
    contents = distributed.from_main(lambda: read_own_checkpoint(path) if path.exists() else None)
    if contents is None:
        logger.warning("%s: there is no %s; it begins with the weights of the last epoch", STAGE, path)
        return
    # What is no weight of the model file (the position in keyed draws) goes on.
    net.load_state_dict({**net.state_dict(), **contents["weights"]})
    loss.load_state_dict(contents["head"])
    logger.info("%s: begins with the average of the checkpoints of the first stage", STAGE)


def _set_aside_older_stage(folder: Path, first_stage_steps: int) -> None:
    found = find_checkpoint(folder)
    training = found.contents.get("training", {}) if found else {}
    before = training.get("first_stage_steps", first_stage_steps)
    if before != first_stage_steps:
        logger.warning(
            "the large-margin stage followed step %d of the first stage, which is at step %d now: it begins anew, "
            "the old one is moved to %s",
            before,
            first_stage_steps,
            move_aside(folder).name,
        )


def adopt_better(best: Path, candidate: Path, *, is_wanted: bool) -> bool:
    """Replace the model file `best` by `candidate` where its held-out EER is lower, or it is wanted; says which."""
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
