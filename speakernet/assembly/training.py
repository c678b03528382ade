"""From the sections optimizer, schedule, training and runtime to a trainer; refusals come before the first step."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speakernet.assembly.checks import compile_obstacles, needs_gradient_cache, warn_of_no_effect
from speakernet.config.loading import save_config
from speakernet.config.schema import Config, config_to_dict
from speakernet.data.choices import Choice
from speakernet.frontend.perturbation import keep_draws_eager
from speakernet.losses.options import LossOptions
from speakernet.machine.device import find_device
from speakernet.machine.settings import NO_EFFECT, AppliedSetting, optimize_torch_settings
from speakernet.models.layers import is_safe_in_channels_last
from speakernet.models.model_file import model_file_contents
from speakernet.models.speaker_net import SpeakerNet
from speakernet.parallel import distributed
from speakernet.parallel.sharding import sharded_names
from speakernet.parallel.sync_norm import synchronize_norms
from speakernet.run_folder import CONFIG, PROFILE
from speakernet.training.checkpoints import CheckpointStore
from speakernet.training.compiling import Compiler, enable_gradient_checkpointing
from speakernet.training.optimizers import create_optimizer
from speakernet.training.precision import Precision, choose_precision
from speakernet.training.profiler import StepProfiler
from speakernet.training.progress import Progress
from speakernet.training.schedules import LearningRateSchedule, MarginSchedule
from speakernet.training.state import WHOLE_RUN, Stage, StopRequest
from speakernet.training.step import SeveralProcesses, TrainingStep
from speakernet.training.threads import ThreadWatch
from speakernet.training.trainer import Loader, Trainer

logger = logging.getLogger(__name__)

Validate = Callable[[], Mapping[str, Any]]

FEWEST_SPEAKERS = 20_000
"""From which `loss.sharded: auto` shards: below, a head takes little memory, and its gradients travel with the rest."""


def prepare_machine(config: Config) -> list[AppliedSetting]:
    """Apply the machine switches of `runtime` to torch, and log each with its reason."""
    runtime = config.runtime
    applied = optimize_torch_settings(
        runtime,
        find_device(runtime),
        save_memory=runtime.gradient_checkpointing,
        varies_lengths=config.data.crop_frames_max > config.data.crop_frames,
    )
    for setting in applied:
        # A switch that acts is a detail; one that has no effect is not.
        logger.log(logging.WARNING if setting.value == NO_EFFECT else logging.DEBUG, "torch setting: %s", setting)
    return applied


def build_precision(config: Config, device: torch.device) -> Precision:
    """The precision that the configuration asks for, or the best one there is."""
    runtime = config.runtime
    name, reason = choose_precision(runtime.precision, device)
    if runtime.deterministic and runtime.precision == "auto" and name == "fp16":
        name, reason = "no", "deterministic: fp16's scale depends on history"
    logger.info("precision: %s (%s)", name, reason)
    return Precision(runtime, name, device)


def build_schedules(
    config: Config, loss: nn.Module, steps_per_epoch: int
) -> tuple[LearningRateSchedule, MarginSchedule | None]:
    """The learning rate of each step, and its margin if the loss has one."""
    learning_rate = LearningRateSchedule(
        config.schedule,
        config.optimizer.learning_rate,
        steps_per_epoch=steps_per_epoch,
        num_epochs=config.training.max_epochs,
    )
    # The full margin is that of the loss as it was built: a schedule moves it from the first step on.
    margin = getattr(loss, "margin", None)
    if not isinstance(margin, int | float):
        return learning_rate, None
    return learning_rate, MarginSchedule(config.schedule, float(margin), steps_per_epoch=steps_per_epoch)


def build_compiler(config: Config, net: nn.Module, device: torch.device) -> Compiler:
    """The compiler that `runtime.compile` asks for; what cannot work was refused before."""
    runtime = config.runtime
    reasons = compile_obstacles(config, net, device)
    # Whether it pays is judged by measured times, which are never the same twice; `on` compiles before the first step.
    if runtime.deterministic and runtime.compile == "auto":
        reasons = ["deterministic: the moment of compiling depends on measured times"]
    if runtime.compile == "off" or reasons:
        if runtime.compile == "auto":
            logger.info("compile auto: off (%s)", "; ".join(reasons))
        for name, default in (("compile_scope", "auto"), ("compile_mode", "default")):
            if (value := getattr(runtime, name)) != default:
                logger.warning("runtime.%s: %s has no effect: nothing is compiled", name, value)
        return Compiler(net, None)
    scope, mode = runtime.compile_scope, runtime.compile_mode
    if mode != "default" and device.type == "cpu":
        logger.warning("runtime.compile_mode: %s has no effect on a CPU", mode)
        mode = "default"
    changes = {"compile_scope": "whole" if scope == "auto" else scope, "compile_mode": mode}
    options = runtime.model_copy(update=changes)
    return Compiler(net, options, prepare=keep_draws_eager)


def choose_sharding(options: LossOptions, num_classes: int, num_processes: int) -> Choice[bool]:
    """Whether the ranks keep a share each of a head of so many speakers, and why."""
    if options.sharded == "off":
        return Choice(False, "switched off")
    if num_processes == 1:
        return Choice(False, "one process keeps every speaker")
    if options.sharded == "on":
        return Choice(True, f"each of {num_processes} processes keeps a share of {num_classes:,} speakers, as asked")
    if not options.has_head:
        return Choice(False, "the loss has no head")
    is_large = num_classes >= FEWEST_SPEAKERS
    return Choice(is_large, f"{num_classes:,} speakers on {num_processes} processes; it pays from {FEWEST_SPEAKERS:,}")


def apply_memory_options(config: Config, net: nn.Module, device: torch.device, precision: Precision) -> None:
    """Gradient checkpointing and memory layout."""
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
        logger.debug("2-D convolutions in channels_last layout")
    elif runtime.channels_last == "off" or device.type == "cuda":
        # SpeakerNet is built in channels_last, which never lost on a CPU (ResNet 0.25 instead of 0.32 s a step); in
        # float32 on a GPU it may.
        net.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


def build_trainer(
    config: Config,
    net: SpeakerNet,
    loss: nn.Module,
    loader: Loader,
    validate: Validate,
    run_folder: str | Path,
    device: torch.device,
    *,
    stage: Stage = WHOLE_RUN,
    advise: Callable[[float], str] = lambda data_wait_share: "",
    stop: StopRequest | None = None,
) -> Trainer:
    """A trainer ready to run; what cannot work together was refused before (`refuse_impossible`).

    `net` and `loss` are moved to the device and changed in place. The other arguments are those of `Trainer`.
    """
    training, runtime, folder = config.training, config.runtime, Path(run_folder)
    warn_of_no_effect(config, device, len(loader))
    precision = build_precision(config, device)
    # Before the optimizer and the average are made: they keep tensors beside the weights, on the same device.
    net.to(device)
    loss.to(device)
    is_distributed = distributed.is_distributed()
    # The network of a second stage has them already.
    if is_distributed and runtime.sync_batch_norm != "off" and (count := synchronize_norms(net, device)):
        logger.info("batch norm over the batch of all processes: %d layers", count)
    apply_memory_options(config, net, device, precision)
    shard_head(config.loss, loss)
    profiles = runtime.profiling and distributed.is_main()
    step = TrainingStep(
        net,
        loss,
        create_optimizer(config.optimizer, [net, loss], device, is_float32=precision.name == "no"),
        precision,
        training,
        utterances_per_speaker=int(getattr(loader, "utterances_per_speaker", 1)),
        gradient_cache=needs_gradient_cache(config),
        ranks=SeveralProcesses(net, loss, device) if is_distributed else None,
        compiler=build_compiler(config, net, device),
        profiler=StepProfiler(runtime, folder / PROFILE, device) if profiles else None,
    )
    # A reproducible run keeps its number of threads, since another gives other bits.
    adapts = runtime.threads == "auto" and not runtime.deterministic
    values = config_to_dict(config)

    def on_start() -> None:
        # A later stage is part of the run whose configuration this is.
        if not stage.name:
            save_config(config, folder / CONFIG)

    def model_contents(summary: dict[str, Any]) -> dict[str, Any]:
        whole = summary if stage.chosen_by is None else {**summary, "chosen_by": dict(stage.chosen_by)}
        return model_file_contents(net, loss_normalizes=config.loss.normalize_embeddings, training_summary=whole)

    first_stage = {} if stage.first_stage_steps is None else {"first_stage_steps": stage.first_stage_steps}
    learning_rate, margin = build_schedules(config, loss, -(-len(loader) // training.accumulation_steps))
    return Trainer(
        step,
        loader,
        validate,
        learning_rate,
        margin,
        training,
        store=CheckpointStore(folder, training),
        progress=Progress(folder if distributed.is_main() else None, configuration=values),
        threads=ThreadWatch(torch.get_num_threads() if device.type == "cpu" else 1, adapts=adapts),
        model_contents=model_contents,
        # What a resumed run is compared with.
        origin={
            "config": values,
            "versions": {"torch": str(torch.__version__)},
            **getattr(loader, "identity", {}),
            **first_stage,
        },
        stage=stage,
        stop=stop,
        on_start=on_start,
        advise=advise,
    )


def shard_head(options: LossOptions, loss: nn.Module) -> None:
    """Let each rank keep a share of the speakers, in place, if that was asked for or pays.

    Called when the whole head has its first weights, before the optimizer is made.
    """
    # The second stage trains the head of the first.
    if sharded_names(loss):
        return
    choice = choose_sharding(options, getattr(loss, "num_classes", 0), distributed.world_size())
    asked_in_vain = options.sharded == "on" and not choice.value
    level = logging.WARNING if asked_in_vain else logging.INFO if choice.value else logging.DEBUG
    logger.log(level, "loss.sharded: %s: %s", options.sharded, choice)
    if choice.value:
        loss.shard(distributed.rank(), distributed.world_size())  # type: ignore[operator]
