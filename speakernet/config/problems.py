"""Options that contradict each other: always, in training, or so that one has no effect.

What concerns a single section is in the `problems` of its options; this file compares sections.
"""

from collections.abc import Iterator

from speakernet.config.schema import CHOICES, SECTIONS, Config, stages_of
from speakernet.options import Options

Problem = tuple[str, str]
"""The dotted key of an option, and what was found and what is expected."""


# There are three kinds of contradiction. What is always wrong is refused for every use. What cannot
# be trained is refused only in training, because a model may be scored with a configuration that
# this machine cannot train. What merely has no effect is a warning. A single value out of bounds is
# refused by its field.
def problems(config: Config) -> Iterator[Problem]:
    """Values that contradict each other, in whatever a configuration is used for."""
    # Stages are built from the whole configuration and would repeat each of its mistakes.
    is_sound = True
    for holder in {**SECTIONS, **CHOICES}:
        options = _options_of(holder, config)
        for option, message in options.problems() if options is not None else ():
            is_sound = False
            yield f"{holder}.{option}", message
    if is_sound and config.training.stages:
        yield from _problems_of_stages(config)


def _options_of(holder: str, config: Config) -> Options | None:
    """The options of a holder; None if the chosen component has no such field."""
    section, _, field = holder.partition(".")
    options: Options = getattr(config, section)
    return getattr(options, field, None) if field else options


def _problems_of_stages(config: Config) -> Iterator[Problem]:
    key = "training.stages"
    try:
        stages = stages_of(config)
    except ValueError as error:
        yield key, str(error)
        return
    for name, stage in stages.items():
        for option, message in problems(stage):
            yield key, f"{name}: {option}: {message}"
    if config.runtime.parallel == "fsdp" and len(stages) > 1:
        yield (
            "runtime.parallel",
            f"fsdp does not support {key}; train stages one by one with --initial_model",
        )


def training_problems(config: Config) -> Iterator[Problem]:
    """Values that cannot be trained together; scoring and showing a configuration ignore them."""
    training = config.training
    augment = config.augment
    loss = config.loss
    # Each message names the option to change, and the value if only one works.
    utterances = config.data.utterances_per_speaker
    epochs = f"but training.max_epochs is {training.max_epochs}"
    if utterances < loss.min_utterances:
        yield (
            "data.utterances_per_speaker",
            f"{utterances}, but the loss {loss.name} compares utterances of the same speaker; set "
            f"--nPerSpeaker {loss.min_utterances}",
        )
    # With as many real epochs as epochs, the extra classes of changed voices would never occur.
    if augment.enabled and augment.real_epochs >= training.max_epochs:
        yield (
            "augment.real_epochs",
            f"{augment.real_epochs}, {epochs}, so changed voices would never be used; lower it, or "
            "remove speed_factors",
        )
    if training.average_checkpoints and config.model.options.has_adapters:
        yield (
            "training.average_checkpoints",
            f"{training.average_checkpoints}, but averaged weights cannot be split into adapters "
            "again (model.options.trained: lora); set it to 0",
        )
    if training.freeze_epochs >= training.max_epochs:
        yield (
            "training.freeze_epochs",
            f"{training.freeze_epochs}, {epochs}, so the network would never learn; lower it",
        )
    if training.freeze_epochs and not loss.has_head:
        yield (
            "training.freeze_epochs",
            f"{training.freeze_epochs}, but the loss {loss.name} has no head to train while the "
            "network is frozen; set it to 0, or use a loss with a head, such as aamsoftmax",
        )
    if not training.initial_model:
        for option in ("freeze_epochs", "freeze_norm_statistics", "initial_weight"):
            if value := getattr(training, option):
                yield f"training.{option}", f"{value} needs --initial_model FILE"
    if config.runtime.parallel == "fsdp":
        yield from _problems_of_fsdp(config)


def _problems_of_fsdp(config: Config) -> Iterator[Problem]:
    training = config.training
    # None of these works with parameters that fsdp has cut into shards.
    values = {
        "training.ema_decay": training.ema_decay,
        "training.initial_weight": training.initial_weight,
        "training.average_checkpoints": training.average_checkpoints,
        "optimizer.fused": config.optimizer.fused,
        "runtime.channels_last": config.runtime.channels_last,
        "loss.sharded": config.loss.sharded,
    }
    for key, value in values.items():
        if value not in (0, "auto", "off"):
            instead = "auto" if value == "on" else "0"
            yield key, f"{value} does not work with runtime.parallel: fsdp; set it to {instead}"


def options_without_effect(
    config: Config, num_batches: int, *, is_on_cpu: bool, is_distributed: bool
) -> Iterator[Problem]:
    """Options without effect, or not the expected one, in a run with `num_batches` per epoch."""
    training = config.training
    schedule = config.schedule
    runtime = config.runtime
    epochs = f"but training.max_epochs is {training.max_epochs}"
    # The last step of an epoch takes the batches that are left. With so few batches, that is every
    # step, so the effective batch would always be smaller than asked for.
    if training.accumulation_steps > num_batches:
        yield (
            "training.accumulation_steps",
            f"{training.accumulation_steps}, but an epoch has only {num_batches} batches, and a "
            "step cannot span epochs",
        )
    if training.average_checkpoints > training.max_epochs:
        yield "training.average_checkpoints", f"{training.average_checkpoints}, {epochs}"
    warmup = f"{schedule.warmup_epochs:g}"
    if schedule.warmup_epochs >= training.max_epochs:
        yield (
            "schedule.warmup_epochs",
            f"{warmup}, {epochs}: the learning rate never reaches its peak",
        )
    # `one_cycle` has a warm-up of its own; the rate would rise twice and peak at another epoch.
    elif schedule.warmup_epochs and schedule.name == "one_cycle":
        yield (
            "schedule.warmup_epochs",
            f"{warmup}, but one_cycle has its own warm-up, so the learning rate rises twice; set "
            "it to 0",
        )
    if schedule.margin != "constant":
        if not config.loss.has_margin:
            yield "schedule.margin", f"{schedule.margin} has no effect: the loss has no margin"
        elif schedule.margin_end_epoch > training.max_epochs:
            yield (
                "schedule.margin_end_epoch",
                f"{schedule.margin_end_epoch:g}, {epochs}: the margin never reaches its full size",
            )
    if runtime.gpu_id is not None and is_on_cpu:
        yield "runtime.gpu_id", f"{runtime.gpu_id} has no effect on a CPU"
    if runtime.parallel == "fsdp" and not is_distributed:
        yield "runtime.parallel", "fsdp has no effect in a single process"
    if config.loss.sharded == "on" and not is_distributed:
        yield "loss.sharded", "on has no effect: a single process keeps every speaker"
    if runtime.compile_scope != "auto" and runtime.compile == "off":
        yield "runtime.compile_scope", f"{runtime.compile_scope} has no effect without compiling"
    if runtime.compile_mode != "default" and (runtime.compile == "off" or is_on_cpu):
        yield (
            "runtime.compile_mode",
            f"{runtime.compile_mode} has no effect on a CPU or without compiling",
        )
