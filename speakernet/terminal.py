"""Progress of long work: a bar that is redrawn in a terminal, and occasional log lines elsewhere.

tqdm keeps the bar at the bottom of the terminal; its text is made here. `TerminalHandler` takes the
bars' lock, so that log lines never end up on the line of a bar.
"""

import contextlib
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

from tqdm import tqdm

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

MAX_NAMED = 10
"""Maximum number of names shown in a message or a finding; the rest are only counted."""
LINE_SECONDS = 30.0
"""Seconds between log lines without a terminal."""
DRAWN_SECONDS = 0.2
NOTEBOOK_BAR = "{desc}: {percentage:3.0f}% {bar} {elapsed}{postfix}"
USUAL_COLUMNS = 80
SHORTEST_BAR = 5
ROWS = 24  # tqdm hides bars below the terminal's last row; there are never this many


class _Line(tqdm):
    """A line at the bottom of the terminal with text from the caller; a new line hides the earlier
    ones.
    """

    # Workers would inherit locks held by tqdm's monitor thread when they are forked.
    monitor_interval = 0
    _shown: ClassVar[list["_Line"]] = []

    def __init__(self, text: Callable[[int, bool], str]) -> None:
        self._text = text
        if self._shown:
            self._shown[-1].clear()
        self._shown.append(self)
        # Position and rows are fixed, because tqdm hides bars in a terminal of unknown height.
        place: dict[str, Any] = {"position": 0, "nrows": ROWS, "ncols": USUAL_COLUMNS}
        super().__init__(
            total=1, leave=False, file=sys.stderr, mininterval=DRAWN_SECONDS, miniters=0, **place
        )

    def __str__(self) -> str:
        # The last column stays free, because some terminals start a new line when it is written.
        return self._text(_columns() - 1, bool(self.ascii))

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:  # type: ignore[override]
        """Draw the line unless a newer one hides it."""
        return self._shown[-1] is self and bool(super().display(msg, pos))  # type: ignore[func-returns-value]

    def close(self) -> None:
        """Remove the line and show the one it hid."""
        if not self.disable:
            super().close()
            # Not `remove`, because tqdm's bars compare equal if they are in the same row.
            self._shown[:] = [line for line in self._shown if line is not self]
            if self._shown:
                self._shown[-1].refresh()


# A lock for threads is enough, because no other process draws.
_Line.set_lock(threading.RLock())


class TerminalHandler(logging.StreamHandler):
    """Writes log lines above the bars, which are redrawn below."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        with _Line.external_write_mode(file=self.stream):
            super().emit(record)


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns.

    >>> text_table([["name", "speech"], ["Ada", "3.0 s"]])
    ['name  speech', 'Ada   3.0 s']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        lines.append("  ".join(map(str.ljust, row, widths)).rstrip())
    return lines


class Bar(contextlib.ExitStack):
    """Progress of a task: a bar in a terminal, which disappears when it is closed, and occasional
    log lines elsewhere.

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
        self.what = what
        self.total = total
        self.done = done
        self._unit = unit
        self._note = note
        self._clock = clock
        self._is_shown = is_shown
        self._done_before = done
        self._began = clock()
        self._logged = self._began
        self._line: Any = None
        if is_shown and sys.stderr is not None and sys.stderr.isatty():
            self._line = self.enter_context(_Line(self._draw_line))
        elif is_shown and "ipykernel" in sys.modules and importlib.util.find_spec("ipywidgets"):
            # Late: importing it looks for a notebook. Without ipywidgets it would print a line at
            # each update.
            from tqdm.auto import tqdm as notebook_bar

            self._line = self.enter_context(
                notebook_bar(None, what, total, initial=done, bar_format=NOTEBOOK_BAR)
            )

    def update(self, count: float = 1) -> None:
        """Add to the amount done."""
        self.done += count
        if self._line is not None:
            self._line.set_postfix_str(self._note() if self._note else "", refresh=False)
            self._line.update(count)
        elif self._is_shown and self._clock() - self._logged >= LINE_SECONDS:
            self._logged = self._clock()
            share = f"{100 * self.done / self.total:.0f} %" if self.total else ""
            logger.info("%s: %s", self.what, ", ".join(filter(None, [share, self._status()])))

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items, counting each when the next is requested."""
        for item in items:
            yield item
            self.update()

    def _draw_line(self, columns: int, is_ascii: bool) -> str:
        """One line of at most `columns` characters; the bar takes the space that the text
        leaves.
        """
        if not self.total:
            return f"{self.what}: {self._status()}"[:columns]
        # Never above 100 %, because a total may be an estimate.
        share = min(1.0, self.done / self.total)
        begin = f"{self.what} {100 * share:3.0f} %"
        end = self._status()
        width = columns - len(begin) - len(end) - 4
        # In a narrow terminal the numbers matter more than the bar.
        if width < SHORTEST_BAR:
            return f"{begin} {end}"[:columns]
        filled = round(share * width)
        return f"{begin} |{('#' if is_ascii else '█') * filled}{' ' * (width - filled)}| {end}"

    def _status(self) -> str:
        if self._note is not None:
            return self._note()
        amount = self._count(self.done)
        if self.total is not None:
            amount += f" of {self._count(self.total)}"
        if self._unit != "B":
            amount += f" {plural(self.total or self.done, self._unit)}"
        parts = [amount]
        # The speed is that of this start: what an earlier one had done took no time now.
        worked = self.done - self._done_before
        seconds = self._clock() - self._began
        if worked > 0 and seconds > 0:
            parts.append(f"{self._count(worked / seconds)}/s")
            if self.total:
                left = max(0.0, self.total - self.done) * seconds / worked
                parts.append(f"{duration(left)} left")
        return ", ".join(parts)

    def _count(self, number: float) -> str:
        return tqdm.format_sizeof(number, "B", 1024) if self._unit == "B" else _number(number)


def duration(seconds: float) -> str:
    """Seconds as hours, minutes and seconds.

    >>> duration(3725)
    '1:02:05'
    """
    whole = round(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


def counted(number: float, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "file"), counted(1200, "batch")
    ('1 file', '1,200 batches')
    """
    return f"{_number(number)} {plural(number, noun)}"


def plural(number: float, noun: str) -> str:
    """The singular or plural of a regular noun, or of person, after a number."""
    if number == 1:
        return noun
    if noun == "person":
        return "people"
    return f"{noun}es" if noun.endswith(("s", "tch")) else f"{noun}s"


def _number(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"


def _columns() -> int:
    # Not shutil's function, which asks stdout; results may be redirected to a file.
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno()).columns or USUAL_COLUMNS
    return USUAL_COLUMNS
