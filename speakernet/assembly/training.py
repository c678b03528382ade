"""From the sections optimizer, schedule, training and runtime to a trainer; refusals come before the first step."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speakernet import distributed
from speakernet.assembly.compiling import build_compiler
from speakernet.assembly.refusals import needs_gradient_cache, say_what_has_no_effect
from speakernet.config.schema import Config, config_to_dict
from speakernet.machine.device import find_device
from speakernet.machine.settings import AppliedSetting, optimize_torch_settings
from speakernet.models.layers import is_safe_in_channels_last
from speakernet.models.model_file import model_file_contents
from speakernet.models.speaker_net import SpeakerNet
from speakernet.training.averaging import WeightAverage
from speakernet.training.checkpoint import CheckpointStore
from speakernet.training.interfaces import Loader
from speakernet.training.memory import enable_gradient_checkpointing
from speakernet.training.optimizers import create_optimizer
from speakernet.training.precision import Precision, choose_precision
from speakernet.training.profiler import make_profiler
from speakernet.training.progress import Progress
from speakernet.training.schedules import LearningRateSchedule, MarginSchedule
from speakernet.training.step import TrainingStep
from speakernet.training.threads import ThreadWatch
from speakernet.training.tracker import PerformanceTracker
from speakernet.training.trainer import Trainer

logger = logging.getLogger(__name__)

Validate = Callable[[], Mapping[str, Any]]


def prepare_machine(config: Config) -> list[AppliedSetting]:
    """Apply the machine switches of `runtime` to torch, and log each with its reason.

    Raises:
        ValueError: a GPU was asked for and is not there, or a switch without sense.
    """
    runtime = config.runtime
    applied = optimize_torch_settings(runtime, find_device(runtime), save_memory=runtime.gradient_checkpointing)
    for setting in applied:
        logger.info("torch setting: %s", setting)
    return applied


def watch_threads(config: Config, device: torch.device) -> ThreadWatch:
    """What looks after the threads of the run; a reproducible one keeps its number, since another gives other bits."""
    adapts = config.runtime.threads == "auto" and not config.runtime.deterministic
    return ThreadWatch(torch.get_num_threads() if device.type == "cpu" else 1, adapts=adapts)


def build_precision(config: Config, device: torch.device) -> Precision:
    """The precision that the configuration asks for, or the best one there is.

    Raises:
        ValueError: the device cannot train in it.
    """
    runtime = config.runtime
    choice = choose_precision(runtime.precision, device)
    if runtime.deterministic and runtime.precision == "auto" and choice.name == "fp16":
        choice = dataclasses.replace(choice, name="no", reason="deterministic: fp16's scale depends on history")
    return Precision(runtime, choice.name, device, reason=choice.reason)


def build_schedules(
    config: Config, loss: nn.Module, steps_per_epoch: int
) -> tuple[LearningRateSchedule, MarginSchedule | None]:
    """The learning rate and, where the loss has a margin, the margin of each step."""
    learning_rate = LearningRateSchedule(
        config.schedule,
        config.optimizer.learning_rate,
        steps_per_epoch=steps_per_epoch,
        num_epochs=config.training.max_epochs,
    )
    margin = getattr(loss, "margin", None)
    if not isinstance(margin, int | float):
        return learning_rate, None
    return learning_rate, MarginSchedule(config.schedule, float(margin), steps_per_epoch=steps_per_epoch)


def apply_memory_options(config: Config, net: nn.Module, device: torch.device, precision: Precision) -> None:
    """Gradient checkpointing and memory layout.

    Raises:
        ValueError: checkpointing was asked of a model that forbids it.
    """
    runtime = config.runtime
    if runtime.gradient_checkpointing:
        count = enable_gradient_checkpointing(net)
        logger.info("gradient checkpointing: %d blocks are computed again in the backward pass", count)
    wants = runtime.channels_last == "on" or (
        runtime.channels_last == "auto" and device.type == "cuda" and precision.name != "no"
    )
    if wants:
        if not any(isinstance(module, nn.Conv2d) for module in net.modules()):
            logger.warning("runtime.channels_last: on has no effect: %s has no 2-D convolution", config.model.name)
            return
        if device.type == "cpu" and not is_safe_in_channels_last(net):
            logger.warning("runtime.channels_last: on has no effect: oneDNN crashes on this network's few channels")
            return
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        logger.info("2-D convolutions in channels_last layout")
    elif runtime.channels_last == "off" or device.type == "cuda":
        # SpeakerNet is built in channels_last, which never lost on a CPU; in float32 on a GPU it may.
        net.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


def build_trainer(
    config: Config,
    net: SpeakerNet,
    loss: nn.Module,
    loader: Loader,
    validate: Validate,
    run_folder: str | Path,
    device: torch.device,
    advise: Callable[[float], str] | None = None,
) -> Trainer:
    """A trainer ready to run; `net` and `loss` are moved to the device and changed in place.

    What cannot work together was refused before (`refuse_impossible`). `advise` says what to change when so large a
    share of the time went into waiting for data.
    """
    training = config.training
    say_what_has_no_effect(config, device, len(loader))
    precision = build_precision(config, device)
    net.to(device)
    loss.to(device)
    apply_memory_options(config, net, device, precision)
    optimizer = create_optimizer(config.optimizer, [net, loss], device, is_float32=precision.name == "no")
    steps_per_epoch = -(-len(loader) // training.accumulation_steps)
    learning_rate, margin = build_schedules(config, loss, steps_per_epoch)
    folder = Path(run_folder)
    step = _build_step(config, net, loss, optimizer, precision, loader, folder)
    keep = max(training.keep_checkpoints, training.average_checkpoints)

    def model_contents(summary: dict[str, Any]) -> dict[str, Any]:
        return model_file_contents(net, loss_normalizes=config.loss.normalize_embeddings, training_summary=summary)

    return Trainer(
        net=net,
        loss=loss,
        optimizer=optimizer,
        learning_rate=learning_rate,
        margin=margin,
        loader=loader,
        validate=validate,
        precision=precision,
        store=CheckpointStore(folder, keep=keep, compress=training.compress_checkpoints),
        tracker=PerformanceTracker(
            0, precision=precision.name, accumulation_steps=training.accumulation_steps, device=device
        ),
        model_contents=model_contents,
        options=config.training,
        step=step,
        average=WeightAverage(net, training.ema_decay),
        progress=Progress(folder if distributed.is_main() else None),
        compiler=build_compiler(config, net, device, recover=step.forget),
        threads=watch_threads(config, device),
        advise=advise,
        extra_contents=_origin(config, loader),
    )


def _build_step(
    config: Config,
    net: nn.Module,
    loss: nn.Module,
    optimizer: torch.optim.Optimizer,
    precision: Precision,
    loader: Loader,
    folder: Path,
) -> TrainingStep:
    runtime = config.runtime
    profiles = runtime.profiling and distributed.is_main()
    return TrainingStep(
        net,
        loss,
        optimizer,
        precision,
        max_grad_norm=config.training.max_grad_norm,
        utterances_per_speaker=int(getattr(loader, "utterances_per_speaker", 1)),
        gradient_cache=needs_gradient_cache(config),
        profiler=make_profiler(profiles, folder / "profile", runtime.profile_steps, precision.device),
    )


def _origin(config: Config, loader: Loader) -> dict[str, Any]:
    """What a checkpoint says of where it comes from, and a resumed run is compared with."""
    versions = {"torch": str(torch.__version__)}
    return {"config": config_to_dict(config), "versions": versions, **getattr(loader, "identity", {})}
