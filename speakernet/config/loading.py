"""From configuration files and command line to a checked `Config`, and back to a saved copy.

Precedence: default < YAML files in the order given < command line. Types and bounds stand in the option dataclasses of
the rooms; this file adds what users need around them: old option names (`aliases.py`), errors with file, line and
nearest key, bare recipe names, and the one rule of defaults: a flat YAML, `--defaults voxceleb_trainer`, and its
checkpoint scored without a configuration start from voxceleb_trainer's, everything else from ours; what a model file
that training starts from says of its network comes before both.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import speakernet
from speakernet.config.aliases import ALIASES, CLASSIC_DEFAULTS, MODE_FLAGS
from speakernet.config.composing import Setting, compose
from speakernet.config.schema import CHOICES, SECTIONS, Config, config_to_dict, known_fields
from speakernet.config.yaml_lines import ConfigError, Entry, read_entries
from speakernet.files import atomic_write
from speakernet.options import annotations, field_names, is_input, words_of
from speakernet.registry import nearest, suggestion
from speakernet.run_folder import CONFIG

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


def load_config(
    arguments: Sequence[str],
    is_classic_checkpoint: Callable[[Path], bool] = lambda path: False,
    settings_of_model: Callable[[Path], Mapping[str, Any]] = lambda path: {},
) -> LoadedConfig:
    """Read `--config FILE` (repeatable, later wins), `--defaults NAME` and every other option of the command line.

    Args:
        arguments: the command line.
        is_classic_checkpoint: whether a file is a checkpoint of voxceleb_trainer; asked only of the model that is
            scored without a configuration file.
        settings_of_model: what a model file says of its network, as dotted keys and values; asked only of the model
            that training starts from. It holds where nobody says otherwise.

    Raises:
        ConfigError: unknown key, wrong type, value out of bounds, an option that nothing chosen takes, unreadable file;
            the message names file and line.
    """
    config_names, defaults, options = _split_command_line(arguments)
    files = tuple(find_config(name) for name in config_names)
    layers = [read_entries(file) for file in files]
    is_classic, why = _choose_defaults(defaults, files, layers, options)
    scored = "" if defaults or files else _scored_model(options)
    if scored and is_classic_checkpoint(Path(scored)):
        is_classic, why = True, f"{scored} is its checkpoint"
    settings = _settings_of(layers, files, options, is_classic)
    evaluate_only = any(setting.value for setting in settings if setting.key == "eval")
    settings = [_with_its_word(setting) for setting in settings if setting.key not in MODE_FLAGS]
    copies = [
        number
        for number, (file, entries) in enumerate(zip(files, layers, strict=True))
        if _is_copy_of_a_run(file, entries)
    ]
    settings = _without_folders_of_other_lists(settings, copies)
    given = frozenset(setting.key for setting in settings)
    defaults_of_origin = dict(CLASSIC_DEFAULTS) if is_classic else {}
    if is_classic and "schedule.decay_interval" not in given:
        # voxceleb_trainer's StepLR decays every test_interval epochs
        intervals = [setting.value for setting in settings if setting.key == "training.test_interval"]
        defaults_of_origin["schedule.decay_interval"] = [CLASSIC_DEFAULTS["training.test_interval"], *intervals][-1]
    initial = [str(setting.value) for setting in settings if setting.key == "training.initial_model"][-1:]
    if initial and initial[0] and not evaluate_only:
        defaults_of_origin |= _of_chosen_parts(settings_of_model(Path(initial[0])), settings)
    config = compose(settings, defaults_of_origin)
    if not config.training.save_path:
        config.training.save_path = _run_folder(files, layers)
    described = f"{CLASSIC if is_classic else OURS}'s ({why})"
    return LoadedConfig(config, files, is_classic, evaluate_only, given, described)


def _settings_of(
    layers: Sequence[list[Entry]], files: Sequence[Path], options: list[Entry], is_classic: bool
) -> list[Setting]:
    """What every layer sets, the command line last; inputs of a file are looked for beside it too."""
    settings: list[Setting] = []
    for number, entries in enumerate([*layers, options]):
        is_file = number < len(layers)
        is_flat = not any(map(_is_sectioned, entries)) if is_file else is_classic
        is_old_copy = is_file and _is_old_copy(entries)
        for entry in _without_idle_end(entries) if is_old_copy else entries:
            for setting in _translate(entry):
                placed = dataclasses.replace(setting, layer=number, is_forgiven=is_flat or is_old_copy)
                settings.append(_found_beside(placed, files[number]) if is_file else placed)
    return settings


def _of_chosen_parts(own: Mapping[str, Any], settings: Sequence[Setting]) -> dict[str, Any]:
    """What a model file says, less the options of parts in whose place somebody has named another one."""
    said = {setting.key: str(setting.value) for setting in settings}
    kept = {}
    for key, value in own.items():
        choice = CHOICES.get(Setting(key, value, "").place, "")
        if said.get(choice, "auto") in ("auto", own.get(choice)):
            kept[key] = value
    return kept


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
        if candidate.exists() and not candidate.is_dir():
            raise ConfigError(f"{candidate}: not a regular file; give a configuration that lies on a disk")
    recipes = [recipe.relative_to(folder).as_posix() for recipe in sorted(folder.rglob("*.yaml"))]
    raise ConfigError(f"no configuration {name!r} in the working directory or in configs/; {suggestion(name, recipes)}")


def recipe_folder() -> Path:
    """Where the recipes lie: `configs/` of the checkout, or `speakernet/recipes` of an installed wheel."""
    package = Path(speakernet.__file__).resolve().parent
    checkout = package.parent / "configs"
    return checkout if (checkout / "exp01.yaml").is_file() else package / "recipes"


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration as YAML, atomically, so that it means the same from any folder.

    Inputs are named from the root, and the run folder not at all: it is the folder that the file lies in, also that of
    a copy.
    """
    with atomic_write(path) as file:
        yaml.safe_dump(portable(config), file, sort_keys=False, allow_unicode=True)


def portable(config: Config) -> dict[str, dict[str, Any]]:
    """The configuration as plain values that do not depend on the working directory or on the run folder's name."""
    values = config_to_dict(config)
    del values["training"]["save_path"]
    for section, fields in values.items():
        owner = type(getattr(config, section))
        for name, value in fields.items():
            if value and is_input(owner, name):
                fields[name] = str(Path(value).absolute())
    return values


def _split_command_line(arguments: Sequence[str]) -> tuple[list[str], str, list[Entry]]:
    """The `--config` names, `--defaults`, and the other options as entries; a flag without a value counts as true."""
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
    return configs, defaults, entries


def _choose_defaults(
    asked: str, files: Sequence[Path], layers: Sequence[list[Entry]], options: Sequence[Entry]
) -> tuple[bool, str]:
    """Whether voxceleb_trainer's defaults hold, and why; among files the first that says something decides."""
    if asked:
        return asked == CLASSIC, "--defaults"
    for file, entries in zip(files, layers, strict=True):
        if entries:
            is_flat = not any(map(_is_sectioned, entries))
            return is_flat, f"{file} is {'flat' if is_flat else 'in sections'}"
    names = [entry.key[0] for entry in options if len(entry.key) == 1]
    if any(name in ALIASES and ALIASES[name].is_classic for name in names):
        return False, f"for that code's: --defaults {CLASSIC}"
    return False, "nothing says otherwise"


def _scored_model(options: Sequence[Entry]) -> str:
    """The file that `--eval --initial_model FILE` scores; empty where nothing is scored."""
    settings = [setting for entry in options for setting in _translate(entry)]
    models = [str(setting.value) for setting in settings if setting.key == "training.initial_model"]
    return models[-1] if models and any(setting.value for setting in settings if setting.key == "eval") else ""


def _is_sectioned(entry: Entry) -> bool:
    # `model: ResNetSE34L` is an old flat name, `model:` with lines below it (or with nothing) is our section.
    return entry.key[0] in SECTIONS and (len(entry.key) == 2 or entry.value in (None, {}))


def _found_beside(setting: Setting, file: Path) -> Setting:
    """An input that is not there from the working directory, but is from the folder of the file that names it."""
    if setting.section not in SECTIONS or setting.option not in field_names(SECTIONS[setting.section]):
        return setting
    if not is_input(SECTIONS[setting.section], setting.option) or not isinstance(setting.value, str):
        return setting
    beside = file.parent / setting.value
    try:
        is_beside = bool(setting.value) and not Path(setting.value).exists() and beside.exists()
    except OSError as error:
        shown = f"{setting.value[:40]!r} of {len(setting.value):,} letters"
        raise ConfigError(f"{setting.where}: {setting.key} is {shown}; expected a path ({error.strerror})") from error
    return dataclasses.replace(setting, value=str(beside)) if is_beside else setting


def _run_folder(files: Sequence[Path], layers: Sequence[list[Entry]]) -> str:
    """Where a run is kept that names no save_path: beside its own saved configuration, else by the first file."""
    if files and _is_copy_of_a_run(files[0], layers[0]):
        return str(files[0].parent)
    return str(Path("exps") / (files[0].stem if files else "exp1"))


def _is_copy_of_a_run(file: Path, entries: Sequence[Entry]) -> bool:
    """Whether a file is the configuration that a run saved of itself, with everything resolved."""
    # A recipe may name every section too, so the name tells a run's own copy apart.
    return file.name == CONFIG and {entry.key[0] for entry in entries} >= set(SECTIONS)


def _without_folders_of_other_lists(settings: Sequence[Setting], copies: Sequence[int]) -> list[Setting]:
    """The settings without each folder that a run saved beside a list, where a later layer names another list alone.

    The copy of a run names every folder, also those that nobody gave: the folder of one list says nothing of another.
    """
    last = {setting.key: setting for setting in settings}
    kept = []
    for setting in settings:
        is_folder_of_a_copy = setting.layer in copies and setting.key.endswith("_path") and last[setting.key] is setting
        named = last.get(f"{setting.key.removesuffix('_path')}_list") if is_folder_of_a_copy and setting.value else None
        is_named_later = named is not None and named.layer > setting.layer
        own = {one.value for one in settings if named and (one.key, one.layer) == (named.key, setting.layer)}
        # The same list under its own name keeps its folder; a copy names lists from the root.
        if named and is_named_later and str(Path(str(named.value)).absolute()) not in own:
            logger.info("%s: another list than %s, whose folder is left aside", named.where, ", ".join(map(str, own)))
        else:
            kept.append(setting)
    return kept


def _is_old_copy(entries: list[Entry]) -> bool:
    """Whether a file is the config.yaml of a run of before 0.2: it holds the options of all parts, chosen or not.

    Nobody writes options of a triplet loss, of a learned scale and of the polynomial schedule into one file by hand.
    """
    of_several_parts = {("loss", "hard_rank"), ("loss", "initial_scale"), ("schedule", "power")}
    return {entry.key for entry in entries} >= of_several_parts


def _without_idle_end(entries: list[Entry]) -> list[Entry]:
    """Those of an old copy as they acted: `exponential` fell by `decay`, whatever final_learning_rate said."""
    if any(entry.key == ("schedule", "name") and entry.value == "exponential" for entry in entries):
        return [entry for entry in entries if entry.key != ("schedule", "final_learning_rate")]
    return entries


def _translate(entry: Entry) -> list[Setting]:
    """One entry as settings of dotted keys.

    Raises:
        ConfigError: neither a section's key nor an old name.
    """
    first = entry.key[0]
    dotted = ".".join(entry.key)
    if len(entry.key) == 1 and first in MODE_FLAGS:
        return [Setting(first, _as_bool(entry), entry.where)]
    if len(entry.key) == 1 and first in ALIASES and not _is_sectioned(entry):
        alias = ALIASES[first]
        try:
            targets = alias.convert(entry.value)
        except ValueError as error:
            raise ConfigError(f"{entry.where}: {first}: {error}") from error
        return [Setting(key, value, entry.where) for key, value in targets.items()]
    if first in SECTIONS and len(entry.key) == 2:
        field = entry.key[1]
        known = known_fields(first)
        if field.split(".", 1)[0] in known:
            return [Setting(dotted, entry.value, entry.where)]
        raise ConfigError(f"{entry.where}: unknown key {dotted}; {_elsewhere(field) or suggestion(field, known)}")
    if _is_sectioned(entry):
        return []
    if first in SECTIONS:
        raise ConfigError(f"{entry.where}: section {first} holds {entry.value!r}; expected `key: value` lines below it")
    everything = [
        *ALIASES,
        *MODE_FLAGS,
        *SECTIONS,
        *(f"{name}.{field}" for name in SECTIONS for field in known_fields(name)),
    ]
    near = suggestion(dotted, everything) if nearest(dotted, everything) else "--help all lists every option"
    raise ConfigError(f"{entry.where}: unknown key {dotted}; {_elsewhere(entry.key[-1]) or near}")


def _elsewhere(field: str) -> str:
    """Where an option of this very name is; empty where there is none."""
    homes = [f"{section}.{field}" for section in SECTIONS if field in known_fields(section)]
    return f"did you mean {' or '.join(map(repr, homes))}?" if homes else ""


def _as_bool(entry: Entry) -> bool:
    if isinstance(entry.value, bool):
        return entry.value
    if str(entry.value).casefold() in ("true", "false"):
        return str(entry.value).casefold() == "true"
    raise ConfigError(f"{entry.where}: {entry.key[0]} is {entry.value!r}; expected true or false")


def _with_its_word(setting: Setting) -> Setting:
    """YAML reads an unquoted `off` or `no` as False; where the field knows such words they are meant."""
    if not isinstance(setting.value, bool):
        return setting
    section, _, field = setting.key.partition(".")
    declared = annotations(SECTIONS[section]).get(field)
    choices = () if declared in (None, bool) else words_of(declared)
    words = ("on", "yes") if setting.value else ("off", "no")
    meant = [word for word in words if word in choices]
    return dataclasses.replace(setting, value=meant[0]) if meant else setting
