"""Parts found by name in tables: what each row names, and errors that say what was meant.

A table is a plain dictionary from name to `Part` (`MODELS`, `LOSSES`, …). A row names the options class of the part and
where the part itself is written; that module is imported when the part is built and not before, so that a table can be
looked at without torch. Nothing registers itself by being imported and no option is swallowed by `**kwargs`.
"""

import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

Row = TypeVar("Row")


@dataclasses.dataclass(frozen=True)
class Part:
    """A row of a table."""

    options: type
    """The part's options dataclass; its docstring says what the part is."""
    path: str
    """Where the part is written: `package.module:name`."""

    def load(self) -> Any:
        """The class or function itself."""
        module, _, name = self.path.partition(":")
        return getattr(importlib.import_module(module), name)


class UnknownNameError(ValueError):
    """A name that its table does not have; the message names the nearest ones."""


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names most like `name`, best first; letter case does not count."""
    known = list(known)
    by_folded = {candidate.casefold(): candidate for candidate in known}
    # Papers write CAM++ where names of code write CAMPPlus.
    matches = difflib.get_close_matches(name.casefold().replace("+", "p"), by_folded, n=count, cutoff=0.5)
    return [by_folded[match] for match in matches]


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest names, or all of them where nothing is near."""
    known = sorted(known)
    near = nearest(name, known)
    if near:
        return "did you mean " + " or ".join(repr(one) for one in near) + "?"
    return "known: " + ", ".join(known)


def lookup(table: Mapping[str, Row], name: str, kind: str = "entry") -> Row:
    """The table's row of that name.

    Raises:
        UnknownNameError: the table has no such name; the message names the nearest ones.
    """
    if name not in table:
        raise UnknownNameError(f"unknown {kind} {name!r}; {suggestion(name, table)}")
    return table[name]


def options_of(table: Mapping[str, Part], name: str, given: Mapping[str, Any], kind: str = "entry") -> Any:
    """The options of the part `name` with the values that are given, the rest at their defaults.

    Raises:
        ValueError: unknown name or unknown option; the message names the nearest valid one.
    """
    owner = lookup(table, name, kind).options
    known = [field.name for field in dataclasses.fields(owner)]
    for option in given:
        if option not in known:
            raise ValueError(f"{kind} {name!r} has no option {option!r}; {suggestion(option, known)}")
    return owner(**given)


def create(part: Part, options: Any, **context: Any) -> Any:
    """Build a part from its options, whole, and from what its signature asks for of the context (facts of the run)."""
    target = part.load()
    offered = {"options": options, **context}
    return target(**{name: offered[name] for name in inspect.signature(target).parameters if name in offered})
