"""From settings to the sections: which part each section names, whose options hold, and what has no effect.

A setting is one dotted key with a value and the place where it stands. Settings come in layers (files in their order,
then the command line); a later layer wins. No option is silently without effect: one that the chosen part does not take
is refused, except where a later layer has replaced the part it was meant for, or where a file that was written for
another program (or by an earlier version) gives the options of all parts.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from speakernet.config.schema import (
    CHOICES,
    NESTED,
    PARTS,
    TABLES,
    Config,
    Names,
    chosen,
    has_nested,
    names_in,
    nested_owner,
    owner_of,
    problems,
    sections_of,
    takers,
)
from speakernet.config.yaml_lines import ConfigError, value_in_line
from speakernet.options import OptionError, annotations, checked, field_names, in_words
from speakernet.registry import suggestion

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One value that somebody gave."""

    key: str
    """Dotted: section and option, or a field such as `model.options` and an option of the part that it is for."""
    value: Any
    where: str
    """File and line, or the option of the command line."""
    layer: int = 0
    is_forgiven: bool = False
    """Whether it is warned about, not refused, where it has no effect."""

    @property
    def section(self) -> str:
        """The first part of the key."""
        return self.key.partition(".")[0]

    @property
    def option(self) -> str:
        """The rest of the key."""
        return self.key.partition(".")[2]

    @property
    def place(self) -> str:
        """Where the part is chosen that may take this option."""
        nested = _nested(self.key)
        return NESTED[nested[0]] if nested else self.section


def compose(settings: Sequence[Setting], defaults: Mapping[str, Any]) -> Config:
    """The configuration that the settings mean.

    Args:
        settings: in order of their layers; a later one wins.
        defaults: dotted key to value where nobody gives one (another program's); what no chosen part takes is left out.

    Raises:
        ConfigError: an unknown name, a value of the wrong type or out of bounds, an option without effect, values that
            contradict each other; each with its place.
    """
    settings = [one for setting in settings for one in _flattened(setting)]
    base = names_in({}) | {place: defaults[key] for place, key in CHOICES.items() if key in defaults}
    names, replaced_in = _chosen_names(settings, base)
    values: dict[str, dict[str, Any]] = {}
    for key, value in defaults.items():
        if _is_taken(key, names):
            _put(values, key, value)
    dropped: list[Setting] = []
    idle: list[Setting] = []
    for setting in settings:
        was_for_another = setting.layer < replaced_in.get(setting.place, -1)
        if setting.section in TABLES:
            # With its section's part a part within it goes too. (A model's pooling may be the next model's as well.)
            was_for_another |= setting.layer < replaced_in[setting.section]
        if was_for_another and _nested(setting.key) and setting.key not in CHOICES.values():
            # 32 channels of one network are not 32 channels of another, though both take the option.
            dropped.append(setting)
        elif _is_taken(setting.key, names):
            _put(values, setting.key, _checked(setting, names))
        elif was_for_another:
            dropped.append(setting)
        elif setting.is_forgiven:
            idle.append(setting)
        else:
            raise ConfigError(f"{setting.where}: {_why_idle(setting, names)}")
    _warn(dropped, idle, names)
    config = sections_of(values, names)
    _check_together(config, settings)
    return config


def _flattened(setting: Setting) -> list[Setting]:
    """`model.options` (or its like) with a mapping as one setting for each of its keys."""
    if setting.key not in NESTED:
        return [setting]
    given = _plain(setting.value, setting.where)
    if not isinstance(given, dict):
        raise ConfigError(f"{setting.where}: {setting.key} is {given!r}; expected `option: value` pairs")
    return [dataclasses.replace(setting, key=f"{setting.key}.{key}", value=value) for key, value in given.items()]


def _nested(key: str) -> tuple[str, str] | None:
    """Field of NESTED and option of a key such as `model.options.channels`."""
    field, _, option = key.rpartition(".")
    return (field, option) if field in NESTED else None


def _chosen_names(settings: Sequence[Setting], base: Names) -> tuple[dict[str, str], dict[str, int]]:
    """Place -> name of the part chosen there, and -> the layer that last replaced that part."""
    names = dict(base)
    place_of = {key: place for place, key in CHOICES.items()}
    said: dict[str, str] = {}
    replaced_in = dict.fromkeys(names, -1)
    for layer in sorted({setting.layer for setting in settings}):
        before = {place: chosen(names, place) for place in names}
        for setting in settings:
            if setting.layer == layer and setting.key in place_of:
                names[place_of[setting.key]] = str(setting.value)
                said[place_of[setting.key]] = setting.where
        for place, key in CHOICES.items():
            try:
                now = chosen(names, place)
            except ValueError as error:
                raise ConfigError(f"{said.get(place, 'default')}: {key}: {error}") from error
            if now != before[place]:
                replaced_in[place] = layer
    return names, replaced_in


def _is_taken(key: str, names: Names) -> bool:
    section, _, option = key.partition(".")
    if nested := _nested(key):
        return has_nested(nested[0], names) and nested[1] in field_names(nested_owner(nested[0], names))
    return option in field_names(owner_of(section, names))


def _checked(setting: Setting, names: Names) -> Any:
    owner, option = owner_of(setting.section, names), setting.option
    if nested := _nested(setting.key):
        owner, option = nested_owner(nested[0], names), nested[1]
    is_text = in_words(annotations(owner)[option]) == "text"
    try:
        return checked(owner, option, setting.value if is_text else _plain(setting.value, setting.where))
    except OptionError as error:
        raise ConfigError(f"{setting.where}: {setting.key} {error}") from error


def _plain(value: Any, where: str) -> Any:
    """Text of the command line as YAML would read it: lists, numbers, nothing."""
    if not isinstance(value, str) or not value.startswith(("[", "{")):
        return None if value in ("null", "~") else value
    return value_in_line(value, where)


def _put(values: dict[str, dict[str, Any]], key: str, value: Any) -> None:
    section, _, option = key.partition(".")
    if nested := _nested(key):
        values.setdefault(section, {}).setdefault(nested[0].partition(".")[2], {})[nested[1]] = value
    else:
        values.setdefault(section, {})[option] = value


def _why_idle(setting: Setting, names: Names) -> str:
    nested = _nested(setting.key)
    if nested and has_nested(nested[0], names):
        own = [name for name in field_names(nested_owner(nested[0], names)) if name != "name"]
        kind = PARTS[setting.place][0]
        has = suggestion(nested[1], own) if own else "it has none"
        return (
            f"{setting.key} has no effect: the {kind} {chosen(names, setting.place)} has no option {nested[1]!r}; {has}"
        )
    if setting.section not in PARTS:
        # A file may write a name with a dot below a section.
        return f"{setting.key} is no option; a name in a section has no dot"
    kind = PARTS[setting.section][0]
    takes = ", ".join(takers(setting.section, setting.option.partition(".")[0]))
    return (
        f"{setting.key} has no effect: the {kind} {chosen(names, setting.section)} does not take it "
        f"({takes} would); remove it, or choose another {setting.section}.name"
    )


def _warn(dropped: Sequence[Setting], idle: Sequence[Setting], names: Names) -> None:
    if dropped:
        listed = ", ".join(f"{setting.key} ({setting.where})" for setting in dropped)
        parts = ", ".join(sorted({f"{one.place} is {chosen(names, one.place)}" for one in dropped}))
        logger.warning("left out, because a later file or option has chosen another part (%s): %s", parts, listed)
    for setting in idle:
        logger.warning("%s: %s", setting.where, _why_idle(setting, names))


def _check_together(config: Config, settings: Sequence[Setting]) -> None:
    found = list(problems(config))
    if not found:
        return
    where = {setting.key: setting.where for setting in settings}
    raise ConfigError("\n".join(f"{where.get(key, 'default')}: {key}: {message}" for key, message in found))
