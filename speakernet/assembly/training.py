"""Build network, loss and trainer from the sections model, loss, optimizer, schedule, training and
runtime.

`refuse_impossible` refuses combinations that cannot work; it needs no data and runs before any data
is read.
"""

import functools
import importlib.util
import logging
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speakernet.config import ConfigError
from speakernet.config.schema import Config
from speakernet.data.lookup import default_cache_folder
from speakernet.frontend.perturbation import keep_draws_eager
from speakernet.losses.options import LOSSES
from speakernet.machine.device import find_device
from speakernet.machine.settings import optimize_torch_settings
from speakernet.models.layers import is_safe_in_channels_last
from speakernet.models.model_file import model_file_contents
from speakernet.models.speaker_net import SpeakerNet
from speakernet.options import OUTSIDE, Choice, create, lookup
from speakernet.parallel import distributed
from speakernet.random import derive_seed
from speakernet.run_folder import BEST, PROFILE
from speakernet.terminal import counted
from speakernet.training import (
    checkpoints,
    compiling,
    optimizers,
    progress,
    schedules,
    threads,
    trainer,
)
from speakernet.training.precision import Precision, choose_precision
from speakernet.training.recording import record_steps
from speakernet.training.step import TrainingStep
from speakernet.training.trackers import TRACKERS

logger = logging.getLogger(__name__)

Validate = Callable[[int], Mapping[str, Any]]
"""Given the number of finished epochs, evaluates the current network and returns the figures."""

MINING_STREAM = 103
"""Together with the run's seed, the key of the random stream for mining triplets."""


def prepare_machine(config: Config) -> None:
    """Apply the machine switches of `runtime` to torch, and choose where compiled code is kept."""
    # Unlike torch's own folder in /tmp it stays, so that a second run of a network compiles in
    # seconds. Before an optimizer is made, which imports the compiler.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(default_cache_folder() / "compiled"))
    applied = optimize_torch_settings(
        config.runtime,
        find_device(config.runtime),
        save_memory=config.runtime.gradient_checkpointing,
        varies_lengths=config.data.crop_frames_max > config.data.crop_frames,
    )
    logger.debug("torch settings: %s", applied)


def build_model(config: Config) -> SpeakerNet:
    """Build the configured network with fresh weights."""
    model = config.model
    best = Path(config.training.save_path) / BEST
    if hasattr(model.options, "spare") and best.is_file():
        options = model.options.model_copy(update={"spare": model.options.spare or str(best)})
        model = model.model_copy(update={"options": options})
    return SpeakerNet(model, config.frontend, config.data.sample_rate, config.runtime.seed)


def build_loss(config: Config, num_classes: int) -> nn.Module:
    """Build the configured loss, with a fresh head for `num_classes` speakers if it has one."""
    return create(  # type: ignore[no-any-return]
        lookup(LOSSES, config.loss.name, "loss"),
        config.loss,
        embedding_dim=config.model.embedding_dim,
        num_classes=num_classes,
        seed=derive_seed(config.runtime.seed, MINING_STREAM),
    )


def refuse_impossible(config: Config, net: SpeakerNet, device: torch.device) -> None:
    """Refuse options that this machine does not support and combinations that cannot work."""
    runtime = config.runtime
    # These are called only for the errors they raise.
    choose_precision(runtime.precision, device)
    optimizers.should_fuse(config.optimizer, device)
    if runtime.gradient_checkpointing:
        compiling.blocks_to_checkpoint(net)
    net.trunk.refuse_impossible(config.model.options)
    data = config.data
    training = config.training
    augment = config.augment
    loss = config.loss
    of_epochs = (
        f"but the run has only {counted(training.max_epochs, 'epoch')} (training.max_epochs)"
    )
    absent = [
        name for name in training.trackers if importlib.util.find_spec(TRACKERS[name][0]) is None
    ]
    found = {
        f"training.trackers: found no installed library for {', '.join(absent)}; pip install "
        "'speakernet[trackers]', or leave these trackers out": bool(absent),
        f"training.accumulation_steps is {training.accumulation_steps}, but with the metric loss "
        f"{loss.name}, each micro-batch would see only its own negatives; set "
        "training.gradient_cache: auto (two passes), or accumulation_steps: 1 with a larger "
        "data.batch_size": (needs_gradient_cache(config) and training.gradient_cache == "off"),
        f"augment.real_epochs is {augment.real_epochs}, {of_epochs}, so changed voices would never "
        "be used; lower real_epochs, or remove speed_factors": (
            augment.enabled and augment.real_epochs >= training.max_epochs
        ),
        f"training.average_checkpoints is {training.average_checkpoints}, but with "
        "model.options.trained: lora, averaged weights cannot be split into adapters again; set it "
        "to 0": (
            training.average_checkpoints > 0
            and getattr(config.model.options, "trained", "") == "lora"
        ),
        f"training.freeze_epochs is {training.freeze_epochs}, {of_epochs}, so the network would "
        "never learn; raise max_epochs or lower "
        "freeze_epochs": training.freeze_epochs >= training.max_epochs,
        f"data.utterances_per_speaker is {data.utterances_per_speaker}, but the loss {loss.name} "
        f"compares utterances of the same speaker and needs at least {loss.min_utterances}; set "
        f"--nPerSpeaker {loss.min_utterances}": (data.utterances_per_speaker < loss.min_utterances),
    }
    if runtime.parallel == "fsdp":
        instead = "does not work with runtime.parallel: fsdp; set it to"
        found |= {
            f"training.ema_decay: {training.ema_decay} {instead} 0": bool(training.ema_decay),
            f"training.initial_weight: {training.initial_weight} {instead} 0": bool(
                training.initial_weight
            ),
            f"training.average_checkpoints: {training.average_checkpoints} {instead} 0": bool(
                training.average_checkpoints
            ),
            f"optimizer.fused: on {instead} auto": config.optimizer.fused == "on",
            f"runtime.channels_last: on {instead} auto": runtime.channels_last == "on",
            f"loss.sharded: on {instead} auto (fsdp shards the head too)": loss.sharded == "on",
        }
    for problem, holds in found.items():
        if holds:
            raise ConfigError(problem)
    for option in ("freeze_epochs", "freeze_norm_statistics", "initial_weight"):
        if (value := getattr(training, option)) and not training.initial_model:
            raise ConfigError(
                f"training.{option}: {value} needs an initial model; give one with --initial_model "
                "FILE"
            )
    # The loss is built for two speakers, because the real number is not known before the list is
    # read.
    if training.freeze_epochs and not any(
        one.ndim > 1 for one in build_loss(config, 2).parameters()
    ):
        raise ConfigError(
            f"training.freeze_epochs is {training.freeze_epochs}, but the loss {loss.name} has no "
            "head to train while the network is frozen; set it to 0, or use a loss with a head, "
            "such as aamsoftmax"
        )
    if runtime.compile == "on" and (obstacles := compile_obstacles(config, net, device)):
        raise ValueError(
            f"runtime.compile is on, but {'; '.join(obstacles)}. Alternatively, set compile: off"
        )


def compile_obstacles(config: Config, net: nn.Module, device: torch.device) -> list[str]:
    """The reasons why this network cannot be compiled here, each with its remedy if there is
    one.
    """
    runtime = config.runtime
    reasons = {
        "speakernet does not support torch.compile on Windows": platform.system() == "Windows",
        "compiling for the CPU needs a C++ compiler (g++ or clang++), and none is in the PATH; "
        "install one": (
            device.type == "cpu"
            and not any(shutil.which(name) for name in ("g++", "clang++", "c++"))
        ),
        # `on` is reproducible, because it compiles before the first step.
        "runtime.deterministic is on, and the decision when to compile depends on timing": (
            runtime.deterministic and runtime.compile == "auto"
        ),
        f"the gradient cache (metric loss {config.loss.name} under accumulation) runs each "
        "micro-batch twice, first without gradients; set training.accumulation_steps: "
        "1": needs_gradient_cache(config),
        "runtime.parallel: fsdp gathers weights between blocks": runtime.parallel == "fsdp",
        "crops have many lengths, each of which would be compiled separately; set "
        "data.crop_frames_max: 0": (config.data.crop_frames_max > config.data.crop_frames),
        # Compiled code always uses channels_last, in which the weight gradient of a strided 1 x 1
        # convolution with 8 or 12 input channels crashes the process ("free(): invalid next size").
        "strided convolutions with fewer than 16 channels crash in oneDNN when compiled for a CPU; "
        "use 16 channels or more": device.type == "cpu" and not is_safe_in_channels_last(net),
    }
    return [reason for reason, holds in reasons.items() if holds]


def needs_gradient_cache(config: Config) -> bool:
    """Whether accumulation has to go through the two-pass gradient cache."""
    return config.loss.is_metric and config.training.accumulation_steps > 1


def _warn_of_no_effect(config: Config, device: torch.device, num_batches: int) -> None:
    """Warn of options that have no effect, or not the expected one, in a run with `num_batches` per
    epoch.
    """
    training = config.training
    schedule = config.schedule
    runtime = config.runtime
    epochs = config.training.max_epochs
    moves_margin = schedule.margin != "constant"
    has_margin = hasattr(config.loss, "margin")
    of_epochs = f"but the run has only {counted(epochs, 'epoch')} (training.max_epochs)"
    warnings = {
        "training.gradient_cache: on has no effect: it needs a metric loss and accumulation_steps "
        "above 1": (training.gradient_cache == "on" and not needs_gradient_cache(config)),
        f"training.accumulation_steps is {training.accumulation_steps}, but an epoch has only "
        f"{counted(num_batches, 'batch')}, and a step cannot span "
        "epochs": training.accumulation_steps > num_batches,
        f"training.average_checkpoints is {training.average_checkpoints}, {of_epochs}": (
            training.average_checkpoints > epochs
        ),
        f"schedule.warmup_epochs is {schedule.warmup_epochs:g}, {of_epochs}, so the learning rate "
        "never reaches its peak": schedule.warmup_epochs >= epochs,
        f"schedule.warmup_epochs is {schedule.warmup_epochs:g}, but one_cycle has its own warm-up, "
        "so the learning rate rises twice; set schedule.warmup_epochs: 0": (
            0 < schedule.warmup_epochs < epochs and schedule.name == "one_cycle"
        ),
        f"schedule.margin: {schedule.margin} has no effect: the loss has no margin": moves_margin
        and not has_margin,
        f"schedule.margin_end_epoch is {schedule.margin_end_epoch:g}, {of_epochs}, so the margin "
        "never reaches its full size": moves_margin
        and has_margin
        and schedule.margin_end_epoch > epochs,
        f"runtime.gpu_id: {runtime.gpu_id} has no effect: this run is on the CPU": (
            runtime.gpu_id is not None and device.type == "cpu"
        ),
        "runtime.parallel: fsdp has no effect: there is only one process": (
            runtime.parallel == "fsdp" and not distributed.is_distributed()
        ),
        "loss.sharded: on has no effect: a single process keeps every speaker": (
            config.loss.sharded == "on" and not distributed.is_distributed()
        ),
        f"runtime.compile_scope: {runtime.compile_scope} has no effect: nothing is compiled": (
            runtime.compile == "off" and runtime.compile_scope != "auto"
        ),
        f"runtime.compile_mode: {runtime.compile_mode} has no effect without compiling, or on a "
        "CPU": (
            runtime.compile_mode != "default" and (runtime.compile == "off" or device.type == "cpu")
        ),
    }
    for warning, holds in warnings.items():
        if holds:
            logger.warning("%s", warning)


def build_precision(config: Config, device: torch.device) -> Precision:
    """The configured precision, or the best available one."""
    runtime = config.runtime
    choice = choose_precision(runtime.precision, device)
    name = choice.value
    reason = choice.reason
    if runtime.deterministic and runtime.precision == "auto" and name == "fp16":
        name = "no"
        reason = "runtime.deterministic is on, and fp16's loss scale depends on earlier steps"
    logger.info("precision: %s (%s)", "float32" if name == "no" else name, reason)
    return Precision(runtime, name, device)


def build_schedules(
    config: Config, loss: nn.Module, steps_per_epoch: int
) -> tuple[schedules.LearningRateSchedule, schedules.MarginSchedule | None]:
    """The schedules of the learning rate and, if the loss has one, of the margin."""
    learning_rate = schedules.LearningRateSchedule(
        config.schedule,
        config.optimizer.learning_rate,
        steps_per_epoch=steps_per_epoch,
        num_epochs=config.training.max_epochs,
        factor=batch_factor(config).value if config.training.reference_batch else 1.0,
    )
    # The full margin is read before the first step, because the schedule changes it from then on.
    margin = getattr(loss, "margin", None)
    if not isinstance(margin, int | float):
        return learning_rate, None
    return learning_rate, schedules.MarginSchedule(
        config.schedule, float(margin), steps_per_epoch=steps_per_epoch
    )


def _build_compiler(config: Config, net: nn.Module, device: torch.device) -> compiling.Compiler:
    """The compiler according to `runtime.compile`; `refuse_impossible` has already refused what
    cannot work.
    """
    runtime = config.runtime
    # Rank 0 decides: on another machine without a C++ compiler, torch runs the same code eagerly.
    obstacles = distributed.broadcast_object(compile_obstacles(config, net, device))
    if obstacles and runtime.compile == "auto":
        logger.info("compile auto: off (%s)", "; ".join(obstacles))
    if obstacles or runtime.compile == "off":
        return compiling.Compiler(net, None)
    # Without repeated blocks, that is the whole network.
    scope = "regional" if runtime.compile_scope == "auto" else runtime.compile_scope
    if runtime.gradient_checkpointing and scope == "whole":
        scope = "regional"
        logger.info(
            "compile: block by block, because gradient checkpointing keeps block inputs outside "
            "the graph"
        )
    mode = "default" if device.type == "cpu" else runtime.compile_mode
    options = runtime.model_copy(update={"compile_scope": scope, "compile_mode": mode})
    return compiling.Compiler(net, options, prepare=keep_draws_eager)


def apply_memory_options(
    config: Config, net: nn.Module, device: torch.device, precision: Precision
) -> None:
    """Apply gradient checkpointing and memory layout to the network."""
    runtime = config.runtime
    if runtime.gradient_checkpointing:
        count = compiling.enable_gradient_checkpointing(net)
        logger.info("gradient checkpointing: %d blocks are recomputed in the backward pass", count)
    switch = runtime.channels_last
    # Weights under `fully_shard` keep the layout in which they were sharded.
    if switch == "auto" and runtime.parallel == "ddp" and device.type == "cuda":
        # On a GPU, channels_last may be slower in float32. On a CPU it never was, so SpeakerNet is
        # built in that layout (ResNet takes 0.25 instead of 0.32 s per step).
        switch = "off" if precision.name == "no" else "on"
    if switch == "on" and not any(isinstance(module, nn.Conv2d) for module in net.modules()):
        logger.warning(
            "runtime.channels_last: on has no effect: %s has no 2-D convolutions", config.model.name
        )
    elif switch == "on" and device.type == "cpu" and not is_safe_in_channels_last(net):
        logger.warning(
            "runtime.channels_last: on has no effect: this network has so few channels that oneDNN "
            "crashes"
        )
    elif switch != "auto":
        layout = torch.channels_last if switch == "on" else torch.contiguous_format
        net.to(memory_format=layout)  # type: ignore[call-overload]


def build_trainer(
    config: Config,
    net: SpeakerNet,
    loss: nn.Module,
    loader: "trainer.Loader",
    validate: Validate,
    run_folder: str | Path,
    device: torch.device,
    *,
    stage: progress.Stage = progress.WHOLE_RUN,
    advise: Callable[[float], str] = lambda data_wait_share: "",
    stop: progress.StopRequest | None = None,
) -> trainer.Trainer:
    """Build a trainer; call `refuse_impossible` first.

    `net` and `loss` are moved to the device and changed in place. The other arguments are those of
    `Trainer`.
    """
    training = config.training
    runtime = config.runtime
    folder = Path(run_folder)
    _warn_of_no_effect(config, device, len(loader))
    precision = build_precision(config, device)
    if training.reference_batch:
        logger.info("learning rates are multiplied by: %s", batch_factor(config))
    net_state = net.trunk.tune(config.model.options, net)
    # Moved before optimizer and average are built, because they allocate tensors on the device of
    # the weights.
    net.to(device)
    loss.to(device)
    ranks = None
    if distributed.is_distributed():
        # Late: a single process does not need it.
        from speakernet.assembly.ranks import join_ranks

        ranks = join_ranks(config, net, loss, device)
    apply_memory_options(config, net, device, precision)
    profiler = None
    if runtime.profiling and distributed.is_main():
        # Late: few runs are profiled.
        from speakernet.training.profiler import StepProfiler

        profiler = StepProfiler(runtime, folder / PROFILE, device)
    step = TrainingStep(
        net,
        loss,
        optimizers.create_optimizer(
            config.optimizer, [net, loss], device, is_float32=precision.name == "no"
        ),
        precision,
        training,
        utterances_per_speaker=int(getattr(loader, "utterances_per_speaker", 1)),
        gradient_cache=needs_gradient_cache(config),
        ranks=ranks,
        compiler=_build_compiler(config, net, device),
        profiler=profiler,
    )
    if runtime.cuda_graph == "on":
        record_steps(step, runtime, training.accumulation_steps)
    # Deterministic runs keep their number of threads, because it changes the bits of results.
    adapts = runtime.threads == "auto" and not runtime.deterministic
    values = config.model_dump()
    learning_rate, margin = build_schedules(
        config, loss, -(-len(loader) // training.accumulation_steps)
    )
    return trainer.Trainer(
        step,
        loader,
        validate,
        learning_rate,
        margin,
        training,
        store=checkpoints.CheckpointStore(folder, training),
        progress=progress.Progress(
            folder if distributed.is_main() else None,
            trackers=training.trackers,
            configuration=values,
            steps_before=stage.steps_before or 0,
        ),
        threads=threads.ThreadWatch(
            torch.get_num_threads() if device.type == "cpu" else 1, adapts=adapts
        ),
        model_contents=functools.partial(
            model_file_contents, net, loss_normalizes=config.loss.normalize_embeddings
        ),
        origin=_origin_of_run(values, loader, stage),
        net_state=net_state,
        stage=stage,
        stop=stop,
        advise=advise,
    )


def _origin_of_run(
    values: Mapping[str, Any], loader: "trainer.Loader", stage: progress.Stage
) -> dict[str, Any]:
    """What a resumed run is compared with, so that changes since its start are logged."""
    components = {name: digest for name, (_, digest) in OUTSIDE.items()}
    origin: dict[str, Any] = {
        "config": {**values, "components": components},
        "versions": {"torch": str(torch.__version__)},
        # Relative paths start here.
        "working_folder": str(Path.cwd()),
        **getattr(loader, "identity", {}),
    }
    if stage.steps_before is not None:
        origin["first_stage_steps"] = stage.steps_before
    return origin


def batch_factor(config: Config) -> Choice[float]:
    """The factor for all learning rates if the batch is not the one that they were chosen for, and
    why.
    """
    training = config.training
    batch = (
        config.data.batch_size * config.data.utterances_per_speaker * training.accumulation_steps
    )
    ratio = batch / (training.reference_batch or batch)
    factor = {"off": 1.0, "linear": ratio, "sqrt": ratio**0.5}[training.batch_scaling]
    return Choice(
        factor,
        f"{batch} utterances per step instead of {training.reference_batch}; "
        f"training.batch_scaling: {training.batch_scaling}",
    )
