"""The whole configuration: the options of all packages under the names of their sections.

A section whose `name` chooses a component holds that component's own options, so that `config.schedule.decay` exists
exactly if the chosen schedule takes it. Where a configuration comes from is the business of `loading.py`.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from pydantic import Field, SerializeAsAny

from speakernet.config.aliases import REMOVED
from speakernet.data.augment.options import AugmentOptions
from speakernet.data.options import DataOptions
from speakernet.evaluation.options import EvaluationOptions
from speakernet.frontend.options import FEATURES, FrontendOptions, LogMelOptions
from speakernet.losses.options import CLASSIFICATIONS, LOSSES, METRICS, AAMSoftmaxOptions, CombinedOptions, LossOptions
from speakernet.models.options import MODELS, POOLINGS, ModelOptions, pooling_of
from speakernet.options import Component, OptionError, Options, default_of, lookup
from speakernet.training.options import OPTIMIZERS, AdamOptions, OptimizerOptions, RuntimeOptions, TrainingOptions
from speakernet.training.options.schedules import SCHEDULES, FloorOptions, ScheduleOptions


class Config(Options):
    """Everything that defines an experiment; each section is documented in its own class."""

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


class Choice(NamedTuple):
    """A place where a component is chosen by name."""

    kind: str
    table: Mapping[str, Component]
    key: str
    """The option that names the component."""
    default: str


SECTIONS: dict[str, type[Options]] = {name: field.annotation for name, field in Config.model_fields.items()}  # type: ignore[misc]
CHOICES = {
    "model.options": Choice("model", MODELS, "model.name", default_of(ModelOptions, "name")),
    "model.pooling_options": Choice("pooling", POOLINGS, "model.pooling", default_of(ModelOptions, "pooling")),
    "frontend": Choice("front end", FEATURES, "frontend.name", default_of(LogMelOptions, "name")),
    "loss": Choice("loss", LOSSES, "loss.name", default_of(AAMSoftmaxOptions, "name")),
    "loss.classification": Choice(
        "classification loss",
        CLASSIFICATIONS,
        "loss.classification.name",
        default_of(CombinedOptions, "classification").name,
    ),
    "loss.metric": Choice("metric loss", METRICS, "loss.metric.name", default_of(CombinedOptions, "metric").name),
    "optimizer": Choice("optimizer", OPTIMIZERS, "optimizer.name", default_of(AdamOptions, "name")),
    "schedule": Choice("schedule", SCHEDULES, "schedule.name", default_of(FloorOptions, "name")),
}
"""Holder (the section or field that holds a chosen component's options) -> the choice."""
DEFAULT_NAMES = {holder: choice.default for holder, choice in CHOICES.items()}

Names = Mapping[str, str]
"""Holder -> the name that is chosen there."""


def split_key(key: str) -> tuple[str, str]:
    """Holder or section, and option, of a dotted key: `loss.metric.margin` is `margin` of `loss.metric`."""
    holder = key.rpartition(".")[0]
    parts = key.rpartition(".") if holder in CHOICES or holder in SECTIONS else key.partition(".")
    return parts[0], parts[2]


def names_in(values: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The names in these sections, the defaults if there is none."""
    found, given = {}, cast("Any", values)
    for holder, choice in CHOICES.items():
        name = functools.reduce(lambda at, word: (at or {}).get(word), choice.key.split("."), given)
        found[holder] = choice.default if name is None else str(name)
    return found


def chosen(holder: str, names: Names) -> str:
    """The row of its table that a holder has options of; `auto` as front end or pooling is the model's own."""
    name, model = names[holder], names["model.options"]
    if holder == "model.pooling_options":
        return pooling_of(model, name)
    if holder == "frontend" and name == "auto":
        options: Any = lookup(MODELS, model, "model").options
        return str(options.front_end_defaults["name"])
    lookup(CHOICES[holder].table, name, CHOICES[holder].kind)
    return name


def owner_of(holder: str, names: Names) -> type[Options] | None:
    """The class whose fields are a holder's options; None if the chosen component has no such field."""
    section, _, field = holder.partition(".")
    if field and field not in (owner_of(section, names) or Options).model_fields:
        return None
    return CHOICES[holder].table[chosen(holder, names)].options if holder in CHOICES else SECTIONS[holder]


def known_fields(section: str) -> list[str]:
    """Every option of a section, whatever component is chosen."""
    table = CHOICES[section].table if section in CHOICES else {}
    owners = [SECTIONS[section], *(component.options for component in table.values())]
    return list(dict.fromkeys(name for owner in owners for name in owner.model_fields))


def config_from_dict(values: Mapping[str, Mapping[str, Any]]) -> Config:
    """The configuration that `model_dump` gave; what is missing keeps its default."""
    if unknown := set(values) - set(SECTIONS):
        raise ValueError(f"unknown configuration section {min(unknown)!r}; known: {', '.join(SECTIONS)}")
    names = names_in(values)
    made: dict[str, Any] = {section: dict(values.get(section, {})) for section in SECTIONS}
    # A section comes after the fields that it holds.
    for holder in [*(one for one in CHOICES if "." in one), *SECTIONS]:
        section, _, field = holder.partition(".")
        at, key = (made[section], field) if field else (made, section)
        if owner := owner_of(holder, names):
            given = {name: one for name, one in (at.get(key) or {}).items() if f"{holder}.{name}" not in REMOVED}
            try:
                at[key] = owner(**given)
            except OptionError as error:
                error.field = f"{holder}.{error.field}"
                raise
    data = made["data"]
    if data.test_lists and not data.test_list:
        first = next(iter(data.test_lists.values()))
        data.test_list, data.test_path = first.list, first.path or data.test_path
    return Config(**made)


def replaced(config: Config, **sections: Mapping[str, Any]) -> Config:
    """A copy with some values changed: `replaced(config, loss={"name": "softmax"}, data={"batch_size": 8})`.

    The options of a component that is replaced go; those of the new one start from their defaults.
    """
    values = config.model_dump()
    before = names_in(values)
    for section, fields in sections.items():
        values[section] |= dict(fields)
    after = names_in(values)
    for holder in CHOICES:
        section, _, field = holder.partition(".")
        given = sections.get(section, {})
        if chosen(holder, before) == chosen(holder, after):
            continue
        if not field:
            kept = {*SECTIONS[section].model_fields, *given}
            values[section] = {name: value for name, value in values[section].items() if name in kept}
        elif field not in given:
            values[section].pop(field, None)
    return config_from_dict(values)


def problems(config: Config) -> Iterator[tuple[str, str]]:
    """Values that contradict each other, as (dotted key, what was found and what is expected)."""
    for holder in {**SECTIONS, **CHOICES}:
        section, _, field = holder.partition(".")
        options = getattr(getattr(config, section), field, None) if field else getattr(config, section)
        for option, message in options.problems() if options is not None else ():
            yield f"{holder}.{option}", message
