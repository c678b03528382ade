"""YAML and JSON files read with the line of every key, so that an error can point at it.

`yaml_text` does the parsing and has the limits; this file only walks its nodes.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from speakernet.files import FileError
from speakernet.yaml_text import MOST_BYTES, nodes_of, value_of, value_of_node


class ConfigError(ValueError):
    """A configuration that the user can mend; the message says where, what was found and what is expected."""


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
    with _as_config_error():
        root = nodes_of(text, lambda line: f"{path}:{line}")
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}:1: found something else, expected `key: value` lines")
        return _walk(root, path)


def value_in_line(text: str, where: str) -> Any:
    """The value that somebody wrote in one line, such as `{channels: 32}` on the command line.

    Raises:
        ConfigError: no YAML, beyond the limits, or a value that is none.
    """
    with _as_config_error():
        return value_of(text, where)


@contextlib.contextmanager
def _as_config_error() -> Iterator[None]:
    try:
        yield
    except FileError as error:
        raise ConfigError(str(error)) from error


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


def _walk(root: yaml.MappingNode, path: Path) -> list[Entry]:
    entries = []
    for key, value_node, where in _pairs(root, path):
        if isinstance(value_node, yaml.MappingNode):
            children = _pairs(value_node, path)
            entries += [Entry((key, child), value_of_node(node, at), at) for child, node, at in children]
            if not children:
                entries.append(Entry((key,), {}, where))
        else:
            entries.append(Entry((key,), value_of_node(value_node, where), where))
    return entries


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
