"""The whole configuration: the options of all packages, by section.

A section whose `name` chooses a component has that component's options: `config.schedule.decay`
exists only if the chosen schedule takes it. `loading.py` reads configurations.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from pydantic import Field, SerializeAsAny

from speakernet.config.aliases import REMOVED
from speakernet.data.augment.options import AugmentOptions
from speakernet.data.options import DataOptions
from speakernet.evaluation.options import EvaluationOptions
from speakernet.frontend.options import FEATURES, FrontendOptions, LogMelOptions
from speakernet.losses.options import (
    CLASSIFICATIONS,
    LOSSES,
    METRICS,
    AAMSoftmaxOptions,
    CombinedOptions,
    LossOptions,
)
from speakernet.models.options import MODELS, POOLINGS, ModelOptions, pooling_of
from speakernet.options import (
    Component,
    OptionError,
    Options,
    default_of,
    lookup,
    suggestion,
)
from speakernet.training.options import (
    OPTIMIZERS,
    AdamOptions,
    OptimizerOptions,
    RuntimeOptions,
    TrainingOptions,
)
from speakernet.training.options.schedules import (
    SCHEDULES,
    FloorOptions,
    ScheduleOptions,
)


# A run has ten sections. The rest of this file is about one question: given the chosen names, which
# class of options does a section have?
class Config(Options):
    """The configuration of a run; each section is documented in its own class."""

    data: DataOptions = Field(default_factory=DataOptions)
    augment: AugmentOptions = Field(default_factory=AugmentOptions)
    frontend: SerializeAsAny[FrontendOptions] = Field(default_factory=LogMelOptions)
    model: ModelOptions = Field(default_factory=ModelOptions)
    loss: SerializeAsAny[LossOptions] = Field(default_factory=AAMSoftmaxOptions)
    optimizer: SerializeAsAny[OptimizerOptions] = Field(default_factory=AdamOptions)
    schedule: SerializeAsAny[ScheduleOptions] = Field(default_factory=FloorOptions)
    training: TrainingOptions = Field(default_factory=TrainingOptions)
    evaluation: EvaluationOptions = Field(default_factory=EvaluationOptions)
    runtime: RuntimeOptions = Field(default_factory=RuntimeOptions)

    @property
    def run_folder(self) -> Path:
        """Where a run with this configuration writes."""
        return Path(self.training.save_path)


class Choice(NamedTuple):
    """A part of the configuration where a component is chosen by name."""

    kind: str
    table: Mapping[str, Component]
    key: str
    """The option that names the component."""
    default: str


SECTIONS: dict[str, type[Options]] = {
    name: cast("type[Options]", field.annotation) for name, field in Config.model_fields.items()
}
CHOICES = {
    "model.options": Choice("model", MODELS, "model.name", default_of(ModelOptions, "name")),
    "model.pooling_options": Choice(
        "pooling", POOLINGS, "model.pooling", default_of(ModelOptions, "pooling")
    ),
    "frontend": Choice("front end", FEATURES, "frontend.name", default_of(LogMelOptions, "name")),
    "loss": Choice("loss", LOSSES, "loss.name", default_of(AAMSoftmaxOptions, "name")),
    "loss.classification": Choice(
        "classification loss",
        CLASSIFICATIONS,
        "loss.classification.name",
        default_of(CombinedOptions, "classification").name,
    ),
    "loss.metric": Choice(
        "metric loss", METRICS, "loss.metric.name", default_of(CombinedOptions, "metric").name
    ),
    "optimizer": Choice("optimizer", OPTIMIZERS, "optimizer.name", default_of(AdamOptions, "name")),
    "schedule": Choice("schedule", SCHEDULES, "schedule.name", default_of(FloorOptions, "name")),
}
"""Holder (the section or field with the chosen component's options) -> the choice."""
OF_A_STAGE: dict[str, Collection[str]] = {
    "data": (
        "crop_frames",
        "crop_frames_max",
        "batch_size",
        "utterances_per_speaker",
        "max_utterances_per_speaker",
        "sampler",
        "min_seconds",
    ),
    "model": ("options",),
    "model.pooling_options": (),
    "loss": ("margin", "scale", "inter_top_k", "inter_top_k_penalty"),
    "loss.metric": (),
    "training": (
        "freeze_epochs",
        "freeze_norm_statistics",
        "accumulation_steps",
        "reference_batch",
        "batch_scaling",
        "test_interval",
        "patience",
        "average_checkpoints",
        "ema_decay",
        "max_grad_norm",
        "log_interval",
        "save_steps",
        "save_minutes",
        "keep_checkpoints",
    ),
}
OF_A_STAGE["loss.classification"] = OF_A_STAGE["loss"]
"""Holder -> the options that a stage can change; of a holder that is not listed, it can change
all."""
ONCE: dict[str, dict[str, Any]] = {
    "augment": {"real_epochs": 0},
    "model.options": {"unfreeze_epochs": 0},
    "schedule": {"margin": "constant"},
    "training": {"freeze_epochs": 0, "initial_weight": 0.0},
}
"""Options tied to the start or end of a stage; the next stage resets them unless it sets them
itself."""
RECORDED = [1.0]
"""The speed of the voice as recorded."""
FIELDS = [holder for holder in CHOICES if "." in holder]
"""Holders that are fields of a section."""
CHOICE_KEYS = {choice.key for choice in CHOICES.values()}
DEFAULT_NAMES = {holder: choice.default for holder, choice in CHOICES.items()}

Names = Mapping[str, str]
"""Holder -> the chosen name."""
Sections = Mapping[str, Mapping[str, Any]]
"""Section -> option -> value."""


def split_key(key: str) -> tuple[str, str]:
    """Split a dotted key into holder or section, and option: `loss.metric.margin` is `margin` of
    `loss.metric`.
    """
    holder = key.rpartition(".")[0]
    parts = key.rpartition(".") if holder in CHOICES or holder in SECTIONS else key.partition(".")
    return parts[0], parts[2]


def names_in(values: Sections) -> dict[str, str]:
    """The chosen names in these sections, or the default names."""
    names = {}
    # On plain values, because the classes that could check them are chosen by these names.
    for holder, choice in CHOICES.items():
        *words, option = choice.key.split(".")
        options: Any = values
        for word in words:
            options = options.get(word) or {}
        name = options.get(option)
        names[holder] = choice.default if name is None else str(name)
    return names


def find_choice(holder: str, names: Names) -> str:
    """The component whose options a holder has; `auto` as front end or pooling is the model's
    default.
    """
    # `auto` is resolved through the model, so that a recipe need not repeat CAM++'s own features
    # and pooling.
    name = names[holder]
    model = names["model.options"]
    if holder == "model.pooling_options":
        return pooling_of(model, name)
    if holder == "frontend" and name == "auto":
        options: Any = lookup(MODELS, model, "model").options
        return str(options.front_end_defaults["name"])
    lookup(CHOICES[holder].table, name, CHOICES[holder].kind)
    return name


def owner_of(holder: str, names: Names) -> type[Options] | None:
    """The options class of a holder; None if the chosen component has no such field."""
    # Recursive, because whether there is a `loss.metric` depends on the chosen loss.
    section, _, field = holder.partition(".")
    if field and field not in (owner_of(section, names) or Options).model_fields:
        return None
    return (
        CHOICES[holder].table[find_choice(holder, names)].options
        if holder in CHOICES
        else SECTIONS[holder]
    )


def known_fields(section: str) -> list[str]:
    """Every option of a section, for all components."""
    table = CHOICES[section].table if section in CHOICES else {}
    owners = [SECTIONS[section], *(component.options for component in table.values())]
    return list(dict.fromkeys(name for owner in owners for name in owner.model_fields))


def without_removed(key: str, value: Any, dropped: list[str]) -> Any:
    """The value of a dotted key without what `REMOVED` lists; its keys are added to `dropped`."""
    if isinstance(value, Mapping):
        kept = {}
        for name, inner in value.items():
            own_key = f"{key}.{name}" if key else str(name)
            if own_key in REMOVED:
                dropped.append(own_key)
            else:
                kept[name] = without_removed(own_key, inner, dropped)
        return kept
    if not isinstance(value, list):
        return value
    # A stage contains whole sections, so its keys start from the top.
    if key == "training.stages":
        return [without_removed("", stage, dropped) for stage in value]
    dropped += [f"{key}: {item}" for item in value if f"{key}: {item}" in REMOVED]
    return [item for item in value if f"{key}: {item}" not in REMOVED]


def config_from_dict(values: Sections) -> Config:
    """Build a configuration from nested values, as from `model_dump`; missing options keep their
    defaults.
    """
    if unknown := set(values) - set(SECTIONS):
        raise ValueError(
            f"unknown configuration section {min(unknown)!r}; known: {', '.join(SECTIONS)}"
        )
    names = names_in(values)
    sections: dict[str, Any] = {}
    for section in SECTIONS:
        sections[section] = without_removed(section, values.get(section, {}), [])
    # Fields of a section (the options of the network, the losses within a combined one) are built
    # before the section, whose own validator expects finished objects.
    for holder in [*FIELDS, *SECTIONS]:
        section, _, field = holder.partition(".")
        target, key = (sections[section], field) if field else (sections, section)
        if owner := owner_of(holder, names):
            try:
                target[key] = owner(**(target.get(key) or {}))
            except OptionError as error:
                error.field = f"{holder}.{error.field}"
                raise
    config = Config(**sections)
    data = config.data
    # The report needs one main list, so with only named lists the first becomes it.
    if data.test_lists and not data.test_list:
        first = next(iter(data.test_lists.values()))
        path = first.path or data.test_path
        config = with_options(config, "data", test_list=first.list, test_path=path)
    return config


def with_options(config: Config, section: str, **values: Any) -> Config:
    """A copy with some options of a section changed to values that need no check."""
    options = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: options})


def with_changes(config: Config, **sections: Mapping[str, Any]) -> Config:
    """A copy with some values changed: `with_changes(config, loss={"name": "softmax"},
    data={"batch_size": 8})`.

    If a component is replaced, its options are dropped, and the new component's start from their
    defaults.
    """
    # Through plain values and the validators once more, not by copying objects: a change may
    # replace a component, and then the options of the old one must go and the defaults of the new
    # one come.
    values = config.model_dump()
    before = names_in(values)
    for section, fields in sections.items():
        values[section] |= dict(fields)
    after = names_in(values)
    for holder in CHOICES:
        if find_choice(holder, before) == find_choice(holder, after):
            continue
        section, _, field = holder.partition(".")
        changed_fields = sections.get(section, {})
        if not field:
            for name in (
                values[section].keys() - SECTIONS[section].model_fields.keys() - set(changed_fields)
            ):
                del values[section][name]
        elif field not in changed_fields:
            values[section].pop(field, None)
    return config_from_dict(values)


def stages_of(config: Config) -> dict[str, Config]:
    """The configuration of each stage by name, in order; a run without stages has one stage without
    a name.

    Raises:
        ValueError: a stage sets options that it cannot change.
    """
    # A stage is written as its differences from the stage before, like a YAML file over another
    # one. Most options belong to the whole run: lists, network and seed cannot change halfway. What
    # is tied to the start or the end of a stage (thawing a network, a margin that ramps up) happens
    # once and is reset for the next stage, which would otherwise freeze the network again.
    if not config.training.stages:
        return {"": config}
    stages: dict[str, Config] = {}
    before = config
    for plan in config.training.stages:
        changes = {name: fields for name, fields in plan if isinstance(fields, Mapping)}
        try:
            before = _change(before, plan.epochs, changes, is_first=not stages)
            stages[plan.name] = before
            voices = _voices(before)
            first = _voices(next(iter(stages.values())))
            # Recorded voices keep their labels, whichever other voices the head has.
            if voices != first and (voices != RECORDED or RECORDED[0] not in first):
                raise ValueError(
                    "augment.speed_factors needs classes that the head does not have; expected the "
                    "factors of the first stage, or [1.0] if they include it"
                )
        except OptionError as error:
            raise ValueError(f"{plan.name}: {error.field} {error.found}") from error
        except ValueError as error:
            raise ValueError(f"{plan.name}: {error}") from error
    return stages


def _change(before: Config, epochs: int, changes: Sections, *, is_first: bool) -> Config:
    """The configuration of a stage, from that of the stage before it (at first, of the run)."""
    values = before.model_dump()
    once = {} if is_first else ONCE
    sections: dict[str, Any] = {section: dict(fields) for section, fields in changes.items()}
    # Fields too, because an option that `ONCE` resets may be in one.
    for holder in [*changes, *FIELDS]:
        section, _, field = holder.partition(".")
        options = values[section]
        changed = sections.get(section, {})
        if field:
            options = options.get(field) or {}
            changed = changed.get(field, {})
        if not isinstance(changed, Mapping):
            raise ValueError(f"{holder} is {changed!r}; expected `option: value` pairs")
        _refuse_unchangeable(holder, changed, options, before)
        if field:
            reset = {name: once[holder][name] for name in once.get(holder, ()) if name in options}
            if reset or changed:
                sections.setdefault(section, {})[field] = {**options, **reset, **changed}
    for section in SECTIONS.keys() & once.keys():
        sections[section] = {**once[section], **sections.get(section, {})}
    training = {**sections.get("training", {}), "max_epochs": epochs, "stages": [], "stage": ""}
    return with_changes(before, **{**sections, "training": training})


def _refuse_unchangeable(
    holder: str, changed: Iterable[str], options: Collection[str], before: Config
) -> None:
    """Refuse options of a holder that belong to the whole run, or do not exist."""
    # A stage continues the same network and head. An option that needs other weights, other classes
    # or another random stream belongs to the whole run, and is refused rather than ignored.
    free = OF_A_STAGE.get(holder)
    if holder == "model.options":
        free = before.model.options.training_only
    if free is None:
        return
    for name in changed:
        if name in free or f"{holder}.{name}" in CHOICES:
            continue
        why = f"does not exist; {suggestion(name, free)}"
        if name in options or not free:
            why = "belongs to the whole run"
        can = f"a stage can change {', '.join(sorted(free)) or 'none of its options'}"
        raise ValueError(f"{holder}.{name} {why}; {can}")


def _voices(config: Config) -> list[float]:
    """The speed of each voice, in the order of the classes of a head."""
    # The factors have no effect without augmentation.
    augment = config.augment
    return list(augment.speed_factors) if augment.enabled else RECORDED
