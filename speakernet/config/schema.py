"""The whole configuration: the option dataclasses of the rooms under the names of their sections.

Adds no option of its own. Knows what a configuration is, not where it comes from (`loading.py`) nor what is built from
it. A section whose `name` chooses a part from a table is an object of that part's own options class, so that
`config.schedule.decay` is there exactly when the chosen schedule takes it.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from speakernet.data.augment.options import AugmentOptions
from speakernet.data.options import DataOptions
from speakernet.evaluation.options import EvaluationOptions
from speakernet.frontend.options import FEATURES, FrontendOptions, LogMelOptions
from speakernet.losses.options import LOSSES, AAMSoftmaxOptions, LossOptions
from speakernet.models.options import MODELS, POOLINGS, ModelOptions, pooling_of
from speakernet.options import Options, field_names
from speakernet.registry import Part, lookup
from speakernet.training.options import (
    OPTIMIZERS,
    SCHEDULES,
    AdamOptions,
    CosineOptions,
    OptimizerOptions,
    RuntimeOptions,
    ScheduleOptions,
    TrainingOptions,
)


@dataclasses.dataclass(kw_only=True)
class Config:
    """Everything that defines an experiment; each section is documented in its own class."""

    data: DataOptions = dataclasses.field(default_factory=DataOptions)
    augment: AugmentOptions = dataclasses.field(default_factory=AugmentOptions)
    frontend: FrontendOptions = dataclasses.field(default_factory=LogMelOptions)
    model: ModelOptions = dataclasses.field(default_factory=ModelOptions)
    loss: LossOptions = dataclasses.field(default_factory=AAMSoftmaxOptions)
    optimizer: OptimizerOptions = dataclasses.field(default_factory=AdamOptions)
    schedule: ScheduleOptions = dataclasses.field(default_factory=CosineOptions)
    training: TrainingOptions = dataclasses.field(default_factory=TrainingOptions)
    evaluation: EvaluationOptions = dataclasses.field(default_factory=EvaluationOptions)
    runtime: RuntimeOptions = dataclasses.field(default_factory=RuntimeOptions)


SECTIONS: dict[str, type[Options]] = {field.name: field.type for field in dataclasses.fields(Config)}  # type: ignore[misc]
TABLES: dict[str, tuple[str, Mapping[str, Part]]] = {
    "frontend": ("front end", FEATURES),
    "loss": ("loss", LOSSES),
    "optimizer": ("optimizer", OPTIMIZERS),
    "schedule": ("schedule", SCHEDULES),
}
"""Sections whose `name` chooses a part, with what such a part is called. (A model's own options are nested.)"""

POOLING = "model.pooling"
CHOICES = {"model": "model.name", POOLING: POOLING, **{section: f"{section}.name" for section in TABLES}}
"""Place where a part is chosen -> the key that names it. (The model's pooling is a part beside the model itself.)"""
NESTED = {"options": "model", "pooling_options": POOLING}
"""Field of the section `model` that holds further options -> the place where the part that takes them is chosen."""

Names = Mapping[str, str]
"""Place -> the name of the part that is chosen there."""


def names_in(values: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """What is chosen in these sections, and where nobody chooses."""
    found = {}
    for place, key in CHOICES.items():
        section, _, field = key.partition(".")
        found[place] = values.get(section, {}).get(field, getattr(getattr(Config(), section), field))
    return found


def chosen(names: Names, place: str) -> str:
    """The name of the part that a place stands for; `auto` as front end or pooling is the model's own.

    Raises:
        ValueError: a name that its table does not have.
    """
    name = names[place]
    if place == "frontend" and name == "auto":
        return str(lookup(MODELS, names["model"], "model").options.front_end_defaults["name"])  # type: ignore[attr-defined]
    if place == POOLING:
        return pooling_of(names["model"], name)
    if place == "model":
        lookup(MODELS, name, "model")
    else:
        kind, table = TABLES[place]
        lookup(table, name, kind)
    return name


def owner_of(section: str, names: Names) -> type[Options]:
    """The class whose fields are the section's options."""
    if section not in TABLES:
        return SECTIONS[section]
    return TABLES[section][1][chosen(names, section)].options


def nested_owner(field: str, names: Names) -> type[Options]:
    """The class whose fields are the keys of `model.options` or of `model.pooling_options`."""
    place = NESTED[field]
    return (MODELS if place == "model" else POOLINGS)[chosen(names, place)].options


def takers(section: str, field: str) -> list[str]:
    """The parts of a section's table that take an option."""
    if section not in TABLES:
        return []
    return [name for name, part in TABLES[section][1].items() if field in field_names(part.options)]


def known_fields(section: str) -> list[str]:
    """Every option of a section, whatever part is chosen."""
    names = field_names(SECTIONS[section])
    if section in TABLES:
        for part in TABLES[section][1].values():
            names += [name for name in field_names(part.options) if name not in names]
    return names


def sections_of(values: Mapping[str, Mapping[str, Any]], names: Names) -> Config:
    """A configuration from checked values; what is left out keeps its default."""
    made: dict[str, Any] = {}
    for section in SECTIONS:
        fields = dict(values.get(section, {}))
        if section == "model":
            for field in NESTED:
                fields[field] = nested_owner(field, names)(**fields.get(field, {}))
        made[section] = owner_of(section, names)(**fields)
    return Config(**made)


def replaced(config: Config, **sections: Mapping[str, Any]) -> Config:
    """A copy with some values changed: `replaced(config, loss={"name": "softmax"}, data={"batch_size": 8})`.

    Where another part is named, its options start from their defaults and those of the old part go.

    Raises:
        ValueError: a name or an option that there is not.
    """
    values = config_to_dict(config)
    for section, fields in sections.items():
        if section in TABLES and fields.get("name", values[section]["name"]) != values[section]["name"]:
            values[section] = {name: values[section][name] for name in field_names(SECTIONS[section])}
        values[section] |= dict(fields)
    before = names_in(config_to_dict(config))
    for field, place in NESTED.items():
        is_same = chosen(before, place) == chosen(names_in(values), place)
        if not is_same and field not in sections.get("model", {}):
            values["model"][field] = {}
    return config_from_dict(values)


def problems(config: Config) -> Iterator[tuple[str, str]]:
    """Values that contradict each other, as (dotted key, what was found and what is expected)."""
    for section in SECTIONS:
        for field, message in getattr(config, section).problems():
            yield f"{section}.{field}", message
    for nested in NESTED:
        for field, message in getattr(config.model, nested).problems():
            yield f"model.{nested}.{field}", message


def config_to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Plain nested dictionaries, as they are saved with the run and inside the checkpoint: what chosen parts take."""
    return dataclasses.asdict(config)


def config_from_dict(values: Mapping[str, Mapping[str, Any]]) -> Config:
    """The configuration that `config_to_dict` wrote; what is missing keeps its default.

    Options of parts that are not chosen are left out: a dictionary of before 0.2 holds those of all parts.

    Raises:
        ValueError: a section or field that this version does not know.
    """
    for section, fields in values.items():
        if section not in SECTIONS:
            raise ValueError(f"unknown configuration section {section!r}; known: {', '.join(SECTIONS)}")
        unknown = sorted(set(fields) - set(known_fields(section)))
        if unknown:
            raise ValueError(f"unknown key {section}.{unknown[0]} in a saved configuration")
    names = names_in(values)
    kept = {
        section: {field: value for field, value in fields.items() if field in field_names(owner_of(section, names))}
        for section, fields in values.items()
    }
    for nested in NESTED:
        own = field_names(nested_owner(nested, names))
        given = kept.get("model", {}).get(nested, {})
        kept.setdefault("model", {})[nested] = {key: value for key, value in given.items() if key in own}
    return sections_of(kept, names)
