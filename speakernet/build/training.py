"""From the sections optimizer, schedule, training and runtime to a trainer; refusals come before the first step."""

import dataclasses
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speakernet import distributed
from speakernet.config.schema import Config, config_to_dict
from speakernet.files import atomic_write
from speakernet.models.layers import is_safe_in_channels_last
from speakernet.models.model_file import model_file_contents
from speakernet.models.speaker_net import SpeakerNet
from speakernet.performance.profiler import make_profiler
from speakernet.performance.system import AppliedSetting, optimize_torch_settings
from speakernet.performance.tracker import PerformanceTracker
from speakernet.training.averaging import WeightAverage
from speakernet.training.checkpoint import CheckpointStore, load_checkpoint, move_aside
from speakernet.training.compiling import Compiler, CompileSettings, NoCompiler, check_platform
from speakernet.training.interfaces import Loader
from speakernet.training.memory import enable_gradient_checkpointing
from speakernet.training.optimizers import create_optimizer, should_fuse
from speakernet.training.precision import Precision, choose_precision
from speakernet.training.progress import Progress
from speakernet.training.schedules import LearningRateSchedule, MarginSchedule, ScheduleOptions
from speakernet.training.state import TrainerOptions
from speakernet.training.step import TrainingStep
from speakernet.training.trainer import Trainer

logger = logging.getLogger(__name__)

EPSILON_FLOAT32 = 1e-8
# Gradients that passed through 16 bits carry noise of about 1e-3 of their size; a second moment near zero must not
# turn that noise into whole steps.
EPSILON_HALF = 1e-7

Validate = Callable[[], Mapping[str, Any]]


def choose_device(config: Config) -> torch.device:
    """The device that the configuration asks for, logged with its reason.

    Raises:
        ValueError: a GPU was asked for and there is none, or none of that number.
    """
    runtime = config.runtime
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if runtime.device == "cpu" or (runtime.device == "auto" and count == 0):
        why = "asked for" if runtime.device == "cpu" else "no GPU that torch can use"
        logger.info("device: cpu (%s)", why)
        return torch.device("cpu")
    if count == 0:
        raise ValueError(
            "runtime.device: cuda, but torch finds no GPU here; use --runtime.device auto or cpu, "
            "or install the driver that this torch needs"
        )
    number = distributed.local_rank() if runtime.gpu_id is None else runtime.gpu_id
    if number >= count:
        raise ValueError(f"runtime.gpu_id: {number}, but there are {count} GPUs, numbered from 0")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    logger.info("device: %s (%s)", device, torch.cuda.get_device_name(device))
    return device


def prepare_machine(config: Config) -> list[AppliedSetting]:
    """Apply the machine switches of `runtime` to torch, and log each with its reason."""
    runtime = config.runtime
    applied = optimize_torch_settings(
        deterministic=runtime.deterministic,
        cudnn_benchmark=runtime.cudnn_benchmark,
        tf32=runtime.tf32,
        threads=runtime.threads,
        interop_threads=runtime.interop_threads,
        attention=runtime.attention,
        memory_fraction=runtime.memory_fraction,
        keep_memory=runtime.keep_memory,
        save_memory=runtime.gradient_checkpointing,
    )
    for setting in applied:
        logger.info("torch setting: %s", setting)
    return applied


def build_precision(config: Config, device: torch.device) -> Precision:
    """The precision that the configuration asks for, or the best one there is.

    Raises:
        ValueError: the device cannot train in it.
    """
    runtime = config.runtime
    choice = choose_precision(runtime.precision, device)
    if runtime.deterministic and runtime.precision == "auto" and choice.name == "fp16":
        choice = dataclasses.replace(choice, name="no", reason="deterministic: fp16's scale depends on history")
    return Precision(
        choice.name,
        device,
        initial_scale=runtime.loss_scale,
        growth_interval=runtime.loss_scale_growth_interval,
        reason=choice.reason,
    )


def build_optimizer(config: Config, modules: list[nn.Module], precision: Precision) -> torch.optim.Optimizer:
    """The optimizer over the network and the head.

    Raises:
        ValueError: an option that this optimizer does not have.
    """
    section = config.optimizer
    fused, reason = should_fuse(section.name, precision.device, section.fused)
    logger.info("optimizer %s, fused: %s (%s)", section.name, fused, reason)
    epsilon = section.epsilon
    if epsilon == "auto":
        epsilon = EPSILON_FLOAT32 if precision.name == "no" else EPSILON_HALF
    options: dict[str, Any] = {"learning_rate": section.learning_rate}
    if section.name == "sgd":
        options |= {"momentum": section.momentum, "nesterov": section.nesterov}
    else:
        options |= {"betas": (section.beta1, section.beta2), "epsilon": epsilon}
    if fused:
        options["fused"] = True
    return create_optimizer(
        section.name,
        modules,
        options,
        weight_decay=section.weight_decay,
        decay_norms_and_biases=section.decay_norms_and_biases,
    )


def build_schedules(
    config: Config, loss: nn.Module, steps_per_epoch: int
) -> tuple[LearningRateSchedule, MarginSchedule | None]:
    """The learning rate and, where the loss has a margin, the margin of each step.

    Raises:
        ValueError: a large-margin stage is to follow, and the loss has no margin.
    """
    section, optimizer = config.schedule, config.optimizer
    options = ScheduleOptions(
        top=optimizer.learning_rate,
        floor=min(section.final_learning_rate, optimizer.learning_rate),
        decay=section.decay,
        decay_interval=section.decay_interval,
        power=section.power,
        restart_epochs=section.restart_epochs,
        restart_factor=section.restart_factor,
        peak_share=section.peak_share,
        plateau_patience=section.plateau_patience,
    )
    learning_rate = LearningRateSchedule(
        section.name,
        options,
        steps_per_epoch=steps_per_epoch,
        num_epochs=config.training.max_epochs,
        warmup_epochs=section.warmup_epochs,
    )
    if section.warmup_epochs >= config.training.max_epochs:
        logger.warning(
            "schedule.warmup_epochs: %g of training.max_epochs: %d: the learning rate never gets to its top",
            section.warmup_epochs,
            config.training.max_epochs,
        )
    margin = getattr(loss, "margin", None)
    if not isinstance(margin, int | float):
        if config.training.large_margin_epochs:
            raise ValueError(
                f"training.large_margin_epochs: {config.training.large_margin_epochs}, but the loss {config.loss.name} "
                "has no margin to enlarge; set it to 0, or take amsoftmax or aamsoftmax"
            )
        if section.margin != "constant":
            logger.warning("schedule.margin: %s has no effect: this loss has no margin", section.margin)
        return learning_rate, None
    return learning_rate, MarginSchedule(
        float(margin),
        kind=section.margin,
        initial=section.margin_initial,
        begin_epoch=section.margin_begin_epoch,
        end_epoch=section.margin_end_epoch,
        steps_per_epoch=steps_per_epoch,
    )


def uses_gradient_cache(config: Config, loss: nn.Module) -> bool:
    """Whether accumulation goes through the two-pass gradient cache.

    Raises:
        ValueError: a metric loss under accumulation with the cache switched off, or the cache where it cannot help.
    """
    training = config.training
    needed = bool(loss.is_metric) and training.accumulation_steps > 1
    if needed and training.gradient_cache == "off":
        raise ValueError(
            f"training.accumulation_steps: {training.accumulation_steps} with the metric loss {config.loss.name}: each "
            "micro-batch would only see its own negatives. Set training.gradient_cache: auto (two passes), "
            "or accumulation_steps: 1 with a larger data.batch_size"
        )
    if training.gradient_cache == "on" and not needed:
        logger.warning(
            "training.gradient_cache: on has no effect: it needs a metric loss and accumulation_steps above 1"
        )
    return needed


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


def build_compiler(config: Config, net: nn.Module, step: TrainingStep) -> Compiler | NoCompiler:
    """The compiler that `runtime.compile` asks for.

    Raises:
        ValueError: switched on where it cannot work.
    """
    runtime = config.runtime
    if runtime.winograd and (runtime.compile == "off" or step.precision.device.type != "cpu"):
        logger.warning("runtime.winograd: true has no effect: only networks compiled for a CPU use it")
    if runtime.compile == "off":
        return NoCompiler()
    is_narrow = step.precision.device.type == "cpu" and not is_safe_in_channels_last(net)
    obstacles = {
        "the gradient cache runs the network in two modes": bool(step.gradient_cache),
        "crops have many lengths, and every length would be compiled anew": (
            config.data.crop_frames_max > config.data.crop_frames
        ),
        "torch's compiler does not take gradient checkpointing that keeps batch-norm statistics": (
            runtime.gradient_checkpointing
        ),
        # Compiled code is in channels_last whatever the network is in.
        "strided convolutions of fewer than 16 channels, compiled for a CPU, crash in oneDNN": is_narrow,
    }
    reason = "; ".join(text for text, holds in obstacles.items() if holds)
    if reason and runtime.compile == "on":
        raise ValueError(f"runtime.compile: on, but {reason}; set one of them otherwise")
    reason = reason or check_platform(runtime.compile)
    if runtime.deterministic and runtime.compile == "auto":
        reason = "deterministic: the moment of compiling depends on measured times"
    if reason:
        logger.info("compile auto: off (%s)", reason)
        return NoCompiler()
    scope = runtime.compile_scope
    if scope == "auto":
        scope = "regional" if distributed.is_distributed() else "whole"
    if runtime.compile_mode != "default" and step.precision.device.type == "cpu":
        logger.warning("runtime.compile_mode: %s has no effect on a CPU", runtime.compile_mode)
    settings = CompileSettings(runtime.compile, scope, runtime.compile_mode, runtime.winograd)
    return Compiler(net, settings, recover=step.forget)


def trainer_options(config: Config) -> TrainerOptions:
    """The section's numbers that the trainer itself needs."""
    training = config.training
    names = {field.name for field in dataclasses.fields(TrainerOptions)}
    values = dataclasses.asdict(training)
    return TrainerOptions(**{name: value for name, value in values.items() if name in names})


def build_trainer(
    config: Config,
    net: SpeakerNet,
    loss: nn.Module,
    loader: Loader,
    validate: Validate,
    run_folder: str | Path,
    advise: Callable[[float], str] | None = None,
) -> Trainer:
    """A trainer ready to run; `net` and `loss` are moved to the device and changed in place.

    `advise` says what to change when so large a share of the time went into waiting for data.

    Raises:
        ValueError: a combination that cannot work, said before anything slow starts.
    """
    training, runtime = config.training, config.runtime
    device = choose_device(config)
    precision = build_precision(config, device)
    has_gradient_cache = uses_gradient_cache(config, loss)
    net.to(device)
    loss.to(device)
    apply_memory_options(config, net, device, precision)
    optimizer = build_optimizer(config, [net, loss], precision)
    steps_per_epoch = -(-len(loader) // training.accumulation_steps)
    learning_rate, margin = build_schedules(config, loss, steps_per_epoch)
    folder = Path(run_folder)
    profiles = runtime.profiling and distributed.is_main()
    step = TrainingStep(
        net,
        loss,
        optimizer,
        precision,
        max_grad_norm=training.max_grad_norm,
        utterances_per_speaker=int(getattr(loader, "utterances_per_speaker", 1)),
        gradient_cache=has_gradient_cache,
        profiler=make_profiler(profiles, folder / "profile", runtime.profile_steps, device),
    )
    keep = max(training.keep_checkpoints, training.average_checkpoints)

    def model_contents(summary: dict[str, Any]) -> dict[str, Any]:
        return model_file_contents(net, loss_normalizes=bool(loss.normalize_embeddings), training_summary=summary)

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
        options=trainer_options(config),
        step=step,
        average=WeightAverage(net, training.ema_decay),
        progress=Progress(folder if distributed.is_main() else None),
        compiler=build_compiler(config, net, step),
        advise=advise,
        extra_contents=_origin(config, loader),
    )


def _origin(config: Config, loader: Loader) -> dict[str, Any]:
    """What a checkpoint says of where it comes from, and a resumed run is compared with."""
    versions = {"torch": str(torch.__version__)}
    return {"config": config_to_dict(config), "versions": versions, **getattr(loader, "identity", {})}


def large_margin_config(config: Config) -> Config:
    """The configuration of the second stage: longer crops, larger margin, small learning rate, no speed perturbation.

    Source: Thienpondt et al. 2021, "The IDLab VoxCeleb speaker recognition challenge 2020 system description".
    """
    training = config.training
    stage = {
        "data": dataclasses.replace(config.data, crop_frames=training.large_margin_crop_frames, crop_frames_max=0),
        "augment": dataclasses.replace(config.augment, speed_factors=[1.0]),
        "loss": dataclasses.replace(config.loss, margin=training.large_margin),
        "optimizer": dataclasses.replace(config.optimizer, learning_rate=training.large_margin_learning_rate),
        "schedule": dataclasses.replace(config.schedule, warmup_epochs=0.0, margin="constant"),
        "training": dataclasses.replace(
            training,
            max_epochs=training.large_margin_epochs,
            test_interval=min(training.test_interval, training.large_margin_epochs),
            large_margin_epochs=0,
            average_checkpoints=0,
            patience=0,
        ),
    }
    return dataclasses.replace(config, **stage)  # type: ignore[arg-type]


def train_large_margin_stage(
    config: Config,
    net: SpeakerNet,
    loss: nn.Module,
    build_loader: Callable[[Config, torch.device], Loader],
    validate: Validate,
    run_folder: str | Path,
    first_stage_steps: int,
) -> dict[str, Any]:
    """The second stage, in `<run folder>/large_margin`; its best model replaces best.pt where its EER is lower.

    Call it after the first stage with the same network and head. Like the first it resumes by being called again;
    where the first stage has gone on since (`first_stage_steps`), it begins anew.
    """
    stage = large_margin_config(config)
    loss.margin = config.training.large_margin  # type: ignore[assignment]
    folder = Path(run_folder)
    if distributed.is_main():
        _set_aside_older_stage(folder / "large_margin", first_stage_steps)
    distributed.barrier()
    loader = build_loader(stage, choose_device(stage))
    try:
        trainer = build_trainer(stage, net, loss, loader, validate, folder / "large_margin")
        trainer.extra_contents["first_stage_steps"] = first_stage_steps
        summary = trainer.train()
    finally:
        getattr(loader, "close", lambda: None)()
    if distributed.is_main():
        adopt_better(folder / "best.pt", folder / "large_margin" / "best.pt")
    return summary


def _set_aside_older_stage(folder: Path, first_stage_steps: int) -> None:
    last = CheckpointStore(folder).load_last()
    before = last["training"].get("first_stage_steps", first_stage_steps) if last else first_stage_steps
    if before != first_stage_steps:
        logger.warning(
            "the large-margin stage followed step %d of the first stage, which is at step %d now: it begins anew, "
            "the old one is moved to %s",
            before,
            first_stage_steps,
            move_aside(folder).name,
        )


def adopt_better(best: Path, candidate: Path) -> bool:
    """Replace the model file `best` by `candidate` where the latter's held-out EER is lower; says which was kept."""
    before, after = (load_checkpoint(path)["training_summary"]["best_eer_percent"] for path in (best, candidate))
    logger.info(
        "large-margin stage: EER %.2f %%, before %.2f %%: %s", after, before, "kept" if after < before else "not kept"
    )
    if after < before:
        with candidate.open("rb") as source, atomic_write(best, "wb") as target:
            shutil.copyfileobj(source, target)
    return bool(after < before)
