"""From configuration files and command line to a checked `Config`, and back to a saved copy.

Precedence: default < YAML files in the order given < command line. The parsing of types and the help text are
jsonargparse's; this file adds what users need around it: old option names (`aliases.py`), errors with file, line and
nearest key, bare recipe names, and the one rule of defaults: a flat YAML, `--defaults voxceleb_trainer`, and its
checkpoint scored without a configuration start from voxceleb_trainer's, everything else from ours.
"""

import dataclasses
import logging
import re
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import jsonargparse
import yaml

import speakernet
from speakernet.config.aliases import ALIASES, CLASSIC_DEFAULTS, MODE_FLAGS
from speakernet.config.schema import SECTIONS, Config, config_to_dict, field_names, problems
from speakernet.config.yaml_lines import ConfigError, Entry, read_entries
from speakernet.files import atomic_write
from speakernet.registry import nearest, suggestion

logger = logging.getLogger(__name__)

COMMAND_LINE = "command line"
OURS, CLASSIC = "speakernet", "voxceleb_trainer"


@dataclasses.dataclass(frozen=True)
class LoadedConfig:
    """A checked configuration and where it came from."""

    config: Config
    files: tuple[Path, ...]
    """The configuration files, in order."""
    is_classic: bool
    """Whether the defaults are voxceleb_trainer's."""
    evaluate_only: bool
    """Whether `--eval` (or `eval: true`) was given."""
    given: frozenset[str]
    """The dotted keys that were set by a file or on the command line."""
    defaults: str
    """Which defaults hold, and why; for the log."""


@dataclasses.dataclass(frozen=True)
class _Setting:
    key: str
    value: Any
    where: str


def load_config(
    arguments: Sequence[str], is_classic_checkpoint: Callable[[Path], bool] = lambda path: False
) -> LoadedConfig:
    """Read `--config FILE` (repeatable, later wins) and every other option of the command line.

    Args:
        arguments: the command line.
        is_classic_checkpoint: whether a file is a checkpoint of voxceleb_trainer; asked only of the model that is
            scored without a configuration file.

    Raises:
        ConfigError: unknown key, wrong type, value out of range, unreadable file; the message names file and line.
    """
    config_names, options, defaults = _split_command_line(arguments)
    files = tuple(find_config(name) for name in config_names)
    entries_by_file = [read_entries(file) for file in files]
    settings: list[_Setting] = []
    for entries in entries_by_file:
        settings += [setting for entry in entries for setting in _translate(entry)]
    settings += [setting for entry in options for setting in _translate(entry)]
    evaluate_only = any(setting.value for setting in settings if setting.key == "eval")
    settings = [_with_its_word(setting) for setting in settings if setting.key not in MODE_FLAGS]
    models = [str(setting.value) for setting in settings if setting.key == "training.initial_model"]
    scored = Path(models[-1]) if evaluate_only and models and not files else None
    is_classic, why = _choose_defaults(defaults, files, entries_by_file, options)
    if not defaults and scored is not None and is_classic_checkpoint(scored):
        is_classic, why = True, f"{scored} is its checkpoint"
    config = _build(settings, CLASSIC_DEFAULTS if is_classic else {})
    _check_ranges(config, settings)
    if not config.training.save_path:
        stem = files[0].stem if files else "exp1"
        config.training.save_path = str(Path("exps") / stem)
    given = frozenset(setting.key for setting in settings)
    if is_classic and "schedule.decay_interval" not in given:
        # voxceleb_trainer's StepLR decays every test_interval epochs
        config.schedule.decay_interval = config.training.test_interval
    described = f"{CLASSIC if is_classic else OURS}'s ({why})"
    return LoadedConfig(config, files, is_classic, evaluate_only, given, described)


def find_config(name: str) -> Path:
    """A configuration by path, or by bare name in the recipes that come with speakernet; `.yaml` may be left out.

    Raises:
        ConfigError: no such file; the message names the nearest recipes.
    """
    candidates = [Path(name), Path(name + ".yaml")]
    folder = recipe_folder()
    candidates += [folder / candidate for candidate in candidates]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    recipes = [recipe.relative_to(folder).as_posix() for recipe in sorted(folder.rglob("*.yaml"))]
    raise ConfigError(f"no configuration {name!r} in the working directory or in configs/; {suggestion(name, recipes)}")


def recipe_folder() -> Path:
    """Where the recipes lie: `configs/` of the checkout, or `speakernet/recipes` of an installed wheel."""
    package = Path(speakernet.__file__).resolve().parent
    checkout = package.parent / "configs"
    return checkout if (checkout / "exp01.yaml").is_file() else package / "recipes"


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration as YAML, atomically."""
    with atomic_write(path) as file:
        yaml.safe_dump(config_to_dict(config), file, sort_keys=False, allow_unicode=True)


def help_text() -> str:
    """All options by section with their meaning, type and default, then the old names that are understood."""
    # jsonargparse offers a file for each section, which `load_config` does not take
    options = re.sub(r"\n +--\w+ CONFIG +Path to a configuration file\.", "", _parser().format_help())
    lines = [
        f"--defaults {OURS} or {CLASSIC}: where omitted options start from; without it a flat YAML means {CLASSIC}'s, "
        "and so does its",
        "checkpoint that is scored (--eval --initial_model FILE) without --config; everything else means ours.",
        "",
        "Options (YAML: section, then key; command line: --section.key VALUE):",
        options,
    ]
    lines.append("Other names that are understood, in flat YAML files and on the command line:")
    for name, alias in sorted(ALIASES.items(), key=lambda item: item[0].casefold()):
        lines.append(f"  --{name:<32} {alias.describes}")
    return "\n".join(lines)


def _parser() -> jsonargparse.ArgumentParser:
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(exit_on_error=False, add_help=False, usage=jsonargparse.SUPPRESS)
    for name, section in SECTIONS.items():
        parser.add_class_arguments(section, name)
    return parser


def _split_command_line(arguments: Sequence[str]) -> tuple[list[str], list[Entry], str]:
    """The `--config` names, the other options as entries (a flag without a value counts as true), and `--defaults`."""
    configs: list[str] = []
    defaults = ""
    entries: list[Entry] = []
    remaining = list(arguments)
    while remaining:
        option = remaining.pop(0)
        if not option.startswith("--") or option == "--":
            raise ConfigError(f"found {option!r} on the command line where an option such as --config was expected")
        name, has_value, value = option[2:].partition("=")
        if not has_value:
            takes_next = bool(remaining) and not remaining[0].startswith("--")
            value = remaining.pop(0) if takes_next else None  # type: ignore[assignment]
        if name == "config":
            if not value:
                raise ConfigError("--config needs a file name")
            configs.append(value)
            continue
        if name == "defaults":
            if value not in (OURS, CLASSIC):
                raise ConfigError(f"{COMMAND_LINE}: --defaults is {value!r}; expected {OURS} or {CLASSIC}")
            defaults = value
            continue
        name = name if name in ALIASES else name.replace("-", "_")
        parsed = True if value is None else value
        entries.append(Entry(tuple(name.split(".", 1)), parsed, f"{COMMAND_LINE}: --{name}"))
    return configs, entries, defaults


def _choose_defaults(
    asked: str, files: Sequence[Path], entries_by_file: Iterable[list[Entry]], options: list[Entry]
) -> tuple[bool, str]:
    """Whether voxceleb_trainer's defaults hold, and why; among files the first that says something decides."""
    if asked:
        return asked == CLASSIC, "--defaults"
    for file, entries in zip(files, entries_by_file, strict=True):
        if entries:
            is_flat = not any(_is_sectioned(entry) for entry in entries)
            return is_flat, f"{file} is {'flat' if is_flat else 'in sections'}"
    names = [entry.key[0] for entry in options if len(entry.key) == 1]
    if any(name in ALIASES and ALIASES[name].is_classic for name in names):
        return False, f"for that code's: --defaults {CLASSIC}"
    return False, "nothing says otherwise"


def _is_sectioned(entry: Entry) -> bool:
    # `model: ResNetSE34L` is an old flat name, `model:` with lines below it (or with nothing) is our section.
    return entry.key[0] in SECTIONS and (len(entry.key) == 2 or entry.value in (None, {}))


def _translate(entry: Entry) -> list[_Setting]:
    """One entry as settings of dotted keys.

    Raises:
        ConfigError: neither a section's key nor an old name.
    """
    first = entry.key[0]
    dotted = ".".join(entry.key)
    if len(entry.key) == 1 and first in MODE_FLAGS:
        return [_Setting(first, _as_bool(entry), entry.where)]
    if len(entry.key) == 1 and first in ALIASES and not _is_sectioned(entry):
        alias = ALIASES[first]
        try:
            targets = alias.convert(entry.value)
        except ValueError as error:
            raise ConfigError(f"{entry.where}: {first}: {error}") from error
        return [_Setting(key, value, entry.where) for key, value in targets.items()]
    if first in SECTIONS and len(entry.key) == 2:
        field = entry.key[1]
        known = field_names(first)
        if field.split(".", 1)[0] in known:
            return [_Setting(dotted, entry.value, entry.where)]
        raise ConfigError(f"{entry.where}: unknown key {dotted}; {suggestion(field, known)}")
    if _is_sectioned(entry):
        return []
    if first in SECTIONS:
        raise ConfigError(f"{entry.where}: section {first} holds {entry.value!r}; expected `key: value` lines below it")
    everything = [
        *ALIASES,
        *MODE_FLAGS,
        *SECTIONS,
        *(f"{name}.{field}" for name in SECTIONS for field in field_names(name)),
    ]
    hint = suggestion(dotted, everything) if nearest(dotted, everything) else "--help lists every option"
    raise ConfigError(f"{entry.where}: unknown key {dotted}; {hint}")


def _as_bool(entry: Entry) -> bool:
    if isinstance(entry.value, bool):
        return entry.value
    if str(entry.value).casefold() in ("true", "false"):
        return str(entry.value).casefold() == "true"
    raise ConfigError(f"{entry.where}: {entry.key[0]} is {entry.value!r}; expected true or false")


def _build(settings: list[_Setting], defaults: dict[str, Any]) -> Config:
    """Types checked by jsonargparse, all at once; where that fails, key by key, to say which one it is."""
    parser = _parser()
    nested: dict[str, dict[str, Any]] = {}
    for key, value in defaults.items():
        _insert(nested, key, value)
    for setting in settings:
        _insert(nested, setting.key, setting.value)
    try:
        parsed = parser.parse_object(nested)
    except (jsonargparse.ArgumentError, TypeError, ValueError):
        for setting in settings:
            _check_type(parser, setting)
        raise
    return Config(**{name: section(**vars(parsed[name])) for name, section in SECTIONS.items()})


def _with_its_word(setting: _Setting) -> _Setting:
    """YAML reads an unquoted `off` or `no` as False; where the field knows such words they are meant."""
    words = ("on", "yes") if setting.value else ("off", "no")
    choices = typing.get_args(_declared_type(setting.key))
    meant = [word for word in words if word in choices and bool not in choices]
    return dataclasses.replace(setting, value=meant[0]) if isinstance(setting.value, bool) and meant else setting


def _declared_type(key: str) -> Any:
    section, _, field = key.partition(".")
    return {one.name: one.type for one in dataclasses.fields(SECTIONS[section])}[field.split(".")[0]]


def _insert(nested: dict[str, dict[str, Any]], key: str, value: Any) -> None:
    section, _, field = key.partition(".")
    field, _, inner = field.partition(".")
    fields = nested.setdefault(section, {})
    if inner:
        # One option of a dictionary field, such as model.options.width, leaves its neighbours as they are.
        fields[field] = {**(fields.get(field) or {}), inner: _plain(value)}
    else:
        fields[field] = value


def _plain(value: Any) -> Any:
    return yaml.safe_load(value) if isinstance(value, str) else value


def _check_type(parser: jsonargparse.ArgumentParser, setting: _Setting) -> None:
    nested: dict[str, dict[str, Any]] = {}
    _insert(nested, setting.key, setting.value)
    try:
        parser.parse_object(nested)
    except (jsonargparse.ArgumentError, TypeError, ValueError) as error:
        expected = _expected(_declared_type(setting.key))
        raise ConfigError(f"{setting.where}: {setting.key} is {setting.value!r}; expected {expected}") from error


def _expected(declared: Any) -> str:
    """A field's type in words: `int`, `auto or fp16`, `float or nothing`."""
    if typing.get_origin(declared) is Literal:
        return " or ".join(str(choice) for choice in typing.get_args(declared))
    if typing.get_origin(declared) in (typing.Union, types.UnionType):
        return " or ".join(_expected(one) for one in typing.get_args(declared))
    if declared is type(None):
        return "nothing"
    return declared.__name__ if type(declared) is type else str(declared)


def _check_ranges(config: Config, settings: list[_Setting]) -> None:
    found = list(problems(config))
    if not found:
        return
    where = {setting.key: setting.where for setting in settings}
    lines = [f"{where.get(key, 'default')}: {key}: {message}" for key, message in found]
    raise ConfigError("\n".join(lines))
