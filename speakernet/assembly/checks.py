"""What is checked before the first step: options that cannot work together, lists, files, free space.

Options need no data: `refuse_impossible` runs before any is read.
"""

import logging
import shutil
from pathlib import Path

import torch
from torch import nn

from speakernet.assembly.inputs import Inputs, TrialInput, voices_of
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
    return [Finding("ok", "options", can), *space_findings(config, net)]


def space_findings(config: Config, net: SpeakerNet) -> list[Finding]:
    """Nothing, or that the disk has no room for what a run of this network keeps: better said before than after it."""
    folder = Path(config.training.save_path)
    weights = sum(one.numel() * one.element_size() for one in net.parameters())
    # Two moments of the optimizer, and the average. The head comes on top: this is the least.
    last = weights * (3 + (config.training.ema_decay > 0))
    # A last.pt is written beside the one that it takes the place of, and that one is kept.
    needed = weights + last * (1 if (folder / LAST).exists() else 2)
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(there).free
    if free >= needed:
        return []
    message = f"{human_bytes(free)} free in {there}; the checkpoints of {config.model.name} need {human_bytes(needed)}"
    return [Finding("error", "free space", message, "free some space, or choose another --save_path")]


def check_inputs(config: Config, inputs: Inputs, net: SpeakerNet) -> list[Finding]:
    """Check the lists of a run against each other and against their files, and the disk; log what was found.

    Raises:
        ValueError: a finding that would stop or spoil the run, all of them in one message.
    """
    data = config.data
    # Often one and the same.
    trial_lists = {(id(one.trials), id(one.source)): one for one in (inputs.validation, inputs.test)}
    findings = quick_check(
        train_list=inputs.training.rows,
        train_source=inputs.training.source,
        trials=[(one.trials, one.source) for one in trial_lists.values()],
        min_utterances=config.loss.min_utterances,
        max_bad_share=data.max_bad_share if data.on_bad_audio == "skip" else 0.0,
        # No length is too short here: that is the doctor's to judge.
        min_seconds=0.0,
    )
    findings += space_findings(config, net)
    if worst(findings) != "error":
        findings += [one for given in trial_lists.values() for one in _decoded(given)]
    for finding in findings:
        if finding.level == "warning":
            logger.warning("%s", finding)
        elif finding.level == "ok":
            logger.log(logging.INFO if finding.check in SHOWN else logging.DEBUG, "%s", finding)
    if worst(findings) == "error":
        raise ValueError("\n".join(str(finding) for finding in findings if finding.level == "error"))
    return findings


def _decoded(given: TrialInput) -> list[Finding]:
    """What only reading tells of the recordings that will judge the run: found now, not after its last epoch."""
    names = given.trials.names
    seconds = given.source.lookup_table(names).seconds
    if seconds.sum() > READ_AT_START_SECONDS:
        return []
    return sample_findings(
        read_facts(given.source, names, usable_cores()), f"trial audio ({Path(given.trials.source).name})"
    )


def refuse_impossible(config: Config, net: nn.Module, device: torch.device) -> None:
    """Refuse what cannot be trained.

    Raises:
        ValueError: a precision that the device lacks, a combination of options that cannot work, each with the remedy.
    """
    training, runtime = config.training, config.runtime
    # Both are asked for their refusals alone; what they choose is asked for again where it is used.
    choose_precision(runtime.precision, device)
    should_fuse(config.optimizer, device)
    if needs_gradient_cache(config) and training.gradient_cache == "off":
        raise ValueError(
            f"training.accumulation_steps: {training.accumulation_steps} with the metric loss {config.loss.name}: each "
            "micro-batch would only see its own negatives. Set training.gradient_cache: auto (two passes), "
            "or accumulation_steps: 1 with a larger data.batch_size"
        )
    if training.large_margin_epochs and not has_margin(config.loss):
        raise ValueError(
            f"training.large_margin_epochs: {training.large_margin_epochs}, but the loss {config.loss.name} "
            "has no margin to enlarge; set it to 0, or take amsoftmax or aamsoftmax"
        )
    _refuse_voices(config)
    _refuse_idle_freezing(config)
    if runtime.gradient_checkpointing:
        blocks_to_checkpoint(net)
    if runtime.compile == "on" and (obstacles := compile_obstacles(config, net, device)):
        raise ValueError(f"runtime.compile: on, but {'; '.join(obstacles)}; or set runtime.compile: off")


def _refuse_voices(config: Config) -> None:
    """Refuse to end with voices as recorded where the head has no class of them, and never to hear any other.

    Raises:
        ConfigError: naming the option.
    """
    training, augment = config.training, config.augment
    # Recorded speech keeps its classes in the head of all voices; without 1.0 among the factors it has none.
    if training.large_margin_epochs and not voices_of(config).has_real:
        raise ConfigError(
            f"training.large_margin_epochs: {training.large_margin_epochs} with augment.speed_factors: "
            f"{augment.speed_factors} and augment.warp_factors: {augment.warp_factors}: the second stage trains voices "
            "as they were recorded, of which the head would know no speaker; "
            "add 1.0 to the factors, or set large_margin_epochs: 0"
        )
    if augment.enabled and augment.real_epochs >= training.max_epochs:
        raise ConfigError(
            f"augment.real_epochs: {augment.real_epochs} of training.max_epochs: {training.max_epochs}: no other voice "
            "would ever be heard; lower real_epochs, or leave out speed_factors and warp_factors"
        )


def _refuse_idle_freezing(config: Config) -> None:
    """Refuse to freeze what nobody gave, or what then never learns.

    Raises:
        ConfigError: naming the option.
    """
    training = config.training
    if not training.initial_model:
        for option in ("freeze_epochs", "freeze_norm_statistics"):
            if value := getattr(training, option):
                raise ConfigError(
                    f"training.{option}: {value}, but no model is given whose network could be kept; name one with "
                    f"--initial_model FILE, or leave {option} out"
                )
    if training.freeze_epochs >= training.max_epochs:
        raise ConfigError(
            f"training.freeze_epochs: {training.freeze_epochs} of training.max_epochs: {training.max_epochs}: the "
            "network would never learn; raise max_epochs, or lower freeze_epochs"
        )
    # Built for two speakers to look at it: how many there will be is not known before the list is read.
    if training.freeze_epochs and not any(one.ndim > 1 for one in build_loss(config, 2).parameters()):
        raise ConfigError(
            f"training.freeze_epochs: {training.freeze_epochs}, but the loss {config.loss.name} has no head that could "
            "learn meanwhile; set it to 0, or take a loss with one, such as aamsoftmax"
        )


def compile_obstacles(config: Config, net: nn.Module, device: torch.device) -> list[str]:
    """Why this network cannot be compiled here, each with what would have to change."""
    found = [platform_obstacle(device)]
    if distributed.is_distributed():
        found.append(
            "with several processes each would judge by its own clock when to compile, and the compiler takes no "
            "batch norm over the batch of all; start one process"
        )
    if needs_gradient_cache(config):
        found.append(
            f"the gradient cache (metric loss {config.loss.name} under accumulation) runs each micro-batch twice, "
            "first without gradients; set training.accumulation_steps: 1"
        )
    if config.data.crop_frames_max > config.data.crop_frames:
        found.append("crops have many lengths, and every length would be compiled anew; set data.crop_frames_max: 0")
    if config.runtime.gradient_checkpointing:
        found.append(
            "torch's compiler does not take gradient checkpointing that keeps batch-norm statistics; "
            "set runtime.gradient_checkpointing: false"
        )
    # Compiled code is in channels_last whatever the network is in; there the weight gradient of a strided 1 x 1
    # convolution with 8 or 12 input channels ends the process ("free(): invalid next size").
    if device.type == "cpu" and not is_safe_in_channels_last(net):
        found.append(
            "strided convolutions of fewer than 16 channels, compiled for a CPU, crash in oneDNN; "
            "take 16 channels or more"
        )
    return [obstacle for obstacle in found if obstacle]


def needs_gradient_cache(config: Config) -> bool:
    """Whether accumulation has to go through the two-pass gradient cache."""
    return config.loss.is_metric and config.training.accumulation_steps > 1


def has_margin(loss: LossOptions) -> bool:
    """Whether a schedule can move the loss's margin."""
    return hasattr(loss, "margin")


def say_what_has_no_effect(config: Config, device: torch.device, num_batches: int) -> None:
    """Warn of options that do nothing, or not what their value says, in a run of `num_batches` an epoch."""
    training, schedule, runtime = config.training, config.schedule, config.runtime
    if training.gradient_cache == "on" and not needs_gradient_cache(config):
        logger.warning(
            "training.gradient_cache: on has no effect: it needs a metric loss and accumulation_steps above 1"
        )
    if training.accumulation_steps > num_batches:
        logger.warning(
            "training.accumulation_steps: %d, but an epoch has %d batches: a step takes no more than these",
            training.accumulation_steps,
            num_batches,
        )
    if training.average_checkpoints > training.max_epochs:
        logger.warning(
            "training.average_checkpoints: %d of training.max_epochs: %d: there will be no more than these",
            training.average_checkpoints,
            training.max_epochs,
        )
    if schedule.warmup_epochs >= training.max_epochs:
        logger.warning(
            "schedule.warmup_epochs: %g of training.max_epochs: %d: the learning rate never gets to its top",
            schedule.warmup_epochs,
            training.max_epochs,
        )
    elif schedule.warmup_epochs and schedule.name == "one_cycle":
        logger.warning(
            "schedule.warmup_epochs: %g before one_cycle, which rises by itself: the learning rate rises twice; "
            "schedule.warmup_epochs: 0 avoids that",
            schedule.warmup_epochs,
        )
    if schedule.margin != "constant" and not has_margin(config.loss):
        logger.warning("schedule.margin: %s has no effect: this loss has no margin", schedule.margin)
    elif schedule.margin != "constant" and schedule.margin_end_epoch > training.max_epochs:
        logger.warning(
            "schedule.margin_end_epoch: %g of training.max_epochs: %d: the margin never gets to its full size",
            schedule.margin_end_epoch,
            training.max_epochs,
        )
    if runtime.gpu_id is not None and device.type == "cpu":
        logger.warning("runtime.gpu_id: %d has no effect: this run is on the CPU", runtime.gpu_id)
