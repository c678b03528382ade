"""YAML and JSON files read with the line of every key, so that an error can point at it.

PyYAML does the parsing; this file only walks its nodes. Values are plain Python values, no tags that build objects.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

MOST_BYTES = 1 << 20
MOST_LEVELS = 20
MOST_ALIASES = 20


class ConfigError(ValueError):
    """A configuration that the user can mend; the message says where, what was found and what is expected."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, except that `1e-3` is a number, as everybody expects."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


@dataclass(frozen=True)
class Entry:
    """One key of a file: its value (nested mappings stay dictionaries) and where it stands."""

    key: tuple[str, ...]
    value: Any
    where: str


def read_entries(path: Path) -> list[Entry]:
    """Every top-level key of the file, and every key one level below a mapping, in the order of the file.

    Raises:
        ConfigError: unreadable file, broken YAML, a key given twice, or a file that is not a mapping.
    """
    text = _text_of(path)
    try:
        _check_shape(text, path)
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return []
            if not isinstance(root, yaml.MappingNode):
                raise ConfigError(f"{path}:1: found something else, expected `key: value` lines")
            return list(_walk(loader, root, path))
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error


def _text_of(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(f"cannot read the configuration {path}: not a regular file")
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise ConfigError(f"{path} has {size:,} bytes; a configuration has {MOST_BYTES:,} at most")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error
    # JSON may be indented by tabs, which YAML does not take.
    return text.replace("\t", "    ") if path.suffix == ".json" else text


def _check_shape(text: str, path: Path) -> None:
    """Refuse what would take for ever or run out of stack: deep nesting, aliases of aliases.

    The events of PyYAML come one by one without recursion; its composer, which follows, recurses.
    """
    depth = aliases = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1  # type: ignore[union-attr]
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        if depth > MOST_LEVELS:
            raise ConfigError(
                f"{path}:{line}: nested deeper than {MOST_LEVELS} levels; a configuration has two or three"
            )
        if aliases > MOST_ALIASES:
            raise ConfigError(f"{path}:{line}: more than {MOST_ALIASES} aliases (*name); write the values out")


def _walk(loader: _Loader, root: yaml.MappingNode, path: Path) -> list[Entry]:
    entries = []
    for key, value_node, where in _pairs(root, path):
        if isinstance(value_node, yaml.MappingNode):
            children = _pairs(value_node, path)
            entries += [Entry((key, child), _value(loader, node, at), at) for child, node, at in children]
            if not children:
                entries.append(Entry((key,), {}, where))
        else:
            entries.append(Entry((key,), _value(loader, value_node, where), where))
    return entries


def _value(loader: _Loader, node: yaml.Node, where: str) -> Any:
    try:
        return loader.construct_object(node, deep=True)
    except (ValueError, OverflowError) as error:
        # A date that there is not, a number that is none: PyYAML's own words name neither file nor line.
        raise ConfigError(f"{where}: {getattr(node, 'value', '')!r} is not a value: {error}") from error


def _pairs(mapping: yaml.MappingNode, path: Path) -> list[tuple[str, yaml.Node, str]]:
    pairs: list[tuple[str, yaml.Node, str]] = []
    seen: dict[str, int] = {}
    for key_node, value_node in mapping.value:
        line = key_node.start_mark.line + 1
        key = str(key_node.value)
        if key in seen:
            raise ConfigError(f"{path}:{line}: {key} is given twice (first on line {seen[key]}); keep one of them")
        seen[key] = line
        pairs.append((key, value_node, f"{path}:{line}"))
    return pairs
