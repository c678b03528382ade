"""Checks of lists, audio and machine before a run: training runs `lists.quick_check`, `speakernet
doctor` runs all.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from speakernet.terminal import MAX_NAMED, counted

Level = Literal["ok", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "error")


@dataclass(frozen=True)
class Finding:
    """One result of a check."""

    level: Level
    """`ok`, `warning` (works, but look at it) or `error` (training fails, or its result is
    meaningless)."""
    check: str
    """What was checked, in two or three words."""
    message: str
    """What was found, with figures."""
    advice: str = ""
    """What to do; empty if all is well."""
    examples: tuple[str, ...] = ()
    """The first few items affected."""

    def __str__(self) -> str:
        text = f"{self.check}: {self.message}"
        if self.examples:
            text += f" (first: {', '.join(self.examples[:3])})"
        return f"{text}; {self.advice}" if self.advice else text


def findings_for_rows(
    level: Level,
    check: str,
    rows: np.ndarray | Sequence[int],
    name_of: Callable[[int], str],
    noun: str,
    advice: str,
) -> list[Finding]:
    """A finding that counts `rows` as `noun` and names the first few; an empty list if there are no
    rows.
    """
    # Callers append the result unconditionally, so no rows must give no finding.
    if not len(rows):
        return []
    examples = tuple(name_of(int(row)) for row in rows[:MAX_NAMED])
    return [Finding(level, check, counted(len(rows), noun), advice, examples)]


def worst(findings: Iterable[Finding]) -> Level:
    """The worst level among the findings; `ok` if there are none.

    >>> worst([Finding("ok", "a", "fine"), Finding("warning", "b", "odd")])
    'warning'
    """
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")
