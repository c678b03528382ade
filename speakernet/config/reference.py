"""Descriptions of all options: the text of `--help`, the reference in Markdown, and the JSON
schema.
"""

import itertools
import json
from collections.abc import Iterator
from textwrap import fill
from typing import Any, NamedTuple

from speakernet.config.aliases import ALIASES
from speakernet.config.loading import CLASSIC, OURS
from speakernet.config.schema import CHOICES, SECTIONS
from speakernet.models.options import FAMILIES
from speakernet.options import Options, alternatives, default_of, description_of, in_words, summary

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
        lines = ["Common options (YAML: section, then key; command line: --section.key VALUE):"]
        known = {row.key: row for section in SECTIONS for row in reversed(rows(section))}
        for title, keys in EVERYDAY.items():
            lines += ["", f"  {title}:", *(line for key in keys for line in _as_text(known[key]))]
        return "\n".join(
            [*lines, "", f"All options: --help all, or one section: --help {'|'.join(SECTIONS)}"]
        )
    titles = {one: summary(owner) for one, owner in SECTIONS.items()}
    titles |= {
        one: f"options of the chosen {choice.kind}"
        for one, choice in CHOICES.items()
        if one not in SECTIONS
    }
    if topic not in ("all", *titles):
        raise ValueError(f"--help {topic}: expected all or one of {', '.join(titles)}")
    lines = []
    for section in titles if topic == "all" else [topic]:
        lines += [f"{section}: {titles[section]}"]
        lines += [line for row in rows(section) for line in _as_text(row)] + [""]
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
    owners: list[tuple[str, type[Options]]] = [("", SECTIONS.get(holder, Options))]
    if holder == "model.options":
        # All sizes of a family share one name.
        owners = [
            (family, component.options)
            for family, sizes in FAMILIES.items()
            for component in sizes.values()
        ]
    elif holder in CHOICES:
        owners = [(name, component.options) for name, component in CHOICES[holder].table.items()]
    every = list(dict.fromkeys(name for name, _ in owners))
    names = {choice.key: choice.default for choice in CHOICES.values()}
    # Row (options with the same name, values and description) -> default -> the components with
    # that default.
    found: dict[tuple[str, str, tuple[str, ...], str], dict[str, dict[str, None]]] = {}
    for component, owner in owners:
        for field, info in owner.model_fields.items():
            key = f"{holder}.{field}"
            declared = info.rebuild_annotation()
            words = tuple(one for one in alternatives(info.annotation) if isinstance(one, str))
            default = names.get(key) or _default(key, default_of(owner, field))
            row = (
                key,
                "a name" if key in names else in_words(declared),
                words,
                description_of(owner, field),
            )
            found.setdefault(row, {}).setdefault(default, {})[component] = None
    made = []
    for (key, takes, words, text), defaults in found.items():
        takers = list(dict.fromkeys(itertools.chain(*defaults.values())))
        others = [name for name in every if name not in takers]
        is_long = len(takers) > WIDEST_LIST and len(others) < len(takers)
        components = f"all but {', '.join(others)}" if is_long else ", ".join(takers)
        default = "; ".join(f"{one} ({', '.join(having)})" for one, having in defaults.items())
        if len(defaults) == 1:
            default = next(iter(defaults))
        elif sum(map(len, defaults.values())) > len(takers):
            default = "by size"
        made.append(Row(key, words, takes, text, default, components if others else ""))
    order = [f"{holder}.name", *itertools.chain(*EVERYDAY.values())]
    return sorted(made, key=lambda row: order.index(row.key) if row.key in order else len(order))


def _default(key: str, value: Any) -> str:
    if key in CHOICES:
        return f"the {CHOICES[key].kind}'s defaults"
    return (
        "empty"
        if value in ("", None, [], {})
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


def reference() -> str:
    """The page of all options."""
    lines = [HEAD, "| section | contents |", "|---|---|"]
    lines += [
        f"| [{section}](#{section}) | {summary(owner)} |" for section, owner in SECTIONS.items()
    ]
    for section, owner in SECTIONS.items():
        lines += ["", f"## {section}", "", summary(owner), ""]
        if section in CHOICES:
            names = ", ".join(f"`{name}`" for name in CHOICES[section].table)
            lines += [f"`{section}.name` chooses the {CHOICES[section].kind}: {names}.", ""]
        lines += _table(section)
        for holder in (one for one in CHOICES if one.startswith(f"{section}.")):
            names = ", ".join(f"`{name}`" for name in CHOICES[holder].table)
            lines += ["", f"### {holder}", ""]
            if section in CHOICES:
                kind = CHOICES[holder].kind
                lines += [
                    f"The {kind} in `combined`: {names}, each with its options from section "
                    f"`{section}`."
                ]
            else:
                lines += [f"Options of the chosen {CHOICES[holder].kind}.", "", *_table(holder)]
    return "\n".join([*lines, ""])


def json_schema() -> dict[str, Any]:
    """The JSON schema of a configuration, which lets editors complete and check it."""
    definitions: dict[str, Any] = {}
    properties = {
        "$schema": {"type": "string"},
        **{one: _object(one, definitions) for one in SECTIONS},
    }
    # Stages may also be written at the top level, where they are easier to read.
    properties["stages"] = properties["training"]["properties"]["stages"]
    referenced = json.dumps(properties)
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "speakernet configuration",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": {
            name: definition
            for name, definition in definitions.items()
            if f"#/$defs/{name}" in referenced
        },
    }
    _unwrap_descriptions(schema)
    return schema


def _unwrap_descriptions(node: Any) -> None:
    """Join the lines of every description: where the source breaks them means nothing."""
    if isinstance(node, list):
        for item in node:
            _unwrap_descriptions(item)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key == "description" and isinstance(value, str):
                node[key] = " ".join(value.split())
            else:
                _unwrap_descriptions(value)


def _object(holder: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """The options of a section or field: those of all components, with rules for which component
    takes which.
    """
    owners = [one.options for one in CHOICES[holder].table.values()] if holder in CHOICES else []
    fields: dict[str, dict[str, Any]] = {}
    for owner in [SECTIONS.get(holder, Options), *owners]:
        made = owner.model_json_schema()
        definitions |= made.pop("$defs", {})
        for name, declared in made.get("properties", {}).items():
            # Defaults and titles may differ between components that otherwise take the same values.
            kept = {
                key: value for key, value in declared.items() if key not in ("default", "title")
            }
            fields.setdefault(name, {})[json.dumps(kept, sort_keys=True)] = kept
    properties = {
        name: next(iter(one.values())) if len(one) == 1 else {"anyOf": [*one.values()]}
        for name, one in fields.items()
    }
    rules = []
    for held, choice in CHOICES.items():
        section, _, field = choice.key.rpartition(".")
        # Empty if the component's options are in the section itself.
        within = held.removeprefix(holder).removeprefix(".")
        if section == holder:
            auto = ["auto"] if holder == "frontend" or field == "pooling" else []
            properties[field] = {**properties[field], "enum": [*auto, *choice.table]}
            takers: dict[tuple[str, ...], list[str]] = {}
            for name, one in choice.table.items():
                takers.setdefault(tuple(one.options.model_fields), []).append(name)
            for taken, names in takers.items():
                limit = {"propertyNames": {"enum": list(taken)}}
                then = {"properties": {within: limit}} if within else limit
                rules.append(
                    {
                        "if": {"properties": {field: {"enum": names}}, "required": [field]},
                        "then": then,
                    }
                )
        if held.rpartition(".")[0] == holder:
            properties[within] = _object(held, definitions)
    described = {"description": summary(SECTIONS[holder])} if holder in SECTIONS else {}
    made = {**described, "type": "object", "properties": properties, "additionalProperties": False}
    return {**made, "allOf": rules} if rules else made


def _table(holder: str) -> Iterator[str]:
    is_chosen = holder in CHOICES
    yield f"| option | takes | default |{' with |' if is_chosen else ''} description |"
    yield f"|---|---|---|{'---|' if is_chosen else ''}---|"
    for row in rows(holder):
        old = ", ".join(f"`{name}`" for name, key in ALIASES.items() if key == row.key)
        option = f"`{row.key.removeprefix(f'{holder}.')}`"
        components = [row.components] if is_chosen else []
        cells = [
            option,
            row.takes,
            row.default,
            *components,
            f"{row.text} Old name: {old}." if old else row.text,
        ]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
