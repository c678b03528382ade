"""docs/configuration.md: every option of every section as tables, written from the option dataclasses.

`speakernet show-config --reference` prints it, `make pages` writes it, and a test fails where the page is stale.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from speakernet.config.aliases import ALIASES
from speakernet.config.help import EVERYDAY
from speakernet.config.loading import CLASSIC, OURS
from speakernet.config.schema import CHOICES, CLASSIFICATION, DEFAULT_NAMES, METRIC, NESTED, PARTS, SECTIONS, TABLES
from speakernet.models.options import FAMILIES
from speakernet.options import annotations, default_of, documentation, field_names, in_words, summary
from speakernet.registry import Part

HEAD = f"""# Configuration

This page is written from the code: `speakernet show-config --reference`. A test fails when it is stale.

A configuration is a YAML file of sections:

```yaml
data:
  train_list: data/my_voices/train_list.txt
  test_list: data/my_voices/trials.txt
  batch_size: 64
augment:
  noise_path: data/musan_split
  rir_path: data/RIRS_NOISES
model:
  name: ResNet34
  embedding_dim: 256
loss:
  name: aamsoftmax
  margin: 0.2
training:
  max_epochs: 40
runtime:
  precision: auto
```

What is left out keeps its default. The command line writes the same with dots:

```sh
python trainSpeakerNet.py --config my.yaml --data.batch_size 32 --loss.margin 0.3
speakernet show-config --config my.yaml
speakernet show-config --config exp01.yaml --given
```

The first trains, the second prints the configuration with every default, the third what was set alone.

- Later beats earlier: default, then the files in the order of `--config`, then the command line.
- A file is looked for by its path, then among the recipes in `configs/`; `.yaml` may be left out.
- Files and folders are named from the working directory, or from the folder of the file that names them.
- A key that does not exist, a value of the wrong type and one out of bounds stop the command before it starts.
  The message says which file, which line and which key was probably meant.
- An option that the chosen parts do not take is refused by name.
- Where a section has a `name`, it chooses a part, and the parts take options of their own. The column "with" says
  which; where it is empty, all do.
- Where an option has an old name, it is that of voxceleb_trainer or of common trainers. Old names work on the command
  line and in flat YAML files ([migration.md](migration.md)). `--defaults {OURS}` or `--defaults {CLASSIC}` says where
  omitted options start from.

`speakernet list models` and its like show what each table has, `--help all` this page's text in the terminal.
"""
WIDEST_LIST = 8
"""Parts that the column "with" names one by one; of more, those that do not take an option are named."""


def reference() -> str:
    """The whole page."""
    lines = [HEAD, "| section | what it holds |", "|---|---|"]
    lines += [f"| [{section}](#{section}) | {_cell(summary(owner))} |" for section, owner in SECTIONS.items()]
    for section in SECTIONS:
        lines += ["", f"## {section}", "", summary(SECTIONS[section]), "", *_section(section)]
        for key, place in NESTED.items():
            if key.startswith(f"{section}."):
                lines += ["", f"### {key}", "", *_nested(key, place)]
    return "\n".join([*lines, ""])


def _section(section: str) -> Iterator[str]:
    """The options of a section; where it chooses a part, those of all its parts."""
    kind, table = TABLES.get(section, ("", {}))
    if not table:
        yield from _table([("", SECTIONS[section])], section)
        return
    yield f"`{section}.name` chooses the {kind}: {', '.join(f'`{name}`' for name in table)}."
    yield ""
    yield from _table([(name, part.options) for name, part in table.items()], section)


def _nested(key: str, place: str) -> Iterator[str]:
    """The options of a part within a section, found by the part's name."""
    kind, table = PARTS[place]
    if place in (CLASSIFICATION, METRIC):
        names = ", ".join(f"`{name}`" for name in table)
        yield f"The {kind} within `combined`: {names}, each with the options that it has in the section `loss`."
        return
    yield f"Options of the {kind} that is chosen."
    yield ""
    yield from _table(list(_owners(place, table)), key)


def _owners(place: str, table: Mapping[str, Part]) -> Iterator[tuple[str, type]]:
    """Name and options class of each row; a family's sizes are one name."""
    if place != "model":
        yield from ((name, part.options) for name, part in table.items())
        return
    for family, sizes in FAMILIES.items():
        yield from ((family, part.options) for part in sizes.values())


def _table(owners: list[tuple[str, type]], key: str) -> Iterator[str]:
    """One row for each option; two where parts mean different things by it."""
    old_names = _old_names()
    every = list(dict.fromkeys(name for name, _ in owners))
    rows: dict[tuple[str, str, str], list[tuple[str, Any]]] = {}
    for name, owner in owners:
        for field in field_names(owner):
            takes = "a name" if f"{key}.{field}" in CHOICES.values() else in_words(annotations(owner)[field])
            meaning = (field, takes, documentation(owner)[field])
            rows.setdefault(meaning, []).append((name, default_of(owner, field)))
    has_parts = len(every) > 1
    yield f"| option | takes | default |{' with |' if has_parts else ''} what it does |"
    yield f"|---|---|---|{'---|' if has_parts else ''}---|"
    # Those that most people set come first, in the order of the short help.
    first = [f"{key}.name", *(one for keys in EVERYDAY.values() for one in keys)]
    order = {one: number for number, one in enumerate(first)}
    ordered = sorted(rows.items(), key=lambda row: order.get(f"{key}.{row[0][0]}", len(order)))
    for (field, takes, text), found in ordered:
        takers = list(dict.fromkeys(name for name, _ in found))
        cells = [f"`{field}`", takes, _default(f"{key}.{field}", found)]
        if has_parts:
            cells.append(_with(takers, every))
        old = ", ".join(f"`{name}`" for name in old_names.get(f"{key}.{field}", []))
        cells.append(f"{text} Old name: {old}." if old else text)
        yield "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _old_names() -> dict[str, list[str]]:
    """Key -> the other names under which it is understood."""
    found: dict[str, list[str]] = {}
    for name, alias in ALIASES.items():
        found.setdefault(alias.describes.split(maxsplit=1)[0], []).append(name)
    return found


def _default(key: str, found: Iterable[tuple[str, Any]]) -> str:
    """A default that all share, or those of each part."""
    if key in NESTED:
        return f"those of the {PARTS[NESTED[key]][0]}"
    if key.endswith(".name"):
        return _shown(DEFAULT_NAMES[key.removesuffix(".name")])
    shown: dict[str, list[str]] = {}
    for name, value in found:
        names = shown.setdefault(_shown(value), [])
        names += [name] if name not in names else []
    if len(shown) == 1:
        return next(iter(shown))
    if any(sum(name in names for names in shown.values()) > 1 for names in shown.values() for name in names):
        return "by size"
    return "; ".join(f"{value} ({', '.join(names)})" for value, names in shown.items())


def _shown(value: Any) -> str:
    if value in ("", None, []):
        return "empty"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _with(takers: list[str], every: list[str]) -> str:
    if len(takers) == len(every):
        return ""
    others = [name for name in every if name not in takers]
    if len(takers) > WIDEST_LIST and len(others) < len(takers):
        return f"all but {', '.join(others)}"
    return ", ".join(takers)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
