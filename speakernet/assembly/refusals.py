"""Options that cannot work together are refused; those that do nothing in this run, on this machine, are named.

Both need no data: `refuse_impossible` runs before any is read.
"""

import logging

import torch
from torch import nn

from speakernet.assembly.model import build_loss
from speakernet.assembly.voices import voices_of
from speakernet.config import ConfigError
from speakernet.config.schema import Config
from speakernet.losses.options import LossOptions
from speakernet.models.layers import is_safe_in_channels_last
from speakernet.parallel import distributed
from speakernet.training.compiling import platform_obstacle
from speakernet.training.memory import blocks_to_checkpoint
from speakernet.training.optimizers import should_fuse
from speakernet.training.precision import choose_precision

logger = logging.getLogger(__name__)


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
    if runtime.cuda_graphs == "on" and (obstacles := graph_obstacles(config, device)):
        raise ValueError(f"runtime.cuda_graphs: on, but {'; '.join(obstacles)}; or set runtime.cuda_graphs: off")


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


def graph_obstacles(config: Config, device: torch.device) -> list[str]:
    """Why whole steps cannot be recorded here, each with what would have to change."""
    runtime, loss = config.runtime, config.loss
    is_fused, why = should_fuse(config.optimizer, device)
    draws = any(getattr(one, "draws_on_host", False) for one in (loss, getattr(loss, "metric", None)))
    compiles = runtime.compile != "off" and runtime.compile_mode != "default"
    reasons = {
        "training runs on the CPU; set runtime.device: cuda": device.type != "cuda",
        "several processes meet within a step; start one process": distributed.is_distributed(),
        "the host says vocal tracts with each batch; set augment.warp_factors: [1.0]": voices_of(config).has_warps,
        f"a bad step of this optimizer is read by the host ({why}); take a fused one": not is_fused,
        f"the loss {loss.name} draws its negatives on the host; take another": draws,
        "the gradient cache runs each micro-batch twice; set training.accumulation_steps: 1": needs_gradient_cache(
            config
        ),
        "gradient checkpointing asks for random states; set runtime.gradient_checkpointing: false": (
            runtime.gradient_checkpointing
        ),
        f"runtime.compile_mode: {runtime.compile_mode} records graphs of its own; set it to default": compiles,
        "the profiler could not tell the phases of a step; set runtime.profiling: false": runtime.profiling,
    }
    return [reason for reason, holds in reasons.items() if holds]


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
