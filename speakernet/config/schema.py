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
from speakernet.losses.options import CLASSIFICATIONS, LOSSES, METRICS, AAMSoftmaxOptions, LossOptions
from speakernet.models.options import MODELS, POOLINGS, ModelOptions, pooling_of
from speakernet.options import Options, default_of, field_names
from speakernet.registry import Part, lookup
from speakernet.training.options import OPTIMIZERS, AdamOptions, OptimizerOptions, RuntimeOptions, TrainingOptions
from speakernet.training.options.schedules import SCHEDULES, CosineOptions, ScheduleOptions


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

POOLING, CLASSIFICATION, METRIC = "model.pooling", "loss.classification", "loss.metric"
PARTS: dict[str, tuple[str, Mapping[str, Part]]] = {
    "model": ("model", MODELS),
    POOLING: ("pooling", POOLINGS),
    CLASSIFICATION: ("classification loss", CLASSIFICATIONS),
    METRIC: ("metric loss", METRICS),
    **TABLES,
}
"""Place where a part is chosen -> what such a part is called, and its table. (A section, or a part within one.)"""
CHOICES = {place: place if place == POOLING else f"{place}.name" for place in PARTS}
"""Place -> the key that names the part."""
NESTED = {
    "model.options": "model",
    "model.pooling_options": POOLING,
    CLASSIFICATION: CLASSIFICATION,
    METRIC: METRIC,
}
"""Field that holds the options of a further part -> the place where that part is chosen."""

Names = Mapping[str, str]
"""Place -> the name of the part that is chosen there."""


def names_in(values: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """What is chosen in these sections, and where nobody chooses."""
    found = {}
    for place, key in CHOICES.items():
        at: Any = values
        for word in key.split("."):
            at = at.get(word) if isinstance(at, Mapping) else None
        found[place] = DEFAULT_NAMES[place] if at is None else at
    return found


def _default_name(place: str) -> str:
    section, _, field = place.partition(".")
    owner = SECTIONS[section]
    if field and field not in field_names(owner):
        # Of the section's parts, only some have such a part within them.
        owner = TABLES[section][1][takers(section, field)[0]].options
    default = default_of(owner, field or "name")
    return str(getattr(default, "name", default))


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
    kind, table = PARTS[place]
    lookup(table, name, kind)
    return name


def owner_of(section: str, names: Names) -> type[Options]:
    """The class whose fields are the section's options."""
    if section not in TABLES:
        return SECTIONS[section]
    return TABLES[section][1][chosen(names, section)].options


def nested_owner(key: str, names: Names) -> type[Options]:
    """The class whose fields are the keys below a field of NESTED."""
    place = NESTED[key]
    return PARTS[place][1][chosen(names, place)].options


def has_nested(key: str, names: Names) -> bool:
    """Whether the part that is chosen in the section has that field of NESTED."""
    section, _, field = key.partition(".")
    return field in field_names(owner_of(section, names))


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


DEFAULT_NAMES = {place: _default_name(place) for place in PARTS}


def sections_of(values: Mapping[str, Mapping[str, Any]], names: Names) -> Config:
    """A configuration from checked values; what is left out keeps its default."""
    made: dict[str, Any] = {}
    for section in SECTIONS:
        fields = dict(values.get(section, {}))
        for key in NESTED:
            if key.startswith(f"{section}.") and has_nested(key, names):
                field = key.partition(".")[2]
                fields[field] = nested_owner(key, names)(**fields.get(field, {}))
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
    for key, place in NESTED.items():
        section, _, field = key.partition(".")
        is_same = chosen(before, place) == chosen(names_in(values), place)
        if not is_same and field not in sections.get(section, {}):
            values[section].pop(field, None)
    return config_from_dict(values)


def problems(config: Config) -> Iterator[tuple[str, str]]:
    """Values that contradict each other, as (dotted key, what was found and what is expected)."""
    for section in SECTIONS:
        for field, message in getattr(config, section).problems():
            yield f"{section}.{field}", message
    for key in NESTED:
        section, _, nested = key.partition(".")
        for field, message in nested_problems(getattr(config, section), nested):
            yield f"{key}.{field}", message


def nested_problems(section: Options, field: str) -> Iterator[tuple[str, str]]:
    """What contradicts itself among the options of a part within another; nothing where the section has none."""
    if field in field_names(type(section)):
        yield from getattr(section, field).problems()


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
    for key in NESTED:
        section, _, field = key.partition(".")
        if field in kept.get(section, {}):
            own = field_names(nested_owner(key, names))
            kept[section][field] = {option: value for option, value in kept[section][field].items() if option in own}
    return sections_of(kept, names)
