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
import glob
import logging
import re
import shlex
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
from speakernet.config.problems import problems
from speakernet.config.schema import (
    CHOICE_KEYS,
    CHOICES,
    DEFAULT_NAMES,
    SECTIONS,
    Config,
    Names,
    config_from_dict,
    find_choice,
    known_fields,
    owner_of,
    split_key,
    with_options,
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
    PLUGIN_MODULES,
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
LISTS_OF_INPUTS = {"data.test_lists": "data.test_", "data.corpora": "data."}
"""Options with several inputs by name -> what stands before the name of the same single input."""
COMMENT = re.compile(r'("(?:[^"\\\n]|\\.)*")|//.*')
"""A comment in JSON, or a string, which is kept."""
_PACKAGE = Path(speakernet.__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent / "configs"
RECIPES = _CHECKOUT if (_CHECKOUT / "exp01.yaml").is_file() else _PACKAGE / "recipes"
"""The folder of the recipes: `configs/` of the checkout, or `speakernet/recipes` of an installed
wheel."""
PREPARED = Path("data")
"""`prepare` writes to a folder in this one unless it is given another."""


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
    # Everything becomes a list of `Setting`s, one layer for each file and the last for the command
    # line. Each setting remembers where it was written, so that a message about a wrong value can
    # say so long after the files are closed. Old names, other programs' names and nested mappings
    # are translated at once, so from here on there are only our dotted keys.
    #
    # Two things are less obvious. What a flat file means by leaving an option out, and what the
    # initial model brings along, is no setting: it holds only if no layer sets the option, and so
    # replaces our default. And a component may be chosen in a later layer than its options, or
    # replaced in one: what an option means is therefore decided after all layers are read, in
    # `compose`.
    config_names, asked, options = _split_command_line(arguments)
    files = tuple(map(find_config, config_names))
    layers = [_read_file(file) for file in files]
    copies = set()
    for number, file in enumerate(files):
        sections = {setting.key.partition(".")[0] for setting in layers[number]}
        # A recipe may also name every section, so the file name has to match too.
        if file.name == CONFIG and sections >= set(SECTIONS):
            copies.add(number)
    is_classic, why = _choose_defaults(asked, files, layers, options)
    settings: list[Setting] = []
    for number, file in enumerate(files):
        for setting in layers[number]:
            current = _of_this_version(setting) if number in copies else setting
            if current is not None:
                for translated in _translate(current._replace(layer=number)):
                    settings.append(_resolve_input(translated, file))
    for setting in options:
        settings += _translate(setting._replace(layer=len(files)))
    last = {setting.key: setting for setting in settings}
    is_scoring = _is_scoring(last, command_line=len(files))
    settings = _drop_folders_of_other_lists(
        [setting for setting in settings if setting.key != "eval"], copies
    )
    set_values = {setting.key: setting.value for setting in settings}
    model = str(set_values.get("training.initial_model", ""))
    is_of_checkpoint = False
    # Without a configuration, such a checkpoint was trained with that program's defaults, not with
    # ours.
    if is_scoring and model and not files and not asked:
        is_of_checkpoint = is_classic_checkpoint(Path(model))
    if is_of_checkpoint:
        is_classic = True
        why = f"{model} is its checkpoint"
    # Layers that may set what has no effect, because they are written for another program.
    forgiven = {number for number, layer in enumerate(layers) if _is_flat(layer)}
    if is_classic:
        forgiven.add(len(files))
    implied = convert(set_values) if is_classic else {}
    if model and not is_scoring:
        implied |= _implied_by_model(settings_of_model(Path(model)), set_values)
    # The program's own default is off, but its published models have it on. `import-weights`
    # assumes the same.
    is_log_input_assumed = is_of_checkpoint and "frontend.log_input" not in set_values
    if is_log_input_assumed:
        implied["frontend.log_input"] = True
    for key in set_values:
        implied.pop(key, None)
    config = compose(settings, implied, forgiven)
    assumed = ""
    if is_log_input_assumed and "log_input" in type(config.frontend).model_fields:
        assumed = (
            f"{model} was trained with log_input, which the checkpoint does not show (if not, give "
            "--log_input false)"
        )
    if not config.training.save_path:
        folder = Path("exps") / (files[0].stem if files else "exp1")
        # A run's own copy names no folder, because the run is wherever the copy is.
        if 0 in copies:
            folder = files[0].parent
        config = with_options(config, "training", save_path=str(folder))
    described = f"{CLASSIC if is_classic else OURS} ({why})"
    if is_classic and (differing := differing_defaults(config, set_values)):
        described += (
            f"; these differ from {OURS}'s (in brackets): {differing}; --defaults {OURS} selects "
            "those"
        )
    keys = frozenset(set_values)
    return LoadedConfig(config, files, is_classic, is_scoring, keys, described, assumed)


def keys_of(arguments: Sequence[str]) -> set[str]:
    """The dotted keys that the options of a command line set."""
    keys = set[str]()
    for setting in _split_command_line(arguments)[2]:
        keys.update(translated.key for translated in _translate(setting))
    return keys


def _is_flat(layer: Sequence[Setting]) -> bool:
    """Whether a file is written like those of voxceleb_trainer."""
    return not any(setting.is_sectioned for setting in layer)


def _choose_defaults(
    asked: str,
    files: Sequence[Path],
    layers: Sequence[Sequence[Setting]],
    options: Sequence[Setting],
) -> tuple[bool, str]:
    """Whether the defaults are voxceleb_trainer's, and why: the first file that is not empty
    decides.
    """
    if asked:
        return asked == CLASSIC, "--defaults"
    for file, layer in zip(files, layers, strict=True):
        if layer and _is_flat(layer):
            return True, f"{file} has no sections"
        if layer:
            return False, f"{file} is divided into sections"
    # The spelling of options does not choose the defaults (docs/decisions.md), but the user of
    # another program's names should know how to choose them.
    if any(setting.key in CLASSIC_NAMES for setting in options):
        return False, f"use --defaults {CLASSIC} to get that program's"
    return False, "the default"


def _is_scoring(last: Mapping[str, Setting], *, command_line: int) -> bool:
    """Whether `eval` was given; options that scoring would ignore are refused.

    Args:
        last: key -> the setting that holds.
        command_line: number of the layer of the command line.
    """
    if "eval" not in last:
        return False
    setting = last["eval"]
    value = str(setting.value).casefold()
    if value not in ("true", "false"):
        raise ConfigError(f"{setting.where}: eval is {setting.value!r}; expected true or false")
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
    of_model: Mapping[str, Any], set_values: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The settings of an initial model that apply: if the user chose another component, the model's
    options for the old one do not.
    """
    for key, value in of_model.items():
        holder = split_key(key)[0]
        choice = CHOICES.get("model.options" if holder == "model" else holder)
        name = "auto" if choice is None else str(set_values.get(choice.key, "auto"))
        if choice is None or name in ("auto", of_model.get(choice.key)):
            yield key, value


def find_config(name: str) -> Path:
    """Find a configuration by path, or by name among the recipes of speakernet and the folders
    that `prepare` wrote below data/; `.yaml` may be left out.
    """
    # The path itself comes first, so that a changed copy of a recipe may keep its name.
    for candidate in (Path(name), Path(name + ".yaml"), RECIPES / name, RECIPES / (name + ".yaml")):
        if candidate.exists() and not candidate.is_dir():
            return candidate
    pattern = f"*/{glob.escape(name.removesuffix('.yaml'))}.yaml"
    prepared = sorted(PREPARED.glob(pattern))
    # Logged, because the user gave only a name and may not know this file.
    if len(prepared) == 1:
        logger.info("configuration %s: read from %s", name, prepared[0])
        return prepared[0]
    # With several of that name, a guess could train on the wrong corpus.
    if prepared:
        raise ConfigError(
            f"{len(prepared)} configurations are named {name!r}: "
            f"{', '.join(map(str, prepared))}; give the path of one of them"
        )
    names = [path.name for path in sorted(PREPARED.glob("*/*.yaml"))]
    names += [recipe.relative_to(RECIPES).as_posix() for recipe in sorted(RECIPES.rglob("*.yaml"))]
    raise ConfigError(
        f"no configuration {name!r} in the working directory, in the folders of {PREPARED}/ or in "
        f"configs/; {suggestion(name, names)}"
    )


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration as YAML, atomically.

    The file works from any working directory: inputs are absolute, and the run folder is the file's
    own. Modules with external components are copied next to it.
    """
    values = config.model_dump()
    # Otherwise a copy of the folder would still write to the original.
    del values["training"]["save_path"]
    for section, fields in values.items():
        _make_inputs_absolute(getattr(config, section), fields)
    # Written before the configuration, which cannot be read without them.
    for name, (text, _) in PLUGIN_MODULES.items():
        with atomic_write(path.with_name(f"{name}.py"), "wb") as copy:
            copy.write(text)
    with atomic_write(path) as file:
        yaml.safe_dump(values, file, sort_keys=False, allow_unicode=True)


def _make_inputs_absolute(options: Options, fields: dict[str, Any]) -> None:
    for name, value in options:
        if is_input(type(options), name) and value and not is_address(value):
            fields[name] = str(Path(value).absolute())
        # Several lists or corpora by name.
        for key, inner in value.items() if isinstance(value, Mapping) else ():
            if isinstance(inner, Options):
                _make_inputs_absolute(inner, fields[name][key])


def compose(
    settings: Sequence[Setting], implied: Mapping[str, Any], forgiven: Collection[int]
) -> Config:
    """Compose a configuration from settings, in the order of their layers, on top of what a model
    or another program has `implied` (other keys, some perhaps without effect) and our defaults.

    A setting without effect is refused, or only warned about if its layer is `forgiven`.
    """
    # First the components, then their options: `loss.margin` exists only if the loss that is
    # finally chosen has a margin. A setting that the chosen component does not take is a mistake,
    # except in two cases, tried in this order: it was meant for a component that a later layer has
    # replaced (logged); or its layer was written for another program, whose options always exist (a
    # warning).
    names, chosen_in = _choose_components(settings, implied)
    last = {setting.key: setting for setting in settings}
    taken: dict[str, Any] = {}
    for key, value in implied.items():
        holder, option = split_key(key)
        owner = owner_of(holder, names)
        if owner and option in owner.model_fields:
            taken[key] = value
    dropped = []
    for key, setting in last.items():
        holder, option = split_key(key)
        section = holder.partition(".")[0]
        is_replaced = chosen_in.get(holder, 0) > setting.layer
        is_stale = is_replaced or chosen_in.get(section, 0) > setting.layer
        # An option meant for one network does not apply to another, even if both take it.
        is_of_another = is_replaced and "." in holder and key not in CHOICE_KEYS
        owner = owner_of(holder, names)
        if owner and option in owner.model_fields and not is_of_another:
            is_text = str in alternatives(owner.model_fields[option].annotation)
            taken[key] = setting.value if is_text else _read_text(setting)
        elif is_stale:
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
    try:
        config = config_from_dict(_nested(taken))
    except OptionError as error:
        mistakes = [(error.field, f"{error.field} {error.found}")]
    else:
        if config.training.stages and "training.max_epochs" not in last:
            first = config.training.stages[0]
            config = with_options(config, "training", max_epochs=first.epochs)
        mistakes = [(key, f"{key}: {message}") for key, message in problems(config)]
    if mistakes:
        # A mistake may also follow from a default, which stands in no file.
        nowhere = Setting("", None, "default")
        raise ConfigError(
            "\n".join(f"{last.get(key, nowhere).where}: {message}" for key, message in mistakes)
        )
    return config


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key as the mappings of a file."""
    values: dict[str, Any] = {}
    for key, value in options.items():
        holder, option = split_key(key)
        target = values
        for word in holder.split("."):
            target = target.setdefault(word, {})
        target[option] = value
    return values


def _choose_components(
    settings: Sequence[Setting], implied: Mapping[str, Any]
) -> tuple[Names, dict[str, int]]:
    """The chosen component of every holder, and the last layer that chose another one for it."""
    names = dict(DEFAULT_NAMES)
    for holder, choice in CHOICES.items():
        if choice.key in implied:
            names[holder] = implied[choice.key]
    chosen_in: dict[str, int] = {}
    # Layer by layer, because only a later layer than its own makes an option stale.
    for layer in sorted({setting.layer for setting in settings}):
        in_layer = {setting.key: setting for setting in settings if setting.layer == layer}
        # All names of a layer are set before any is compared, because `auto` depends on the model.
        before = dict(names)
        for holder, choice in CHOICES.items():
            if choice.key in in_layer:
                names[holder] = str(in_layer[choice.key].value)
        for holder, choice in CHOICES.items():
            try:
                if find_choice(holder, names) != find_choice(holder, before):
                    chosen_in[holder] = layer
            except ValueError as error:
                # A model without the pooling that an earlier layer named.
                setting = in_layer.get(choice.key) or in_layer["model.name"]
                raise ConfigError(f"{setting.where}: {choice.key}: {error}") from error
    return names, chosen_in


def _read_text(setting: Setting) -> Any:
    if not isinstance(setting.value, str) or not setting.value.startswith(("[", "{")):
        # Other text stays as it is: its field converts numbers, and a name may look like YAML.
        return None if setting.value in ("null", "~") else setting.value
    where = f"{setting.where}: {setting.key}"
    with reading(where, "a value in YAML", ConfigError):
        node = yaml_nodes(setting.value, where)
        if isinstance(node, yaml.MappingNode):
            # Only for its error about a key that is given twice.
            _pairs(node, where)
        return yaml_value(node, where)


def _no_effect_message(key: str, names: Names) -> str:
    holder, option = split_key(key)
    section, _, field = holder.partition(".")
    owner = owner_of(holder, names)
    if owner is not None and field and holder in CHOICES:
        options = [name for name in owner.model_fields if name != "name"]
        lacks = f"no option {option!r}; {suggestion(option, options)}" if options else "no options"
        kind = CHOICES[holder].kind
        return f"{key} has no effect: the {kind} {find_choice(holder, names)} has {lacks}"
    if section not in CHOICES:
        return (
            f"{key} does not exist; options in this section are not nested: write {section}.OPTION"
        )
    option = key.split(".")[1]
    # The option is usually meant for another component, so those that take it are named.
    takers = []
    for name, taker in CHOICES[section].table.items():
        if option in taker.options.model_fields:
            takers.append(name)
    return (
        f"{key} has no effect: the {CHOICES[section].kind} {find_choice(section, names)} does not "
        f"take it ({', '.join(takers)} would); remove it, or choose another {section}.name"
    )


def _split_command_line(arguments: Sequence[str]) -> tuple[list[str], str, list[Setting]]:
    """The `--config` names, `--defaults`, and the other options; an option without a value is
    true, and a YAML file without an option is a configuration.
    """
    configs: list[str] = []
    defaults = ""
    settings: list[Setting] = []
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        if word.endswith((".yaml", ".yml")) and not word.startswith("--"):
            configs.append(word)
            continue
        if not word.startswith("--") or word == "--":
            raise ConfigError(
                f"{COMMAND_LINE}: found {word!r}; expected an option such as --config"
            )
        name, equals, value = word[2:].partition("=")
        # A word with one dash is a value, so that negative numbers can be given.
        is_flag = not equals and (not remaining or remaining[0].startswith("--"))
        if not equals and not is_flag:
            value = remaining.pop(0)
        if name == "config":
            if not value:
                raise ConfigError("--config needs a file name")
            configs.append(value)
        elif name == "defaults":
            if value not in (OURS, CLASSIC):
                raise ConfigError(
                    f"{COMMAND_LINE}: --defaults is {value!r}; expected {OURS} or {CLASSIC}"
                )
            defaults = value
        else:
            # Our names have underscores; those of other programs are looked up as written.
            key = name if name in ALIASES else name.replace("-", "_")
            where = COMMAND_LINE if "." in name else f"{COMMAND_LINE}: --{name}"
            settings.append(Setting(key, True if is_flag else value, where))
    return configs, defaults, settings


def _read_file(path: Path) -> list[Setting]:
    """The settings of a YAML or JSON file: top-level keys with values, and the keys one level below
    a mapping.
    """
    settings = []
    with reading(path, "a configuration in YAML or JSON", ConfigError), open_text(path) as file:
        # One character too many is enough for `yaml_nodes` to refuse a file of any size.
        text = file.read(MAX_YAML + 1)
        if BEGINS_AS_JSON.match(text):
            # JSON may be indented with tabs, which YAML does not allow, and have comments; a string
            # may contain //.
            text = COMMENT.sub(lambda match: match[1] or "", text.replace("\t", "    "))
        root = yaml_nodes(text, str(path), has_lines=True)
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}:1: expected `key: value` lines")
        # At all levels here, because deeper mappings are read as a whole below.
        _refuse_duplicates(root, path)
        for key, node, where in _pairs(root, path) if root else ():
            # For editors, which complete and check the file; it is not an option.
            if key == "$schema":
                continue
            if isinstance(node, yaml.MappingNode) and node.value:
                for option, value, at in _pairs(node, path):
                    settings.append(Setting(f"{key}.{option}", yaml_value(value, at), at))
            else:
                settings.append(Setting(key, yaml_value(node, where), where))
    keys = dict.fromkeys(setting.key.partition(".")[0] for setting in settings)
    if not WESPEAKER.isdisjoint(keys):
        listed = ", ".join(list(keys)[:8])
        raise ConfigError(
            f"{path}: {listed} are options of wespeaker; convert the file: speakernet "
            f"import-config {shlex.quote(str(path))} --out my.yaml"
        )
    return settings


def _refuse_duplicates(node: yaml.Node | None, path: Path | str) -> None:
    """Refuse a key that is given twice in one mapping, at any level."""
    inner: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        inner = [value for _, value, _ in _pairs(node, path)]
    elif isinstance(node, yaml.SequenceNode):
        inner = node.value
    for value in inner:
        _refuse_duplicates(value, path)


def _pairs(mapping: yaml.MappingNode, path: Path | str) -> list[tuple[str, yaml.Node, str]]:
    pairs: dict[str, tuple[str, yaml.Node, str]] = {}
    for key_node, value_node in mapping.value:
        key = str(key_node.value)
        where = f"{path}:{key_node.start_mark.line + 1}"
        # YAML parsers usually keep the last of two equal keys, so a forgotten line would change a
        # run.
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
    if setting.key in LISTS_OF_INPUTS and isinstance(setting.value, dict):
        # Each value is a path, or options whose paths are inputs like test_list and test_path.
        resolved: dict[Any, Any] = {}
        for name, options in setting.value.items():
            fields = dict(options) if isinstance(options, dict) else {"list": options}
            for option, value in fields.items():
                part = setting._replace(key=LISTS_OF_INPUTS[setting.key] + option, value=value)
                fields[option] = _resolve_input(part, file).value
            resolved[name] = fields
        return setting._replace(value=resolved)
    section, option = split_key(setting.key)
    owner = SECTIONS.get(section, Options)
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
            path = str(Path(str(named.value)).absolute())
            if not any(
                other.key == named.key and other.layer == setting.layer and other.value == path
                for other in settings
            ):
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
    if setting.key in CHANGED_TRAINING and setting.value not in (0, "", [1.0], "averaged"):
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


def _translate(setting: Setting) -> Iterator[Setting]:
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
        options = _read_text(setting)
        if not isinstance(options, dict):
            raise ConfigError(f"{where}: {key} is {options!r}; expected `option: value` pairs")
        for name, value in options.items():
            yield setting._replace(key=f"{key}.{name}", value=value)
    elif key in MODE_FLAGS or (
        section in SECTIONS and field.partition(".")[0] in known_fields(section)
    ):
        yield setting
    elif section not in SECTIONS or field:
        raise ConfigError(f"{where}: unknown key {key}; {_meant_instead(section, field)}")
    elif not setting.is_sectioned:
        raise ConfigError(
            f"{where}: {section} is {setting.value!r}; expected `key: value` lines below the "
            "section"
        )


def _meant_instead(section: str, field: str) -> str:
    """Which keys an unknown one may stand for: first those with its name in another section."""
    known = []
    near = []
    for name in SECTIONS:
        options = known_fields(name)
        known += [f"{name}.{option}" for option in options]
        if (field or section) in options:
            near.append(f"{name}.{field or section}")
    if not near and section in SECTIONS:
        near = nearest(field, known_fields(section))
    elif not near:
        key = f"{section}.{field}" if field else section
        near = nearest(key, [*ALIASES, *MODE_FLAGS, *SECTIONS, *known])
    if not near:
        return "--help all lists every option"
    return f"did you mean {' or '.join(map(repr, near))}?"
