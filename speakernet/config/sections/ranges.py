"""Range checks shared by the sections: each yields (field name, what was found and what is expected)."""

from collections.abc import Iterator
from typing import Any


def at_least(section: Any, lowest: float, *fields: str) -> Iterator[tuple[str, str]]:
    """Fields whose value is below `lowest`."""
    for name in fields:
        value = getattr(section, name)
        if value < lowest:
            yield name, f"{value}; expected {lowest} or more"


def positive(section: Any, *fields: str) -> Iterator[tuple[str, str]]:
    """Fields whose value is not above zero."""
    for name in fields:
        value = getattr(section, name)
        if not value > 0:
            yield name, f"{value}; expected a number above 0"


def between(section: Any, lowest: float, highest: float, *fields: str) -> Iterator[tuple[str, str]]:
    """Fields whose value is outside `lowest` … `highest`, both allowed."""
    for name in fields:
        value = getattr(section, name)
        if not lowest <= value <= highest:
            yield name, f"{value}; expected {lowest:g} to {highest:g}"
