"""Descriptions of all options: the text of `--help`, the reference in Markdown, and the JSON
schema.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from textwrap import fill
from typing import Any, NamedTuple

from speakernet.config.aliases import ALIASES
from speakernet.config.loading import CLASSIC, OURS
from speakernet.config.schema import CHOICES, FIELDS, SECTIONS, Choice
from speakernet.models.options import FAMILIES
from speakernet.options import Options, alternatives, default_of, description_of, in_words, summary

# There are too many options for one screen, so a plain --help shows those that a first recipe sets.
EVERYDAY = {
    "data": [
        "data.train_list",
        "data.test_list",
        "data.validation_list",
        "data.train_path",
        "data.test_path",
        "augment.noise_path",
        "augment.rir_path",
    ],
    "model and loss": [
        "model.name",
        "model.embedding_dim",
        "frontend.num_mels",
        "loss.name",
        "loss.margin",
    ],
    "training": [
        "training.max_epochs",
        "data.batch_size",
        "data.crop_frames",
        "optimizer.learning_rate",
        "augment.enabled",
        "augment.speed_factors",
        "training.test_interval",
        "training.patience",
    ],
    "run folder and initial model": ["training.save_path", "training.initial_model"],
    "machine": ["runtime.device", "runtime.precision", "data.num_workers", "runtime.seed"],
}
"""The options that most users set, shown by a plain `--help`."""
WIDTH = 100
WIDEST_LIST = 8
"""If more components than this take an option, the ones that do not are listed instead."""
HEAD = f"""# Configuration

This page is generated from the code by `speakernet show-config --reference`.

A configuration is a YAML file with sections:

```yaml
data:
  train_list: data/my_voices/train_list.txt
  test_list: data/my_voices/trials.txt
  batch_size: 64
model:
  name: ResNet34
  embedding_dim: 256
loss:
  name: aamsoftmax
  margin: 0.2
training:
  max_epochs: 40
```

Options left out keep their defaults. On the command line, the same options are written with dots:

```sh
python trainSpeakerNet.py --config my.yaml --data.batch_size 32 --loss.margin 0.3
speakernet show-config --config my.yaml
speakernet show-config --config exp01.yaml --given
```

The first command trains, the second prints the configuration with every default, the third only the
options that were set.

- Later values override earlier ones: defaults, then the files in the order of `--config`, then the
  command line.
- A file is looked up as a path, then among the recipes in `configs/`; `.yaml` may be left out.
- Files and folders are relative to the working directory, or to the folder of the file that names
  them.
- An unknown key, a wrong type or a value out of bounds stops the command before it starts. The
  message gives file, line and the nearest key. An option that the chosen components do not take is
  refused by name.
- A section with a `name` chooses a component with its own options. The column "with" lists the
  components that take an option; if it is empty, all do.
- Old names are those of voxceleb_trainer and of common trainers; they work on the command line and
  in flat YAML files ([migration.md](migration.md)). `--defaults {OURS}` or `--defaults {CLASSIC}`
  selects the defaults.
"""


class Row(NamedTuple):
    """An option of a section; one name has several rows if it means different things to different
    components.
    """

    key: str
    words: tuple[str, ...]
    """The words that the option accepts, such as `auto`."""
    takes: str
    text: str
    default: str
    """The default, or each default with its components."""
    components: str
    """The components that take the option; empty if all do."""


def help_text(topic: str = "") -> str:
    """The options as text: those of one section, all of them, or, without a topic, the everyday
    ones.
    """
    if not topic:
        return _everyday_text()
    # Made from the classes of options themselves, so that it is never out of date; a test looks for
    # every option in it.
    titles = {section: summary(owner) for section, owner in SECTIONS.items()}
    for field in FIELDS:
        titles[field] = f"options of the chosen {CHOICES[field].kind}"
    if topic not in ("all", *titles):
        raise ValueError(f"--help {topic}: expected all or one of {', '.join(titles)}")
    lines = []
    for section in titles if topic == "all" else [topic]:
        lines.append(f"{section}: {titles[section]}")
        for row in rows(section):
            lines += _as_text(row)
        lines.append("")
    if topic == "all":
        lines += [
            f"--defaults {OURS}|{CLASSIC}: the defaults of options that are left out. Without it, "
            f"{CLASSIC}'s apply to",
            f"a flat YAML and to a {CLASSIC} checkpoint scored without --config, and {OURS}'s to "
            "everything else.",
            "",
            "Other names accepted in flat YAML files and on the command line:",
            *(f"  --{name:<32} {ALIASES[name]}" for name in sorted(ALIASES, key=str.casefold)),
        ]
    return "\n".join(lines)


def _everyday_text() -> str:
    lines = ["Common options (YAML: section, then key; command line: --section.key VALUE):"]
    # A name can have several rows (the margin of each loss); reversed, so that the first is kept.
    known = {row.key: row for section in SECTIONS for row in reversed(rows(section))}
    for title, keys in EVERYDAY.items():
        lines += ["", f"  {title}:"]
        for key in keys:
            lines += _as_text(known[key])
    lines += ["", f"All options: --help all, or one section: --help {'|'.join(SECTIONS)}"]
    return "\n".join(lines)


def _as_text(row: Row) -> Iterator[str]:
    notes = ["|".join(row.words)] if row.words else []
    notes.append(f"default {row.default}")
    notes += [f"with {row.components}"] if row.components else []
    yield f"  --{row.key} ({'; '.join(notes)})"
    yield fill(row.text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def rows(holder: str) -> list[Row]:
    """The options of a section, or of the components that a field can hold, the everyday ones
    first.
    """
    # A section such as `loss` has the options of all losses, many of which mean the same in several
    # of them and differ only in their default. So options are grouped by what a reader sees of
    # them, and a group becomes one row with its defaults and takers.
    components = _components_of(holder)
    names = {choice.key: choice.default for choice in CHOICES.values()}
    # An option (with the same name, values and description) -> default -> the components with it.
    takers_of: dict[tuple[str, tuple[str, ...], str, str], dict[str, dict[str, None]]] = {}
    for component, owner in components:
        for field, info in owner.model_fields.items():
            key = f"{holder}.{field}"
            takes = "a name" if key in names else in_words(info.rebuild_annotation())
            accepted = [word for word in alternatives(info.annotation) if isinstance(word, str)]
            option = (key, tuple(accepted), takes, description_of(owner, field))
            default = names.get(key) or _default(key, default_of(owner, field))
            takers_of.setdefault(option, {}).setdefault(default, {})[component] = None
    every = list(dict.fromkeys(name for name, _ in components))
    made = []
    for (key, words, takes, text), defaults in takers_of.items():
        default = _all_defaults(defaults)
        components_with_it = list(dict.fromkeys(itertools.chain(*defaults.values())))
        with_it = _list_takers(components_with_it, every)
        made.append(Row(key, words, takes, text, default, with_it))
    order = [f"{holder}.name", *itertools.chain(*EVERYDAY.values())]
    return sorted(made, key=lambda row: order.index(row.key) if row.key in order else len(order))


def _components_of(holder: str) -> list[tuple[str, type[Options]]]:
    """The components that a holder can have, by name, with their options."""
    if holder not in CHOICES:
        return [("", SECTIONS[holder])]
    components = []
    if holder == "model.options":
        # All sizes of a family share one name.
        for family, sizes in FAMILIES.items():
            components += [(family, component.options) for component in sizes.values()]
    else:
        for name, component in CHOICES[holder].table.items():
            components.append((name, component.options))
    return components


def _all_defaults(defaults: Mapping[str, Mapping[str, None]]) -> str:
    """An option's default, or each default with the components that have it."""
    if len(defaults) == 1:
        return next(iter(defaults))
    # Sizes of a family, which share a name, have different defaults.
    names = [name for components in defaults.values() for name in components]
    if len(set(names)) < len(names):
        return "by size"
    return "; ".join(f"{value} ({', '.join(names)})" for value, names in defaults.items())


def _list_takers(takers: Sequence[str], every: Sequence[str]) -> str:
    """The components that take an option; empty if all do."""
    others = [name for name in every if name not in takers]
    if not others:
        return ""
    # A long list is easier to read as "all but softmax".
    if len(takers) > WIDEST_LIST and len(others) < len(takers):
        return f"all but {', '.join(others)}"
    return ", ".join(takers)


def _default(key: str, value: Any) -> str:
    if key in CHOICES:
        return f"the {CHOICES[key].kind}'s defaults"
    if isinstance(value, tuple):
        # As YAML has it.
        value = list(value)
    if value in ("", None, [], {}):
        return "empty"
    return str(value).lower() if isinstance(value, bool) else str(value)


def reference() -> str:
    """The page of all options."""
    lines = [HEAD, "| section | contents |", "|---|---|"]
    for section, owner in SECTIONS.items():
        lines.append(f"| [{section}](#{section}) | {summary(owner)} |")
    for section, owner in SECTIONS.items():
        lines += ["", f"## {section}", "", summary(owner), ""]
        if section in CHOICES:
            kind = CHOICES[section].kind
            lines += [f"`{section}.name` chooses the {kind}: {_list_names(section)}.", ""]
        lines += _table(section)
        for field in FIELDS:
            if not field.startswith(f"{section}."):
                continue
            kind = CHOICES[field].kind
            lines += ["", f"### {field}", ""]
            if section in CHOICES:
                lines.append(
                    f"The {kind} in `combined`: {_list_names(field)}, each with its options from "
                    f"section `{section}`."
                )
            else:
                lines += [f"Options of the chosen {kind}.", "", *_table(field)]
    return "\n".join([*lines, ""])


def _list_names(holder: str) -> str:
    return ", ".join(f"`{name}`" for name in CHOICES[holder].table)


def json_schema() -> dict[str, Any]:
    """The JSON schema of a configuration, which lets editors complete and check it."""
    # The sections are written by hand around pydantic's schemas, because their options depend on
    # the chosen name: pydantic alone would describe a union of classes without saying which belongs
    # to which name.
    definitions: dict[str, Any] = {}
    properties: dict[str, Any] = {"$schema": {"type": "string"}}
    for section in SECTIONS:
        properties[section] = _object(section, definitions)
    # Stages may also be written at the top level, where they are easier to read.
    properties["stages"] = properties["training"]["properties"]["stages"]
    text = json.dumps(properties)
    used = {}
    for name, definition in definitions.items():
        if f"#/$defs/{name}" in text:
            used[name] = definition
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "speakernet configuration",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": used,
    }


def _object(holder: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """The options of a section or field: those of all components, with rules for which component
    takes which.
    """
    owners = [SECTIONS.get(holder, Options)]
    if holder in CHOICES:
        # In the order of the table, so that the written schema only changes with an option.
        owners += [component.options for component in CHOICES[holder].table.values()]
    # Option -> its different declarations, in order.
    declarations: dict[str, list[dict[str, Any]]] = {}
    for owner in owners:
        schema = owner.model_json_schema()
        # Definitions of nested options are shared by all sections.
        definitions |= schema.pop("$defs", {})
        for name, declared in schema.get("properties", {}).items():
            # Defaults and titles may differ between components that otherwise take the same values.
            declared.pop("default", None)
            declared.pop("title", None)
            different = declarations.setdefault(name, [])
            if declared not in different:
                different.append(declared)
    properties = {}
    for name, different in declarations.items():
        properties[name] = different[0] if len(different) == 1 else {"anyOf": different}
    rules = []
    for chosen_holder, choice in CHOICES.items():
        section, _, field = choice.key.rpartition(".")
        # Empty if the component's options are in the section itself.
        within = chosen_holder.removeprefix(holder).removeprefix(".")
        if section == holder:
            auto = ["auto"] if holder == "frontend" or field == "pooling" else []
            properties[field] = {**properties[field], "enum": [*auto, *choice.table]}
            rules += _rules(choice, field, within)
        if chosen_holder.rpartition(".")[0] == holder:
            properties[within] = _object(chosen_holder, definitions)
    described = {"description": summary(SECTIONS[holder])} if holder in SECTIONS else {}
    made = {**described, "type": "object", "properties": properties, "additionalProperties": False}
    return {**made, "allOf": rules} if rules else made


def _rules(choice: Choice, field: str, within: str) -> list[dict[str, Any]]:
    """Which options a component takes, for each group of components that take the same."""
    takers: dict[tuple[str, ...], list[str]] = {}
    for name, component in choice.table.items():
        takers.setdefault(tuple(component.options.model_fields), []).append(name)
    rules = []
    # `if name in … then only these options`, the form in which draft 7 says that one value limits
    # others.
    for options, names in takers.items():
        limit = {"propertyNames": {"enum": list(options)}}
        rules.append(
            {
                "if": {"properties": {field: {"enum": names}}, "required": [field]},
                "then": {"properties": {within: limit}} if within else limit,
            }
        )
    return rules


def _table(holder: str) -> Iterator[str]:
    is_chosen = holder in CHOICES
    yield f"| option | takes | default |{' with |' if is_chosen else ''} description |"
    yield f"|---|---|---|{'---|' if is_chosen else ''}---|"
    for row in rows(holder):
        cells = [f"`{row.key.removeprefix(f'{holder}.')}`", row.takes, row.default]
        if is_chosen:
            cells.append(row.components)
        old = ", ".join(f"`{name}`" for name, key in ALIASES.items() if key == row.key)
        cells.append(f"{row.text} Old name: {old}." if old else row.text)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
