"""Progress of long work: one line that is redrawn in a terminal, a log line now and then elsewhere.

tqdm keeps the line at the bottom of the terminal, its text is made here. Log lines take the lock of its lines
(`TerminalHandler`), so none is ever glued onto a bar.
"""

import contextlib
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, TypeVar

from tqdm import tqdm

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

MAX_NAMED = 10
"""Names shown in a message or a finding; the others are counted."""
LINE_SECONDS = 30.0
"""Between log lines of a bar without a terminal; no minute is silent."""
DRAWN_SECONDS = 0.2
NOTEBOOK_BAR = "{desc}: {percentage:3.0f}% {bar} {elapsed}{postfix}"
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
        if not self.disable:
            super().close()
            # Not `remove`: bars of tqdm in the same row are equal.
            self._shown[:] = [one for one in self._shown if one is not self]
            if self._shown:
                self._shown[-1].refresh()


# Threads only: no other process draws.
_Line.set_lock(threading.RLock())


class TerminalHandler(logging.StreamHandler):
    """Writes log lines to stderr above the bars, which are redrawn below."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        with _Line.external_write_mode(file=self.stream):
            super().emit(record)


class Bar(contextlib.ExitStack):
    """Progress of a piece of work: drawn in a terminal, else logged now and then; nothing is left when it is closed.

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
        super().__init__()
        self.what, self.total, self.done = what, total, done
        self._unit, self._note, self._clock, self._is_shown = unit, note, clock, is_shown
        self._done_before, self._began = done, clock()
        self._logged = self._began
        self._line: Any = None
        if is_shown and sys.stderr is not None and sys.stderr.isatty():
            self._line = self.enter_context(_Line(self._drawn))
        elif is_shown and "ipykernel" in sys.modules and importlib.util.find_spec("ipywidgets"):
            # Late: it looks for a notebook. Without widgets it would add a line of text at each update.
            from tqdm.auto import tqdm as notebook_bar

            self._line = self.enter_context(notebook_bar(None, what, total, initial=done, bar_format=NOTEBOOK_BAR))

    def update(self, count: float = 1) -> None:
        """Count so much more as done."""
        self.done += count
        if self._line is not None:
            self._line.set_postfix_str(self._note() if self._note else "", refresh=False)
            self._line.update(count)
        elif self._is_shown and self._clock() - self._logged >= LINE_SECONDS:
            self._logged = self._clock()
            share = f"{100 * self.done / self.total:.0f} %" if self.total else ""
            logger.info("%s: %s", self.what, ", ".join(filter(None, [share, self._status()])))

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items, each counted when the next one is asked for."""
        for item in items:
            yield item
            self.update()

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
        parts = [" of ".join(self._count(one) for one in (self.done, self.total) if one is not None)]
        if self._unit != "B":
            parts[0] += f" {plural(self.total or self.done, self._unit)}"
        worked, seconds = self.done - self._done_before, self._clock() - self._began
        if worked > 0 and seconds > 0:
            parts.append(f"{self._count(worked / seconds)}/s")
            if self.total:
                parts.append(f"{duration(max(0.0, self.total - self.done) * seconds / worked)} left")
        return ", ".join(parts)

    def _count(self, number: float) -> str:
        return tqdm.format_sizeof(number, "B", 1024) if self._unit == "B" else _number(number)


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
    return f"{_number(number)} {plural(number, noun)}"


def plural(number: float, noun: str) -> str:
    """A regular noun, or a person, as it follows a number."""
    several = "people" if noun == "person" else f"{noun}es" if noun.endswith(("s", "tch")) else f"{noun}s"
    return noun if number == 1 else several


def _number(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"


def _columns() -> int:
    # Not shutil's: that asks stdout, which is a file where results are redirected.
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno()).columns or USUAL_COLUMNS
    return USUAL_COLUMNS
