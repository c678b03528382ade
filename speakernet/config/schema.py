"""The whole configuration as one dataclass of sections, its checks, and its plain-dictionary form.

Knows what a configuration is, not where it comes from (`loading.py`) nor what is built from it (`speakernet.build`).
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from speakernet.config.sections.data import AugmentSection, DataSection
from speakernet.config.sections.evaluation import EvaluationSection
from speakernet.config.sections.model import FrontendSection, LossSection, ModelSection
from speakernet.config.sections.training import OptimizerSection, RuntimeSection, ScheduleSection, TrainingSection


@dataclasses.dataclass
class Config:
    """Everything that defines an experiment; each section is documented in its own class."""

    data: DataSection = dataclasses.field(default_factory=DataSection)
    augment: AugmentSection = dataclasses.field(default_factory=AugmentSection)
    frontend: FrontendSection = dataclasses.field(default_factory=FrontendSection)
    model: ModelSection = dataclasses.field(default_factory=ModelSection)
    loss: LossSection = dataclasses.field(default_factory=LossSection)
    optimizer: OptimizerSection = dataclasses.field(default_factory=OptimizerSection)
    schedule: ScheduleSection = dataclasses.field(default_factory=ScheduleSection)
    training: TrainingSection = dataclasses.field(default_factory=TrainingSection)
    evaluation: EvaluationSection = dataclasses.field(default_factory=EvaluationSection)
    runtime: RuntimeSection = dataclasses.field(default_factory=RuntimeSection)


SECTIONS: dict[str, type] = {field.name: field.type for field in dataclasses.fields(Config)}  # type: ignore[misc]


def problems(config: Config) -> Iterator[tuple[str, str]]:
    """Every value out of range, as (dotted key, what was found and what is expected)."""
    for section_name in SECTIONS:
        for field_name, message in getattr(config, section_name).problems():
            yield f"{section_name}.{field_name}", message


def field_names(section: str) -> list[str]:
    """The fields of a section, in order of declaration."""
    return [field.name for field in dataclasses.fields(SECTIONS[section])]


def config_to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Plain nested dictionaries, as they are saved with the run and inside the checkpoint."""
    return dataclasses.asdict(config)


def config_from_dict(values: dict[str, dict[str, Any]]) -> Config:
    """The configuration that `config_to_dict` wrote; sections or fields that are missing keep their defaults.

    Raises:
        ValueError: a section or field that this version does not know.
    """
    config = Config()
    for section_name, fields in values.items():
        if section_name not in SECTIONS:
            raise ValueError(f"unknown configuration section {section_name!r}; known: {', '.join(SECTIONS)}")
        known = field_names(section_name)
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise ValueError(f"unknown key {section_name}.{unknown[0]} in a saved configuration")
        setattr(config, section_name, dataclasses.replace(getattr(config, section_name), **fields))
    return config
