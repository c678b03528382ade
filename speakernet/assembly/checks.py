"""What is checked before the first step: options that cannot work together, lists, files, free space.

Options need no data: `refuse_impossible` runs before any is read.
"""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from speakernet.assembly.inputs import Inputs, chosen_by_validation, validates_on_test_list, voices_of
from speakernet.assembly.model import build_loss, build_model
from speakernet.checks import Finding, worst
from speakernet.checks.lists import quick_check
from speakernet.checks.samples import read_facts, sample_findings
from speakernet.config import Config, ConfigError
from speakernet.files import human_bytes
from speakernet.losses.options import LossOptions
from speakernet.machine.device import find_device
from speakernet.machine.facts import usable_cores
from speakernet.models.layers import is_safe_in_channels_last
from speakernet.models.speaker_net import SpeakerNet
from speakernet.parallel import distributed
from speakernet.run_folder import LAST
from speakernet.terminal import counted
from speakernet.training.compiling import blocks_to_checkpoint, platform_obstacle
from speakernet.training.optimizers import should_fuse
from speakernet.training.precision import choose_precision

logger = logging.getLogger(__name__)

READ_AT_START_SECONDS = 3600.0
"""Trial lists of no more speech are decoded before the first step, in seconds; longer ones are left to the doctor."""
SHOWN = ("speakers", "training audio: length", "trials", "trial identity")
"""Findings that are logged although all is well: how much there is. That nothing is missing is a detail."""


def check_options(config: Config) -> list[Finding]:
    """Whether this machine can train what the options ask for, as the doctor's lines."""
    try:
        device, net = find_device(config.runtime), build_model(config)
        refuse_impossible(config, net, device)
    except ValueError as error:
        return [Finding("error", "options", str(error))]
    can = f"{config.model.name} with {config.loss.name} can be trained on {device.type}"
    return [Finding("ok", "options", can), *_space_findings(config, net)]


def _space_findings(config: Config, net: SpeakerNet) -> list[Finding]:
    """An error if the disk lacks the space for the checkpoints of a run."""
    folder = Path(config.training.save_path).absolute()
    weights = sum(one.numel() * one.element_size() for one in net.parameters())
    # Two moments of the optimizer, and the average. The head comes on top: this is the least.
    last = weights * (3 + (config.training.ema_decay > 0))
    # A new last.pt is written beside the old one, which is kept.
    needed = weights + last * (1 if (folder / LAST).exists() else 2)
    existing = next(one for one in (folder, *folder.parents) if one.exists())
    free = shutil.disk_usage(existing).free
    message = f"{human_bytes(free)} free in {existing}; checkpoints of {config.model.name} need {human_bytes(needed)}"
    advice = "free some space, or choose another --save_path"
    return [Finding("error", "free space", message, advice)] if free < needed else []


def check_inputs(config: Config, inputs: Inputs, net: SpeakerNet) -> None:
    """Check the lists of a run against options, each other and their files, and the disk; log what was found."""
    data, needed = config.data, config.loss.min_utterances
    if not data.train_list:
        missing = " and ".join(f"data.{name}" for name in ("train_list", "test_list") if not getattr(data, name))
        raise ConfigError(f"no training list: set {missing}; `speakernet prepare` makes lists")
    if data.utterances_per_speaker < needed:
        raise ConfigError(
            f"data.utterances_per_speaker is {data.utterances_per_speaker}, but the loss {config.loss.name} compares "
            f"utterances of one speaker and needs at least {needed}; set --nPerSpeaker {needed}"
        )
    if validates_on_test_list(config) and chosen_by_validation(config):
        logger.warning(
            "the best checkpoint is chosen on %s, which is also the reported list; data.validation_list, "
            "data.validation_speakers or training.final_model: last avoids that",
            data.test_list,
        )
    if inputs.validation.trials.labels is None:
        raise ConfigError(f"{data.validation_list} has no labels, so it cannot choose the best checkpoint")
    # Often both are the same list.
    trial_lists = {(id(one.trials), id(one.source)): one for one in (inputs.validation, inputs.test)}.values()
    findings = quick_check(
        train_list=inputs.training.rows,
        train_source=inputs.training.source,
        trials=[(one.trials, one.source) for one in trial_lists],
        min_utterances=needed,
        max_bad_share=data.max_bad_share if data.on_bad_audio == "skip" else 0.0,
        # No length is too short here: the doctor judges that.
        min_seconds=0.0,
    )
    findings += _space_findings(config, net)
    if worst(findings) != "error":
        for one in trial_lists:
            # Audio that judges the run is decoded now, so that damage is not found after its last epoch.
            names = one.trials.names
            if one.source.lookup_table(names).seconds.sum() <= READ_AT_START_SECONDS:
                check = f"trial audio ({Path(one.trials.source).name})"
                findings += sample_findings(read_facts(one.source, names, usable_cores()), check)
    for finding in findings:
        if finding.level == "warning":
            logger.warning("%s", finding)
        elif finding.level == "ok":
            logger.log(logging.INFO if finding.check in SHOWN else logging.DEBUG, "%s", finding)
    if worst(findings) == "error":
        raise ValueError("\n".join(str(finding) for finding in findings if finding.level == "error"))


def refuse_impossible(config: Config, net: nn.Module, device: torch.device) -> None:
    """Refuse what cannot be trained."""
    runtime = config.runtime
    # Both are called for their refusals alone.
    choose_precision(runtime.precision, device)
    should_fuse(config.optimizer, device)
    if runtime.gradient_checkpointing:
        blocks_to_checkpoint(net)
    for problem in _problems(config):
        raise ConfigError(problem)
    if runtime.compile == "on" and (obstacles := compile_obstacles(config, net, device)):
        raise ValueError(f"runtime.compile: on, but {'; '.join(obstacles)}; or set runtime.compile: off")


def _problems(config: Config) -> Iterator[str]:
    """Combinations of options that cannot work."""
    training, augment, loss = config.training, config.augment, config.loss
    if needs_gradient_cache(config) and training.gradient_cache == "off":
        yield (
            f"training.accumulation_steps: {training.accumulation_steps} with the metric loss {loss.name}: each "
            "micro-batch would only see its own negatives. Set training.gradient_cache: auto (two passes), "
            "or accumulation_steps: 1 with a larger data.batch_size"
        )
    if training.large_margin_epochs and not has_margin(loss):
        yield (
            f"training.large_margin_epochs: {training.large_margin_epochs}, but the loss {loss.name} has no margin; "
            "set it to 0, or take amsoftmax or aamsoftmax"
        )
    # The second stage trains voices as recorded; without 1.0 among the factors the head has no class of them.
    if training.large_margin_epochs and not voices_of(config).has_real:
        yield (
            f"training.large_margin_epochs: {training.large_margin_epochs} with augment.speed_factors: "
            f"{augment.speed_factors} and augment.warp_factors: {augment.warp_factors}: the second stage trains "
            "unchanged voices, and the head has no classes for them; add 1.0 to the factors, or set "
            "large_margin_epochs: 0"
        )
    if augment.enabled and augment.real_epochs >= training.max_epochs:
        yield (
            f"augment.real_epochs: {augment.real_epochs} of training.max_epochs: {training.max_epochs}: no changed "
            "voice would ever be trained on; lower real_epochs, or remove speed_factors and warp_factors"
        )
    for option in ("freeze_epochs", "freeze_norm_statistics"):
        if (value := getattr(training, option)) and not training.initial_model:
            yield f"training.{option}: {value} needs a given network: name one with --initial_model FILE"
    if training.freeze_epochs >= training.max_epochs:
        yield (
            f"training.freeze_epochs: {training.freeze_epochs} of training.max_epochs: {training.max_epochs}: the "
            "network would never learn; raise max_epochs, or lower freeze_epochs"
        )
    # Of two speakers: their number is not known before the list is read.
    if training.freeze_epochs and not any(one.ndim > 1 for one in build_loss(config, 2).parameters()):
        yield (
            f"training.freeze_epochs: {training.freeze_epochs}, but the loss {loss.name} has no head that could "
            "learn in the meantime; set it to 0, or take a loss with one, such as aamsoftmax"
        )


def compile_obstacles(config: Config, net: nn.Module, device: torch.device) -> list[str]:
    """Why this network cannot be compiled here, each with what would have to change."""
    reasons = {
        platform_obstacle(device): True,
        "several ranks cannot agree on when to compile, and the compiler does not support their shared batch norm; "
        "start one process": distributed.is_distributed(),
        f"the gradient cache (metric loss {config.loss.name} under accumulation) runs each micro-batch twice, first "
        "without gradients; set training.accumulation_steps: 1": needs_gradient_cache(config),
        "crops have many lengths, each of which would be compiled; set data.crop_frames_max: 0": (
            config.data.crop_frames_max > config.data.crop_frames
        ),
        "torch's compiler does not support gradient checkpointing that keeps batch-norm statistics; set "
        "runtime.gradient_checkpointing: false": config.runtime.gradient_checkpointing,
        # Compiled code is in channels_last whatever the network is in; there the weight gradient of a strided 1 x 1
        # convolution with 8 or 12 input channels ends the process ("free(): invalid next size").
        "strided convolutions of fewer than 16 channels, compiled for a CPU, crash in oneDNN; take 16 channels or "
        "more": device.type == "cpu" and not is_safe_in_channels_last(net),
    }
    return [reason for reason, holds in reasons.items() if reason and holds]


def needs_gradient_cache(config: Config) -> bool:
    """Whether accumulation has to go through the two-pass gradient cache."""
    return config.loss.is_metric and config.training.accumulation_steps > 1


def has_margin(loss: LossOptions) -> bool:
    """Whether a schedule can move the loss's margin."""
    return hasattr(loss, "margin")


def warn_of_no_effect(config: Config, device: torch.device, num_batches: int) -> None:
    """Warn of options that do nothing, or not what their value says, in a run of `num_batches` an epoch."""
    training, schedule, runtime, epochs = config.training, config.schedule, config.runtime, config.training.max_epochs
    moves_margin = schedule.margin != "constant"
    of_epochs = f"of training.max_epochs: {epochs}"
    warnings = {
        "training.gradient_cache: on has no effect: it needs a metric loss and accumulation_steps above 1": (
            training.gradient_cache == "on" and not needs_gradient_cache(config)
        ),
        f"training.accumulation_steps: {training.accumulation_steps}, but an epoch has "
        f"{counted(num_batches, 'batch')}: a step takes no more": training.accumulation_steps > num_batches,
        f"training.average_checkpoints: {training.average_checkpoints} {of_epochs}: there are no more": (
            training.average_checkpoints > epochs
        ),
        f"schedule.warmup_epochs: {schedule.warmup_epochs:g} {of_epochs}: the learning rate never reaches its peak": (
            schedule.warmup_epochs >= epochs
        ),
        f"schedule.warmup_epochs: {schedule.warmup_epochs:g} before one_cycle, which rises by itself: the learning "
        "rate rises twice; set schedule.warmup_epochs: 0": (
            0 < schedule.warmup_epochs < epochs and schedule.name == "one_cycle"
        ),
        f"schedule.margin: {schedule.margin} has no effect: this loss has no margin": (
            moves_margin and not has_margin(config.loss)
        ),
        f"schedule.margin_end_epoch: {schedule.margin_end_epoch:g} {of_epochs}: the margin never reaches its full "
        "size": moves_margin and has_margin(config.loss) and schedule.margin_end_epoch > epochs,
        f"runtime.gpu_id: {runtime.gpu_id} has no effect: this run is on the CPU": (
            runtime.gpu_id is not None and device.type == "cpu"
        ),
    }
    for warning, holds in warnings.items():
        if holds:
            logger.warning("%s", warning)
