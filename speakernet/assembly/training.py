"""From the sections optimizer, schedule, training and runtime to a trainer; refusals come before the first step."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speakernet.assembly.checks import needs_gradient_cache, say_what_has_no_effect
from speakernet.assembly.compiling import build_compiler, records_steps
from speakernet.assembly.sharding import share_head
from speakernet.config.schema import Config, config_to_dict
from speakernet.machine.device import find_device
from speakernet.machine.settings import NO_EFFECT, AppliedSetting, optimize_torch_settings
from speakernet.machine.threads import STOP_SIGNALS
from speakernet.models.layers import is_safe_in_channels_last
from speakernet.models.model_file import model_file_contents
from speakernet.models.speaker_net import SpeakerNet
from speakernet.parallel import distributed
from speakernet.parallel.sync_norm import synchronize_norms
from speakernet.run_folder import PROFILE
from speakernet.training.averaging import WeightAverage
from speakernet.training.freezing import Freezing
from speakernet.training.graphs import CudaRecorder, RecordedStep
from speakernet.training.interfaces import Loader
from speakernet.training.interrupts import StopRequest
from speakernet.training.memory import enable_gradient_checkpointing
from speakernet.training.optimizers import create_optimizer
from speakernet.training.parts import Course, Learner, Records
from speakernet.training.precision import Precision, choose_precision
from speakernet.training.profiler import NoProfiler, StepProfiler
from speakernet.training.progress import Progress
from speakernet.training.schedules import LearningRateSchedule, MarginSchedule
from speakernet.training.state import WHOLE_RUN, Stage
from speakernet.training.step import TrainingStep
from speakernet.training.store import CheckpointStore
from speakernet.training.threads import ThreadWatch
from speakernet.training.together import SeveralProcesses
from speakernet.training.tracker import PerformanceTracker
from speakernet.training.trainer import Trainer

logger = logging.getLogger(__name__)

Validate = Callable[[], Mapping[str, Any]]


def prepare_machine(config: Config) -> list[AppliedSetting]:
    """Apply the machine switches of `runtime` to torch, and log each with its reason (a detail where it acts).

    Raises:
        ValueError: a GPU was asked for and is not there, or a switch without sense.
    """
    runtime = config.runtime
    applied = optimize_torch_settings(
        runtime,
        find_device(runtime),
        save_memory=runtime.gradient_checkpointing,
        varies_lengths=config.data.crop_frames_max > config.data.crop_frames,
    )
    for setting in applied:
        # Applied as asked it is a detail; asked for in vain it is not.
        logger.log(logging.WARNING if setting.value == NO_EFFECT else logging.DEBUG, "torch setting: %s", setting)
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
    # The full margin is that of the loss as it was built: a schedule moves it from the first step on.
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
    on_start: Callable[[], None] = lambda: None,
    advise: Callable[[float], str] = lambda data_wait_share: "",
    stop: StopRequest | None = None,
    chosen_by: Mapping[str, Any] | None = None,
) -> Trainer:
    """A trainer ready to run; what cannot work together was refused before (`refuse_impossible`).

    Args:
        config: the options of all its parts.
        net: what is trained; with `loss` moved to the device, and changed in place.
        loss: what it is trained by.
        loader: the batches.
        validate: evaluates `net` as it is then.
        run_folder: where everything is written.
        device: where it is trained.
        stage: which stage of a larger run this is.
        on_start: called once the folder is this run's, and its checkpoint fits: a refused start changes nothing.
        advise: says what to change where so large a share of the time went into waiting for data.
        stop: by which it is asked to stop.
        chosen_by: the list that chooses the model, for its file; None where nothing is chosen.
    """
    say_what_has_no_effect(config, device, len(loader))
    precision = build_precision(config, device)
    # Before the optimizer and the average are made: they keep tensors beside the weights, on the same device.
    _place_modules(config, net, loss, device, precision)
    step = _build_step(config, net, loss, loader, precision, Path(run_folder))
    learner = Learner(
        step=step,
        freezing=Freezing(net, config.training),
        average=WeightAverage(net, config.training.ema_decay),
        compiler=build_compiler(config, net, device, recover=step.forget),
        threads=watch_threads(config, device),
    )
    learning_rate, margin = build_schedules(config, loss, -(-len(loader) // config.training.accumulation_steps))
    course = Course(loader=loader, validate=validate, learning_rate=learning_rate, margin=margin)

    def model_contents(summary: dict[str, Any]) -> dict[str, Any]:
        whole = summary if chosen_by is None else {**summary, "chosen_by": dict(chosen_by)}
        return model_file_contents(net, loss_normalizes=config.loss.normalize_embeddings, training_summary=whole)

    records = Records(
        store=CheckpointStore(run_folder, config.training),
        model_contents=model_contents,
        origin={**_origin(config, loader), **stage.origin()},
        progress=Progress(Path(run_folder) if distributed.is_main() else None, configuration=config_to_dict(config)),
        tracker=PerformanceTracker(precision.name, config.training.accumulation_steps, device),
        on_start=on_start,
        advise=advise,
    )
    return Trainer(learner, course, records, config.training, stage, stop)


def _place_modules(config: Config, net: nn.Module, loss: nn.Module, device: torch.device, precision: Precision) -> None:
    """Network and loss as they will be trained: on the device, in its layout, shared where several processes are."""
    net.to(device)
    loss.to(device)
    _synchronize_norms(config, net, device)
    apply_memory_options(config, net, device, precision)
    share_head(config.loss, loss)


def _synchronize_norms(config: Config, net: nn.Module, device: torch.device) -> None:
    """Batch norm over the batch of all processes, unless it is not wanted or there is one process."""
    if not distributed.is_distributed() or config.runtime.sync_batch_norm == "off":
        return
    # The network of a second stage has them already.
    if count := synchronize_norms(net, device):
        logger.info("batch norm over the batch of all processes: %d layers", count)


def _build_step(
    config: Config, net: nn.Module, loss: nn.Module, loader: Loader, precision: Precision, folder: Path
) -> TrainingStep:
    runtime, device = config.runtime, precision.device
    profiles = runtime.profiling and distributed.is_main()
    optimizer = create_optimizer(config.optimizer, [net, loss], device, is_float32=precision.name == "no")
    make = functools.partial(RecordedStep, CudaRecorder(device)) if records_steps(config, net, device) else TrainingStep
    return make(
        net,
        loss,
        optimizer,
        precision,
        config.training,
        profiler=StepProfiler(runtime, folder / PROFILE, device) if profiles else NoProfiler(),
        utterances_per_speaker=int(getattr(loader, "utterances_per_speaker", 1)),
        gradient_cache=needs_gradient_cache(config),
        # A wish for each signal that asks to stop, one to save, and one to end for want of data.
        team=SeveralProcesses(net, loss, len(STOP_SIGNALS) + 2, device) if distributed.is_distributed() else None,
    )


def _origin(config: Config, loader: Loader) -> dict[str, Any]:
    """What a checkpoint says of where it comes from, and a resumed run is compared with."""
    versions = {"torch": str(torch.__version__)}
    return {"config": config_to_dict(config), "versions": versions, **getattr(loader, "identity", {})}
