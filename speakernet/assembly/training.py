"""Build network, loss and trainer from the sections model, loss, optimizer, schedule, training and
runtime.

`refuse_impossible` refuses combinations that cannot work; it needs no data and runs before any data
is read.
"""

import functools
import importlib.util
import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from speakernet import distributed
from speakernet.config import ConfigError
from speakernet.config.problems import options_without_effect, training_problems
from speakernet.config.schema import Config, stages_of
from speakernet.data.augment.codecs import refuse_lacking
from speakernet.data.lookup import default_cache_folder
from speakernet.frontend.perturbation import keep_draws_eager
from speakernet.losses.classification import SpeakerLoss
from speakernet.losses.options import LOSSES
from speakernet.machine.device import choose_device, find_device
from speakernet.machine.settings import optimize_torch_settings
from speakernet.models.layers import is_safe_in_channels_last
from speakernet.models.model_file import model_file_contents
from speakernet.models.speaker_net import SpeakerNet
from speakernet.options import PLUGIN_MODULES, create, lookup
from speakernet.random import derive_seed
from speakernet.run_folder import BEST, PROFILE
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
from speakernet.training.profiler import StepProfiler
from speakernet.training.protocols import Loader
from speakernet.training.state import WHOLE_RUN, Stage
from speakernet.training.step import StepTools, TrainingStep
from speakernet.training.stopping import StopRequest
from speakernet.training.trackers import TRACKERS

logger = logging.getLogger(__name__)

Validate = Callable[[int], Mapping[str, Any]]
"""Given the number of finished epochs, evaluates the current network and returns the figures."""

MINING_STREAM = 103
"""Together with the run's seed, the key of the random stream for mining triplets."""


def prepare_machine(config: Config) -> torch.device:
    """Apply the machine switches of `runtime` to torch, choose where compiled code is kept, and
    return the chosen device.
    """
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
    return choose_device(config.runtime)


def build_model(config: Config) -> SpeakerNet:
    """Build the configured network with fresh weights."""
    model = config.model
    best = config.run_folder / BEST
    if best.is_file():
        # A pretrained backbone whose folder is gone can be read from the run's own model.
        model = model.model_copy(update={"options": model.options.with_spare(str(best))})
    return SpeakerNet(model, config.frontend, config.data.sample_rate, config.runtime.seed)


def build_loss(config: Config, num_classes: int) -> SpeakerLoss:
    """Build the configured loss, with a fresh head for `num_classes` speakers if it has one."""
    loss: SpeakerLoss = create(
        lookup(LOSSES, config.loss.name, "loss"),
        config.loss,
        embedding_dim=config.model.embedding_dim,
        num_classes=num_classes,
        seed=derive_seed(config.runtime.seed, MINING_STREAM),
    )
    return loss


def refuse_impossible(config: Config, net: SpeakerNet, device: torch.device) -> None:
    """Refuse options that contradict each other in training, or that this machine lacks."""
    # Nothing here reads data, so that an impossible run ends within seconds.
    if problems := [f"{key}: {message}" for key, message in training_problems(config)]:
        raise ConfigError("\n".join(problems))
    for tracker in config.training.trackers:
        if importlib.util.find_spec(TRACKERS[tracker][0]) is None:
            raise ConfigError(
                f"training.trackers: {tracker} is not installed; pip install "
                "'speakernet[trackers]', or leave it out"
            )
    # These are called only for the errors they raise.
    if config.augment.enabled:
        refuse_lacking(config.augment.real_codecs)
    choose_precision(config.runtime.precision, device)
    optimizers.should_fuse(config.optimizer, device)
    if config.runtime.gradient_checkpointing:
        compiling.blocks_to_checkpoint(net)
    net.trunk.refuse_impossible(config.model.options)
    if config.runtime.compile == "on":
        # Only `on` is an error here: `auto` trains uncompiled and logs the obstacles.
        obstacles = "; ".join(_compile_obstacles(config, net, device))
        if obstacles:
            raise ConfigError(
                f"runtime.compile is on, but {obstacles}. Alternatively, set compile: off"
            )


def _compile_obstacles(config: Config, net: nn.Module, device: torch.device) -> list[str]:
    obstacles = compiling.obstacles(
        config.runtime,
        device,
        caches_gradients=config.loss.is_metric and config.training.accumulation_steps > 1,
        varies_lengths=config.data.crop_frames_max > config.data.crop_frames,
        is_safe_in_channels_last=is_safe_in_channels_last(net),
    )
    return list(obstacles)


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


def build_schedules(config: Config, loss: SpeakerLoss, steps_per_epoch: int) -> schedules.Schedules:
    """The schedules of the learning rate and, if the loss has one, of the margin."""
    learning_rate = schedules.LearningRateSchedule(
        config.schedule,
        config.optimizer.learning_rate,
        steps_per_epoch=steps_per_epoch,
        num_epochs=config.training.max_epochs,
        factor=schedules.batch_factor(config.training, config.data.utterances_per_batch).value,
    )
    if loss.margin is None:
        return schedules.Schedules(learning_rate)
    # The full margin is read before the first step, because the schedule changes it from then on.
    margin = schedules.MarginSchedule(config.schedule, loss.margin, steps_per_epoch=steps_per_epoch)
    return schedules.Schedules(learning_rate, margin)


def schedules_of_stages(config: Config) -> dict[str, schedules.Schedules]:
    """The schedules of each stage, to be shown before any list is read."""
    # Those of a real run, because a second formula could differ from them. Two speakers, because no
    # list is read.
    return {
        name: build_schedules(stage, build_loss(stage, 2), schedules.SHOWN_STEPS)
        for name, stage in stages_of(config).items()
    }


def _build_compiler(config: Config, net: nn.Module, device: torch.device) -> compiling.Compiler:
    """The compiler according to `runtime.compile`; `refuse_impossible` has already refused what
    cannot work.
    """
    runtime = config.runtime
    # Rank 0 decides: on another machine without a C++ compiler, torch runs the same code eagerly.
    obstacles = distributed.broadcast_object(_compile_obstacles(config, net, device))
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
    if switch == "auto":
        return
    if switch == "on":
        problem = ""
        if not any(isinstance(module, nn.Conv2d) for module in net.modules()):
            problem = f"{config.model.name} has no 2-D convolutions"
        elif device.type == "cpu" and not is_safe_in_channels_last(net):
            problem = "this network has so few channels that oneDNN crashes"
        if problem:
            logger.warning("runtime.channels_last: on has no effect: %s", problem)
            return
    layout = torch.channels_last if switch == "on" else torch.contiguous_format
    net.to(memory_format=layout)  # type: ignore[call-overload]


class Parts(NamedTuple):
    """What learns, what it learns from, and where."""

    net: SpeakerNet
    loss: SpeakerLoss
    loader: Loader
    device: torch.device


def build_trainer(
    config: Config,
    parts: Parts,
    validate: Validate,
    run_folder: str | Path,
    *,
    stage: Stage = WHOLE_RUN,
    stop: StopRequest | None = None,
) -> trainer.Trainer:
    """Build a trainer; call `refuse_impossible` first.

    Network and loss are moved to the device and changed in place. The other arguments are those of
    `Trainer`.
    """
    net, loss, loader, device = parts
    training = config.training
    runtime = config.runtime
    folder = Path(run_folder)
    for option, message in options_without_effect(
        config,
        len(loader),
        is_on_cpu=device.type == "cpu",
        is_distributed=distributed.is_distributed(),
    ):
        logger.warning("%s: %s", option, message)
    precision = build_precision(config, device)
    if training.reference_batch:
        factor = schedules.batch_factor(training, config.data.utterances_per_batch)
        logger.info("learning rates are multiplied by: %s", factor)
    # The order matters: adapters are added before anything counts the parameters; everything is on
    # its device before optimizer and average allocate tensors there; heads are sharded before the
    # optimizer sees them; the layout is set before the compiler reads it.
    net_state = net.trunk.tune(config.model.options, net)
    net.to(device)
    loss.to(device)
    exchange = None
    if distributed.is_distributed():
        # Late: most runs are a single process.
        from speakernet.assembly.ranks import join_ranks

        exchange = join_ranks(config, net, loss, device)
    apply_memory_options(config, net, device, precision)
    profiler = None
    if runtime.profiling and distributed.is_main():
        profiler = StepProfiler(runtime, folder / PROFILE, device)
    # Deterministic runs keep their number of threads, because it changes the bits of results.
    adapts = runtime.threads == "auto" and not runtime.deterministic
    num_threads = torch.get_num_threads() if device.type == "cpu" else 1
    step = TrainingStep(
        net,
        loss,
        optimizers.create_optimizer(
            config.optimizer, [net, loss], device, is_float32=precision.name == "no"
        ),
        precision,
        training,
        utterances_per_speaker=loader.utterances_per_speaker,
        tools=StepTools(
            exchange,
            _build_compiler(config, net, device),
            profiler,
            threads.ThreadWatch(num_threads, adapts=adapts),
        ),
    )
    if runtime.cuda_graph == "on":
        # Late: few runs are recorded.
        from speakernet.training.recording import record_steps

        record_steps(step, runtime, training.accumulation_steps)
    steps_per_epoch = math.ceil(len(loader) / training.accumulation_steps)
    values = config.model_dump()
    output = trainer.RunOutput(
        checkpoints.CheckpointStore(folder, training),
        progress.Progress(
            folder if distributed.is_main() else None,
            trackers=training.trackers,
            configuration=values,
            steps_before=stage.steps_before,
        ),
        functools.partial(
            model_file_contents, net, loss_normalizes=config.loss.normalize_embeddings
        ),
        _origin_of_run(values, loader, stage),
        net_state,
    )
    return trainer.Trainer(
        step,
        loader,
        validate,
        build_schedules(config, loss, steps_per_epoch),
        training,
        output,
        stage,
        stop,
    )


def _origin_of_run(values: Mapping[str, Any], loader: Loader, stage: Stage) -> dict[str, Any]:
    """What a resumed run is compared with, so that changes since its start are logged."""
    components = {name: digest for name, (_, digest) in PLUGIN_MODULES.items()}
    origin: dict[str, Any] = {
        "config": {**values, "components": components},
        "versions": {"torch": str(torch.__version__)},
        # Relative paths start here.
        "working_folder": str(Path.cwd()),
        **loader.identity,
    }
    if not stage.is_first:
        origin["first_stage_steps"] = stage.steps_before
    return origin
