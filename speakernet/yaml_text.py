"""YAML and JSON texts as plain values, with limits: what a person or a program wrote never hangs, overflows or builds
objects.

PyYAML does the parsing. Files, sections and options are the business of `config/`; this file knows a text and the words
by which its places are named.
"""

import re
from collections.abc import Callable
from typing import Any

import yaml

from speakernet.files import FileError

MOST_BYTES = 256 << 10
"""A configuration has some thousand; PyYAML reads about as many in a second as this."""
MOST_LEVELS = 20
MOST_ALIASES = 20
MOST_DIGITS = 100
"""Of a whole number: `1:59:59…` is one to YAML, and takes the square of its length."""

Place = Callable[[int], str]
"""From the number of a line to the words that name it."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, except that `1e-3` is a number, as everybody expects."""

    where = ""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node; what is none is named by its own text, however deep it stands."""
        try:
            return super().construct_object(node, deep)
        except FileError:
            raise
        except (ValueError, OverflowError, yaml.YAMLError) as error:
            # PyYAML's own words name neither file nor line.
            said = f"{node.value[:60]!r} is not a value" if isinstance(node, yaml.ScalarNode) else "not a value"
            raise FileError(f"{self.where}: {said}: {error}") from error

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """A whole number that a person can have meant."""
        if len(node.value) > MOST_DIGITS:
            raise ValueError(f"a number of {len(node.value):,} digits")
        return super().construct_yaml_int(node)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def nodes_of(text: str, place: Place) -> yaml.Node | None:
    """The nodes of a text, each of which knows its line; None where the text says nothing.

    Args:
        text: YAML, or JSON.
        place: names a line in messages.

    Raises:
        FileError: no YAML, or too large, too deep, too many aliases.
    """
    if len(text) > MOST_BYTES:
        raise FileError(f"{place(1)}: {len(text):,} letters; {MOST_BYTES:,} are the most that is read")
    try:
        _check_shape(text, place)
        return yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise FileError(f"{place(mark.line + 1 if mark else 1)}: not valid YAML: {error}") from error


def value_of_node(node: yaml.Node, where: str) -> Any:
    """The plain value of a node.

    Raises:
        FileError: a date that there is not, a number that is none, a tag that would build an object.
    """
    loader = _Loader("")
    loader.where = where
    return loader.construct_object(node, deep=True)


def value_of(text: str, where: str) -> Any:
    """The plain value of a whole text, None where it says nothing; `where` names it in messages.

    >>> value_of("{channels: 32, rates: [1e-3, 2]}", "here")
    {'channels': 32, 'rates': [0.001, 2]}

    Raises:
        FileError: no YAML, beyond the limits, or a value that is none.
    """
    node = nodes_of(text, lambda _line: where)
    return None if node is None else value_of_node(node, where)


def _check_shape(text: str, place: Place) -> None:
    """Refuse what would take for ever or run out of stack: deep nesting, aliases of aliases.

    The events of PyYAML come one by one without recursion; its composer, which follows, recurses.
    """
    depth = aliases = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        if depth > MOST_LEVELS or aliases > MOST_ALIASES:
            where = place(event.start_mark.line + 1)  # type: ignore[union-attr]
            if depth > MOST_LEVELS:
                raise FileError(f"{where}: nested deeper than {MOST_LEVELS} levels; two or three are usual")
            raise FileError(f"{where}: more than {MOST_ALIASES} aliases (*name); write the values out")
