"""What a check found: a level, a sentence, and what to do; and the table of them. Checks themselves are elsewhere."""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "error")
TABLE_WIDTH = 118


@dataclass(frozen=True)
class Finding:
    """One thing that a check found.

    Attributes:
        level: `ok`, `warning` (works, but look at it) or `error` (will fail, or the result means nothing).
        check: what was looked at, in two or three words.
        message: what was found, with figures.
        advice: what to do; empty when all is well.
        examples: the first few items concerned.
    """

    level: Level
    check: str
    message: str
    advice: str = ""
    examples: tuple[str, ...] = ()

    def __str__(self) -> str:
        sentence = f"{self.check}: {self.message}"
        if self.examples:
            sentence += f" (first: {', '.join(self.examples)})"
        return sentence + (f"; {self.advice}" if self.advice else "")


def worst(findings: Iterable[Finding]) -> Level:
    """The worst level among the findings; `ok` of none.

    >>> worst([Finding("ok", "a", "fine"), Finding("warning", "b", "odd")])
    'warning'
    """
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")


def exit_code(findings: Iterable[Finding]) -> int:
    """0 when all is well, 1 with warnings only, 2 with an error."""
    return LEVELS.index(worst(findings))


def closing_line(findings: Iterable[Finding]) -> str:
    """What the findings come to.

    >>> closing_line([Finding("warning", "balance", "odd"), Finding("ok", "rate", "16000 Hz")])
    '1 warning: you can train'
    """
    levels = [finding.level for finding in findings]
    numbers = {level: levels.count(level) for level in ("error", "warning")}
    counts = [f"{number} {level}{'s' * (number > 1)}" for level, number in numbers.items() if number]
    stops = "mend the errors first: training would stop, or its result mean nothing"
    return f"{', '.join(counts) or 'nothing to complain of'}: {stops if numbers['error'] else 'you can train'}"


def table(findings: Iterable[Finding]) -> str:
    """The findings as text: level, check, what was found, and what to do on lines of its own."""
    findings = list(findings)
    width = max([len(finding.check) for finding in findings] + [5])
    lines = [f"{'level':<8} {'check':<{width}} found"]
    indent = " " * (width + 10)
    for finding in findings:
        head = f"{finding.level:<8} {finding.check:<{width}} "
        lines += _wrapped(finding.message, head, indent)
        # A line each: paths are long, and a list of ten in a row cannot be read.
        for example in finding.examples:
            lines += _wrapped(example, indent + "- ", indent + "  ")
        if finding.advice:
            lines += _wrapped(finding.advice, indent + "-> ", indent + "   ")
    return "\n".join(lines)


def _wrapped(text: str, first: str, following: str) -> list[str]:
    return textwrap.wrap(
        text, TABLE_WIDTH, initial_indent=first, subsequent_indent=following, break_long_words=False,
        break_on_hyphens=False,
    ) or [first]  # fmt: skip
