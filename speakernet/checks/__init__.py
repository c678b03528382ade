"""Checks of lists, audio and machine before a run: training runs `lists.quick_check`, `speakernet
doctor` runs all.
"""

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from speakernet.terminal import MAX_NAMED, counted

Level = Literal["ok", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "error")
TABLE_WIDTH = 118


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


def closing_line(findings: Iterable[Finding], *, has_data: bool = True) -> str:
    """The conclusion in one line; without data it concerns only the machine.

    >>> closing_line([Finding("warning", "balance", "odd"), Finding("ok", "rate", "16000 Hz")])
    '1 warning: you can train'
    """
    # Many read only the last line, so it must not promise more than was checked.
    levels = Counter(finding.level for finding in findings)
    counts = [counted(levels[level], level) for level in ("error", "warning") if levels[level]]
    conclusion = "you can train"
    if levels["error"]:
        conclusion = "fix the errors before you train"
    elif not has_data:
        conclusion = "you can train on this machine; add --config or --list to check data"
    return f"{', '.join(counts) or 'no problems'}: {conclusion}"


def table(findings: Iterable[Finding]) -> str:
    """The findings as text: level, check and message, with examples and advice on separate
    lines.
    """
    # Examples and advice get lines of their own, because paths do not fit into columns.
    findings = list(findings)
    width = max([len(finding.check) for finding in findings] + [5])
    indent = " " * (width + 10)
    lines = [f"{'level':<8} {'check':<{width}} found"]
    for finding in findings:
        lines += _wrap(f"{finding.level:<8} {finding.check:<{width}} ", finding.message)
        for example in finding.examples:
            lines += _wrap(f"{indent}- ", example)
        if finding.advice:
            lines += _wrap(f"{indent}-> ", finding.advice)
    return "\n".join(lines)


def _wrap(start: str, text: str) -> list[str]:
    """The lines of a text that begins after `start`, where its further lines are indented to."""
    # Long words are mostly paths, which people copy, so they are not broken.
    wrapper = textwrap.TextWrapper(
        TABLE_WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapper.wrap(text) or [start]
