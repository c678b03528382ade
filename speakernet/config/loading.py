"""Load a checked `Config` from configuration files and the command line, and save a copy.

Precedence: default < YAML files in the order given < command line. Each value is a `Setting` that
knows its file and line. A flat YAML is a configuration of voxceleb_trainer and is converted
(`classic.convert`), as are `--defaults voxceleb_trainer` and scoring its checkpoint without a
configuration; an initial model defines the network. No option is silently ignored: one that the
chosen component does not take is refused, unless a later layer replaced the component it was meant
for, or the file was written for another program.
"""

import contextlib
import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import speakernet
from speakernet.config.aliases import (
    ADVICE,
    ALIASES,
    CHANGED_TRAINING,
    CLASSIC_NAMES,
    MODE_FLAGS,
    REMOVED,
    TYPOS,
    WESPEAKER,
    translate,
)
from speakernet.config.classic import convert, differing_defaults
from speakernet.config.schema import (
    CHOICES,
    DEFAULT_NAMES,
    SECTIONS,
    Config,
    Names,
    chosen,
    config_from_dict,
    known_fields,
    owner_of,
    problems,
    split_key,
    without_removed,
)
from speakernet.files import (
    MAX_YAML,
    FileError,
    atomic_write,
    is_address,
    open_text,
    reading,
    yaml_nodes,
    yaml_value,
)
from speakernet.options import (
    OUTSIDE,
    OptionError,
    Options,
    alternatives,
    is_input,
    nearest,
    suggestion,
)
from speakernet.run_folder import CONFIG

logger = logging.getLogger(__name__)

COMMAND_LINE = "command line"
READ_TO_REFUSE = {*CHOICES, "training.stages", "training.trackers"}
"""Options whose values may contain what `REMOVED` lists; on the command line they are text."""
OURS = "speakernet"
CLASSIC = "voxceleb_trainer"
BEGINS_AS_JSON = re.compile(r'\s*(?://[^\n]*\s*)*\{\s*(?:"|//|\})')
"""JSON is recognised by its beginning, because many programs call it .conf or .cfg."""
CHECKPOINT = "{} is its checkpoint"
"""Why the defaults are voxceleb_trainer's when one of its checkpoints is scored alone."""
COMMENT = re.compile(r'("(?:[^"\\\n]|\\.)*")|//.*')
"""A comment in JSON, or a string, which is kept."""
_PACKAGE = Path(speakernet.__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent / "configs"
RECIPES = _CHECKOUT if (_CHECKOUT / "exp01.yaml").is_file() else _PACKAGE / "recipes"
"""The folder of the recipes: `configs/` of the checkout, or `speakernet/recipes` of an installed
wheel."""


class ConfigError(FileError):
    """An error in a configuration; the message says where, what was found and what is expected."""


class Setting(NamedTuple):
    """One value given in a file or on the command line."""

    key: str
    """At first as written, later dotted: section and option, or `model.options` and an option of
    the model."""
    value: Any
    where: str
    """File and line, or the command line, with the option as written unless it is the dotted
    key."""
    layer: int = 0
    """Number of its file; the command line comes last."""
    is_implied: bool = False
    """Whether another program's configuration or the initial model means it; it may be without
    effect."""

    @property
    def is_sectioned(self) -> bool:
        """Whether the key is in our sections: `model:` with a block is, `model: ResNetSE34L` is an
        old flat name.
        """
        section, dot, _ = self.key.partition(".")
        return section in SECTIONS and (bool(dot) or self.value in (None, {}))


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
    """The dotted keys set in a file or on the command line."""
    defaults: str
    """Which defaults apply, and why; for the log."""
    assumed: str = ""
    """What a checkpoint does not show and no option sets; for the log."""


def load_config(
    arguments: Sequence[str],
    is_classic_checkpoint: Callable[[Path], bool] = lambda path: False,
    settings_of_model: Callable[[Path], Mapping[str, Any]] = lambda path: {},
) -> LoadedConfig:
    """Read `--config FILE` (repeatable, later wins), `--defaults NAME` and all other options of a
    command line.
    """
    config_names, asked, options = _split_command_line(arguments)
    files = tuple(map(find_config, config_names))
    layers = [_read_file(file) for file in files]
    numbered = list(enumerate(zip(files, layers, strict=True)))
    # Copies saved by a run. A recipe may also name every section, so the file name has to match
    # too.
    copies = {
        number
        for number, (file, layer) in numbered
        if file.name == CONFIG and {one.key.partition(".")[0] for one in layer} >= set(SECTIONS)
    }
    flat = {
        number for number, layer in enumerate(layers) if not any(one.is_sectioned for one in layer)
    }
    first = next((number for number, layer in enumerate(layers) if layer), None)
    is_classic = asked == CLASSIC
    why = "the default"
    if asked:
        why = "--defaults"
    elif first is not None:
        is_classic = first in flat
        why = f"{files[first]} {'has no' if is_classic else 'is divided into'} sections"
    elif any(setting.key in CLASSIC_NAMES for setting in options):
        why = f"use --defaults {CLASSIC} to get that program's"
    settings: list[Setting] = []
    for number, (file, layer) in numbered:
        for setting in layer:
            current = _of_this_version(setting) if number in copies else setting
            if current is not None:
                for translated in _translated(current._replace(layer=number)):
                    settings.append(_resolve_input(translated, file))
    for setting in options:
        settings += _translated(setting._replace(layer=len(files)))
    last = {setting.key: setting for setting in settings}
    is_scoring = _is_scoring(last, command_line=len(files))
    model = str(last["training.initial_model"].value) if "training.initial_model" in last else ""
    forgiven = flat | ({len(files)} if is_classic else set())
    is_model_alone = is_scoring and model and not files and not asked
    if is_model_alone and is_classic_checkpoint(Path(model)):
        is_classic = True
        why = CHECKPOINT.format(model)
        forgiven = {0}
    settings = _drop_folders_of_other_lists([one for one in settings if one.key != "eval"], copies)
    given = {setting.key: setting.value for setting in settings}
    implied = convert(given) if is_classic else {}
    if model and not is_scoring:
        implied |= _implied_by_model(settings_of_model(Path(model)), given)
    # The program's own default is off, but its published models have it on. `import-weights`
    # assumes the same.
    is_unsaid = why == CHECKPOINT.format(model) and "frontend.log_input" not in given
    if is_unsaid:
        implied["frontend.log_input"] = True
    filled_in = [
        Setting(key, value, "default", is_implied=True)
        for key, value in implied.items()
        if key not in given
    ]
    config = compose([*filled_in, *settings], forgiven)
    assumed = ""
    if is_unsaid and hasattr(config.frontend, "log_input"):
        assumed = (
            f"{model} was trained with log_input, which the checkpoint does not show (if "
            "not, give --log_input false)"
        )
    if not config.training.save_path:
        default = Path("exps") / (files[0].stem if files else "exp1")
        config.training.save_path = str(files[0].parent if 0 in copies else default)
    described = f"{CLASSIC if is_classic else OURS} ({why})"
    if is_classic and (differing := differing_defaults(config, given)):
        described += (
            f"; these differ from {OURS}'s (in brackets): {differing}; --defaults {OURS} "
            "selects those"
        )
    keys = frozenset(given)
    return LoadedConfig(config, files, is_classic, is_scoring, keys, described, assumed)


def _is_scoring(last: Mapping[str, Setting], *, command_line: int) -> bool:
    """Whether `eval` was given; options that scoring would ignore are refused.

    Args:
        last: key -> the setting that holds.
        command_line: number of the layer of the command line.
    """
    if "eval" not in last:
        return False
    wanted = last["eval"]
    value = str(wanted.value).casefold()
    if value not in ("true", "false"):
        raise ConfigError(f"{wanted.where}: eval is {wanted.value!r}; expected true or false")
    limit = last.get("evaluation.max_trials")
    # A file may be that of the training, whose validation it limits.
    if value == "true" and limit is not None and limit.layer == command_line:
        raise ConfigError(
            f"{limit.where}: {limit.value} would limit the validation trials of a training, but "
            "--eval scores every trial of the list; leave it out, or give a shorter list with "
            "--test_list"
        )
    return value == "true"


def _implied_by_model(
    of_model: Mapping[str, Any], given: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The settings of an initial model that apply: if the user chose another component, the model's
    options for the old one do not.
    """
    for key, value in of_model.items():
        holder = split_key(key)[0]
        choice = CHOICES.get("model.options" if holder == "model" else holder)
        name = "auto" if choice is None else str(given.get(choice.key, "auto"))
        if choice is None or name in ("auto", of_model.get(choice.key)):
            yield key, value


def find_config(name: str) -> Path:
    """Find a configuration by path, or by name among the recipes of speakernet; `.yaml` may be left
    out.
    """
    for candidate in (Path(name), Path(name + ".yaml"), RECIPES / name, RECIPES / (name + ".yaml")):
        if candidate.exists() and not candidate.is_dir():
            return candidate
    if not (RECIPES / Path(name).parent).is_dir() or Path(name).is_absolute():
        raise ConfigError(
            f"{name}: {'a folder' if Path(name).is_dir() else 'no such file'}; expected a "
            "configuration in YAML"
        )
    recipes = [recipe.relative_to(RECIPES).as_posix() for recipe in sorted(RECIPES.rglob("*.yaml"))]
    raise ConfigError(
        f"no configuration {name!r} in the working directory or in configs/; "
        f"{suggestion(name, recipes)}"
    )


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration as YAML, atomically.

    The file works from any working directory: inputs are absolute, and the run folder is the file's
    own. Modules with external components are copied next to it.
    """
    values = config.model_dump()
    del values["training"]["save_path"]
    for section, fields in values.items():
        owner = type(getattr(config, section))
        paths = [name for name, value in fields.items() if value and is_input(owner, name)]
        fields |= {
            name: str(Path(fields[name]).absolute())
            for name in paths
            if not is_address(fields[name])
        }
    for one in (*values["data"]["test_lists"].values(), *values["data"]["corpora"].values()):
        paths = [
            name
            for name in one
            if name.endswith(("list", "path")) and one[name] and not is_address(one[name])
        ]
        one |= {name: str(Path(one[name]).absolute()) for name in paths}
    for name, (text, _) in OUTSIDE.items():
        with atomic_write(path.with_name(f"{name}.py"), "wb") as copy:
            copy.write(text)
    with atomic_write(path) as file:
        yaml.safe_dump(values, file, sort_keys=False, allow_unicode=True)


def compose(settings: Sequence[Setting], forgiven: Collection[int] = ()) -> Config:
    """Compose a configuration from settings, in the order of their layers, on top of our defaults.

    A setting without effect is refused, or only warned about if its layer is `forgiven`.
    """
    implied = {setting.key: setting for setting in settings if setting.is_implied}
    names: Names = DEFAULT_NAMES | {
        holder: implied[choice.key].value
        for holder, choice in CHOICES.items()
        if choice.key in implied
    }
    chosen_in: dict[str, int] = {}
    """Holder -> the last layer that chose another component for it."""
    for layer in sorted({setting.layer for setting in settings}):
        own = {
            setting.key: setting
            for setting in settings
            if setting.layer == layer and not setting.is_implied
        }
        before = names
        names = {
            **names,
            **{one: str(own[c.key].value) for one, c in CHOICES.items() if c.key in own},
        }
        for holder, choice in CHOICES.items():
            try:
                chosen_in |= (
                    {holder: layer} if chosen(holder, names) != chosen(holder, before) else {}
                )
            except ValueError as error:
                # A model without the pooling that an earlier layer named.
                at = own.get(choice.key) or own["model.name"]
                raise ConfigError(f"{at.where}: {choice.key}: {error}") from error
    last = {one.key: one for one in settings}
    dropped = []
    owners: dict[str, type[Options]] = {}
    """Key -> the class with the option; options that the chosen components do not take are
    missing."""
    for key in last:
        holder, option = split_key(key)
        owner = owner_of(holder, names)
        if owner and option in owner.model_fields:
            owners[key] = owner
    placed: dict[str, Any] = {}
    for key, setting in last.items():
        holder, option = split_key(key)
        replaced = [
            one
            for one in (holder, holder.partition(".")[0])
            if not setting.is_implied and chosen_in.get(one, 0) > setting.layer
        ]
        # An option meant for one network does not apply to another, even if both take it.
        is_other = (
            holder in replaced
            and "." in holder
            and all(key != choice.key for choice in CHOICES.values())
        )
        if key in owners and not is_other:
            is_text = str in alternatives(owners[key].model_fields[option].annotation)
            placed[key] = setting.value if is_text else _read_text(setting)
        elif setting.is_implied:
            continue
        elif replaced:
            dropped.append(f"{key} ({setting.where})")
        elif setting.layer in forgiven:
            logger.warning("%s: %s", setting.where, _no_effect_message(key, names))
        else:
            raise ConfigError(f"{setting.where}: {_no_effect_message(key, names)}")
    if dropped:
        logger.warning(
            "ignored, because a later file or option chose another component: %s",
            ", ".join(dropped),
        )
    values: dict[str, Any] = {}
    for key, value in placed.items():
        holder, option = split_key(key)
        functools.reduce(lambda at, word: at.setdefault(word, {}), holder.split("."), values)[
            option
        ] = value
    try:
        config = config_from_dict(values)
        epochs = last.get("training.max_epochs")
        if config.training.stages and (epochs is None or epochs.is_implied):
            config.training.max_epochs = config.training.stages[0].epochs
        found = [(key, f"{key}: {message}") for key, message in problems(config)]
    except OptionError as error:
        found = [(error.field, f"{error.field} {error.found}")]
    if found:
        nowhere = Setting("", None, "default")
        raise ConfigError(
            "\n".join(f"{last.get(key, nowhere).where}: {message}" for key, message in found)
        )
    return config


def _read_text(setting: Setting) -> Any:
    if not isinstance(setting.value, str) or not setting.value.startswith(("[", "{")):
        return None if setting.value in ("null", "~") else setting.value
    where = f"{setting.where}: {setting.key}"
    with reading(where, "a value in YAML", ConfigError):
        node = yaml_nodes(setting.value, where)
        if isinstance(node, yaml.MappingNode):
            _pairs(node, where)
        return yaml_value(node, where)


def _no_effect_message(key: str, names: Names) -> str:
    holder, option = split_key(key)
    section, _, field = holder.partition(".")
    owner = owner_of(holder, names)
    kind = CHOICES[holder].kind if holder in CHOICES else ""
    if owner is not None and kind and field:
        own = [name for name in owner.model_fields if name != "name"]
        lacks = f"no option {option!r}; {suggestion(option, own)}" if own else "no options"
        return f"{key} has no effect: the {kind} {chosen(holder, names)} has {lacks}"
    if section not in CHOICES:
        return (
            f"{key} does not exist; options in this section are not nested: write {section}.OPTION"
        )
    wanted = key.split(".")[1]
    takers = [
        name for name, one in CHOICES[section].table.items() if wanted in one.options.model_fields
    ]
    return (
        f"{key} has no effect: the {CHOICES[section].kind} {chosen(section, names)} does not take "
        f"it ({', '.join(takers)} would); remove it, or choose another {section}.name"
    )


def _split_command_line(arguments: Sequence[str]) -> tuple[list[str], str, list[Setting]]:
    """The `--config` names, `--defaults`, and the other options; an option without a value is
    true.
    """
    pairs: list[tuple[str, Any]] = []
    remaining = list(arguments)
    while remaining:
        option = remaining.pop(0)
        if not option.startswith("--") or option == "--":
            raise ConfigError(
                f"{COMMAND_LINE}: found {option!r}; expected an option such as --config"
            )
        name, equals, value = option[2:].partition("=")
        is_flag = not equals and (not remaining or remaining[0].startswith("--"))
        pairs.append((name, True if is_flag else value if equals else remaining.pop(0)))
    configs = [value for name, value in pairs if name == "config"]
    if not all(isinstance(one, str) and one for one in configs):
        raise ConfigError("--config needs a file name")
    asked = [value for name, value in pairs if name == "defaults"]
    if not set(asked) <= {OURS, CLASSIC}:
        raise ConfigError(
            f"{COMMAND_LINE}: --defaults is {asked[-1]!r}; expected {OURS} or {CLASSIC}"
        )
    settings = [
        Setting(
            name if name in ALIASES else name.replace("-", "_"),
            value,
            COMMAND_LINE + f": --{name}" * ("." not in name),
        )
        for name, value in pairs
        if name not in ("config", "defaults")
    ]
    return configs, asked[-1] if asked else "", settings


def _read_file(path: Path) -> list[Setting]:
    """The settings of a YAML or JSON file: top-level keys with values, and the keys one level below
    a mapping.
    """
    with reading(path, "a configuration in YAML or JSON", ConfigError), open_text(path) as file:
        text = file.read(MAX_YAML + 1)
        if BEGINS_AS_JSON.match(text):
            # JSON may be indented with tabs, which YAML does not allow, and have comments; a string
            # may contain //.
            text = COMMENT.sub(lambda found: found[1] or "", text.replace("\t", "    "))
        root = yaml_nodes(text, str(path), has_lines=True)
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}:1: expected `key: value` lines")
        settings = []
        for key, node, where in _pairs(root, path) if root else ():
            if key == "$schema":
                continue
            children = _pairs(node, path) if isinstance(node, yaml.MappingNode) else []
            pairs = [(f"{key}.{child}", one, at) for child, one, at in children] or [
                (key, node, where)
            ]
            below: list[Any] = [value for _, value, _ in pairs]
            # Refuses duplicate keys at deeper levels too; the list grows while it is iterated.
            for value in below:
                if isinstance(value, yaml.MappingNode):
                    below += [inner for _, inner, _ in _pairs(value, path)]
                elif isinstance(value, yaml.SequenceNode):
                    below += value.value
            settings += [Setting(name, yaml_value(value, at), at) for name, value, at in pairs]
    found = dict.fromkeys(one.key.partition(".")[0] for one in settings)
    if not WESPEAKER.isdisjoint(found):
        listed = ", ".join(list(found)[:8])
        raise ConfigError(
            f"{path}: {listed} are options of wespeaker; see docs/migration.md for what to write "
            "instead"
        )
    return settings


def _pairs(mapping: yaml.MappingNode, path: Path | str) -> list[tuple[str, yaml.Node, str]]:
    pairs: dict[str, tuple[str, yaml.Node, str]] = {}
    for key_node, value_node in mapping.value:
        key = str(key_node.value)
        where = f"{path}:{key_node.start_mark.line + 1}"
        if key in pairs:
            raise ConfigError(
                f"{where}: {key} is given twice (first at {pairs[key][2]}); keep one of them"
            )
        pairs[key] = (key, value_node, where)
    return list(pairs.values())


def _resolve_input(setting: Setting, file: Path) -> Setting:
    """Resolve an input path relative to the file that names it, if it exists there but not in the
    working directory.
    """
    section, option = split_key(setting.key)
    owner = SECTIONS.get(section, Options)
    same_as = {"data.test_lists": "data.test_", "data.corpora": "data."}.get(setting.key)
    if same_as and isinstance(setting.value, dict):
        # Each value is a path, or options whose paths are inputs like test_list and test_path.
        found: dict[Any, Any] = {}
        for name, given in setting.value.items():
            inputs = given if isinstance(given, dict) else {"list": given}
            settings = {
                key: setting._replace(key=f"{same_as}{key}", value=one)
                for key, one in inputs.items()
            }
            found[name] = {key: _resolve_input(one, file).value for key, one in settings.items()}
        return setting._replace(value=found)
    if setting.value and option in owner.model_fields and is_input(owner, option):
        beside = file.parent / str(setting.value)
        # A name that is too long for the system is refused later, with the other values.
        with contextlib.suppress(OSError):
            if not Path(str(setting.value)).exists() and beside.exists():
                return setting._replace(value=str(beside))
    return setting


def _drop_folders_of_other_lists(
    settings: Sequence[Setting], copies: Collection[int]
) -> list[Setting]:
    """Drop audio folders that a run saved along with a list, if a later layer names another list.

    A run's copy names every folder, including those nobody gave, and the folder of one list does
    not apply to another.
    """
    last = {setting.key: setting for setting in settings}
    kept = []
    for setting in settings:
        named = last.get(f"{setting.key.removesuffix('_path')}_list")
        is_saved = setting.layer in copies and last[setting.key] is setting and bool(setting.value)
        if named and is_saved and named.layer > setting.layer:
            # The same list keeps its folder; a copy saves absolute paths.
            own = [
                one.value for one in settings if (one.key, one.layer) == (named.key, setting.layer)
            ]
            if str(Path(str(named.value)).absolute()) not in own:
                logger.info(
                    "%s names another list, so the saved %s is ignored", named.where, setting.key
                )
                continue
        kept.append(setting)
    return kept


def _of_this_version(setting: Setting) -> Setting | None:
    """A saved setting without options of earlier versions; None if nothing of it is left."""
    section, _, option = setting.key.rpartition(".")
    kept = without_removed(section, {option: setting.value}, [])
    if setting.key in CHANGED_TRAINING and setting.value not in (0, "", [1.0]):
        logger.warning(
            "%s: %s: %s is ignored; %s",
            setting.where,
            setting.key,
            setting.value,
            REMOVED[setting.key],
        )
    return setting._replace(value=kept[option]) if option in kept else None


def _refuse_removed(setting: Setting) -> None:
    """Refuse an option or value of an earlier version, also inside a component or a stage."""
    section, _, option = setting.key.rpartition(".")
    value = _read_text(setting) if setting.key in READ_TO_REFUSE else setting.value
    removed: list[str] = []
    without_removed(section, {option: value}, removed)
    if removed:
        raise ConfigError(f"{setting.where}: {removed[0]} was removed; {REMOVED[removed[0]]}")


def _translated(setting: Setting) -> Iterator[Setting]:
    """Translate a setting as written to our dotted keys, one for each option of a component's
    mapping.
    """
    key = setting.key
    where = setting.where
    if key in TYPOS:
        logger.warning("%s: %s is misspelt; using %s", where, key, TYPOS[key])
        key = TYPOS[key]
    section, _, field = key.partition(".")
    if key in ADVICE:
        raise ConfigError(f"{where}: unknown key {key}; {ADVICE[key]}")
    _refuse_removed(setting)
    if key in ALIASES and not setting.is_sectioned:
        for name, value in translate(key, setting.value).items():
            renamed = setting._replace(key=name, value=value)
            _refuse_removed(renamed)
            yield renamed
    elif field and key in CHOICES:
        given = _read_text(setting)
        if not isinstance(given, dict):
            raise ConfigError(f"{where}: {key} is {given!r}; expected `option: value` pairs")
        for name, value in given.items():
            yield setting._replace(key=f"{key}.{name}", value=value)
    elif key in MODE_FLAGS or (
        section in SECTIONS and field.partition(".")[0] in known_fields(section)
    ):
        yield setting
    elif section not in SECTIONS or field:
        homes = [f"{one}.{field or key}" for one in SECTIONS if (field or key) in known_fields(one)]
        known = [f"{one}.{name}" for one in SECTIONS for name in known_fields(one)]
        near = (
            known_fields(section)
            if section in SECTIONS
            else [*ALIASES, *MODE_FLAGS, *SECTIONS, *known]
        )
        wanted = field if section in SECTIONS else key
        listed = (
            suggestion(wanted, near) if nearest(wanted, near) else "--help all lists every option"
        )
        meant = f"did you mean {' or '.join(map(repr, homes))}?" if homes else listed
        raise ConfigError(f"{where}: unknown key {key}; {meant}")
    elif not setting.is_sectioned:
        raise ConfigError(
            f"{where}: {section} is {setting.value!r}; expected `key: value` lines below the "
            "section"
        )
