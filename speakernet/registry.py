"""Build an object from a table by name, with errors that name what was meant.

A table is a plain dictionary from name to class or function (`MODELS`, `LOSSES`, …). Nothing registers itself by being
imported and no option is swallowed by `**kwargs`: the options are checked against the signature before the call.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names most like `name`, best first; letter case does not count."""
    known = list(known)
    by_folded = {candidate.casefold(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.casefold(), by_folded, n=count, cutoff=0.5)
    return [by_folded[match] for match in matches]


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest names, or all of them where nothing is near."""
    known = sorted(known)
    near = nearest(name, known)
    if near:
        return "did you mean " + " or ".join(repr(one) for one in near) + "?"
    return "known: " + ", ".join(known)


def lookup(table: Mapping[str, Callable[..., Any]], name: str, kind: str = "entry") -> Callable[..., Any]:
    """The table's entry of that name.

    Raises:
        ValueError: the table has no such name; the message names the nearest ones.
    """
    if name not in table:
        raise ValueError(f"unknown {kind} {name!r}; {suggestion(name, table)}")
    return table[name]


def create(
    table: Mapping[str, Callable[..., Any]], name: str, options: Mapping[str, Any] | None = None, kind: str = "entry"
) -> Any:
    """Call the table's entry `name` with `options`, checked against its signature first.

    Raises:
        ValueError: unknown name, unknown option or missing option; the message names the nearest valid one.

    >>> create({"add": lambda left, right=1: left + right}, "add", {"left": 2})
    3
    """
    target = lookup(table, name, kind)
    options = dict(options or {})
    parameters = inspect.signature(target).parameters
    allowed = [key for key, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    for option in options:
        if option not in allowed:
            raise ValueError(f"{kind} {name!r} has no option {option!r}; {suggestion(option, allowed)}")
    missing = [
        key
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and key not in options
    ]
    if missing:
        raise ValueError(f"{kind} {name!r} needs the option {missing[0]!r}, which was not given")
    return target(**options)
