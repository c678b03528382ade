"""Progress of long work: one line that is redrawn in a terminal, a log line now and then elsewhere.

tqdm keeps the line at the bottom of the terminal, its text is made here. Log lines take the lock of its lines
(`TerminalHandler`), so none is ever glued onto a bar.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from tqdm import tqdm

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

MAX_NAMED = 10
"""Names shown in a message or a finding; the others are counted."""
LINE_SECONDS = 30.0
"""Between log lines of a bar without a terminal; no minute is silent."""
DRAWN_SECONDS = 0.2
USUAL_COLUMNS = 80
SHORTEST_BAR = 5
ROWS = 24  # Bars below the terminal's last row are hidden; there are never so many.


class _Line(tqdm):
    """A line at the bottom of the terminal, whose text the caller makes; the newest one hides those before it."""

    # tqdm's monitor thread would be forked into workers with whatever lock it holds.
    monitor_interval = 0
    _shown: ClassVar[list["_Line"]] = []

    def __init__(self, text: Callable[[int, bool], str]) -> None:
        self._text = text
        if self._shown:
            self._shown[-1].clear()
        self._shown.append(self)
        # Position and rows are given: tqdm hides a bar in a terminal that does not tell its height.
        place: dict[str, Any] = {"position": 0, "nrows": ROWS, "ncols": USUAL_COLUMNS}
        super().__init__(total=1, leave=False, file=sys.stderr, mininterval=DRAWN_SECONDS, miniters=0, **place)

    def __str__(self) -> str:
        # The last column stays free: some terminals begin a new line when it is written.
        return self._text(_columns() - 1, bool(self.ascii))

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:  # type: ignore[override]
        """Draw the line, unless a newer one is there."""
        return self._shown[-1] is self and bool(super().display(msg, pos))  # type: ignore[func-returns-value]

    def close(self) -> None:
        """Take the line away; the one that it hid comes back."""
        # Not `in` and `remove`: bars of tqdm in the same row are equal.
        others = [one for one in self._shown if one is not self]
        if len(others) == len(self._shown):
            return
        super().close()
        self._shown[:] = others
        if others:
            others[-1].refresh()


# Threads only: no other process draws.
_Line.set_lock(threading.RLock())


class TerminalHandler(logging.StreamHandler):
    """Writes log lines to stderr above the bars, which are redrawn below."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        with _Line.external_write_mode(file=self.stream):
            super().emit(record)


class Bar:
    """Progress of a piece of work: drawn in a terminal, else logged now and then; nothing is left when it ends.

    >>> with Bar("reading", 3, is_shown=False) as bar:
    ...     for _ in range(3):
    ...         bar.update()
    >>> bar.done
    3
    """

    def __init__(
        self,
        what: str,
        total: float | None = None,
        unit: str = "file",
        *,
        done: float = 0,
        note: Callable[[], str] | None = None,
        is_shown: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self.total, self.done = what, total, done
        self._unit, self._note, self._clock = unit, note, clock
        self._done_before, self._began = done, clock()
        self._said = self._began
        self._is_shown = is_shown
        self._line: Any = _Line(self._drawn) if is_shown and has_terminal() else None

    def __enter__(self) -> "Bar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, count: float = 1) -> None:
        """Count so much more as done."""
        self.done += count
        if self._line is not None:
            self._line.update(0)
        elif self._is_shown and self._clock() - self._said >= LINE_SECONDS:
            self._said = self._clock()
            share = f"{100 * self.done / self.total:.0f} %" if self.total else ""
            logger.info("%s: %s", self.what, ", ".join(filter(None, [share, self._status()])))

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items, each counted when the next one is asked for."""
        for item in items:
            yield item
            self.update()

    def close(self) -> None:
        """Take the bar away."""
        self._is_shown = False
        if self._line is not None:
            self._line.close()
            self._line = None

    def _drawn(self, columns: int, is_ascii: bool) -> str:
        """One line of at most so many columns; the bar itself takes what the text leaves."""
        if not self.total:
            return f"{self.what}: {self._status()}"[:columns]
        share = min(1.0, self.done / self.total)
        begin, end = f"{self.what} {100 * share:3.0f} %", self._status()
        width = columns - len(begin) - len(end) - 4
        if width < SHORTEST_BAR:
            return f"{begin} {end}"[:columns]
        filled = round(share * width)
        return f"{begin} |{('#' if is_ascii else '█') * filled}{' ' * (width - filled)}| {end}"

    def _status(self) -> str:
        if self._note is not None:
            return self._note()
        done, total = self._count(self.done), self._count(self.total or 0)
        shown = f"{done} of {total}" if self.total else done
        noun = self._unit if (self.total or self.done) == 1 else plural(self._unit)
        parts = [shown if self._unit == "B" else f"{shown} {noun}"]
        worked, seconds = self.done - self._done_before, self._clock() - self._began
        if worked > 0 and seconds > 0:
            parts.append(f"{self._count(worked / seconds)}/s")
            if self.total:
                parts.append(f"{duration(max(0.0, self.total - self.done) * seconds / worked)} left")
        return ", ".join(parts)

    def _count(self, number: float) -> str:
        return tqdm.format_sizeof(number, "B", 1024) if self._unit == "B" else _number(number)


def has_terminal() -> bool:
    """Whether stderr is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


def duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> duration(3725)
    '1:02:05'
    """
    whole = round(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


def counted(number: float, noun: str) -> str:
    """A number of things.

    >>> counted(1, "file"), counted(1200, "batch")
    ('1 file', '1,200 batches')
    """
    return f"{_number(number)} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """The plural of a regular noun, or of a person."""
    if noun == "person":
        return "people"
    return f"{noun}es" if noun.endswith(("s", "tch")) else f"{noun}s"


def _number(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"


def _columns() -> int:
    try:
        # Not shutil's: that asks stdout, which is a file where results are redirected.
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return columns or USUAL_COLUMNS
