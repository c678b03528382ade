"""Progress of long work: a bar that is redrawn in a terminal, and occasional log lines elsewhere.

tqdm draws the bar at the bottom of the terminal. `TerminalHandler` takes the bars' lock, so that
log lines never end up on the line of a bar.
"""

import contextlib
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

MAX_NAMED = 10
"""Maximum number of names shown in a message or a finding; the rest are only counted."""
LINE_SECONDS = 30.0
"""Seconds between log lines without a terminal."""
DRAWN_SECONDS = 0.2
NOTE_BAR = "{desc}: {percentage:3.0f}% {bar} {elapsed}{postfix}"


class _Line(tqdm):
    """A bar at the bottom of the terminal."""

    # tqdm's monitor is a thread that holds locks, which loader workers would inherit when they are
    # forked; the first bar of such a worker would then wait forever.
    monitor_interval = 0


# By default tqdm also takes a lock between processes, which costs a semaphore per program. A lock
# for threads is enough, because no other process of ours draws.
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
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


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
    ) -> None:
        super().__init__()
        self.what = what
        self.total = total
        self.done = done
        self._unit = unit
        self._note = note
        self._is_shown = is_shown
        # The rate is that of this process: what an earlier one did took none of its time.
        self._done_before = done
        self._began = self._logged = time.monotonic()
        self._line: Any = None
        style: dict[str, Any] = {"initial": done, "unit": unit}
        if note is not None:
            # The note has its own numbers; tqdm's would repeat them.
            style["bar_format"] = NOTE_BAR
        if unit == "B":
            style |= {"unit_scale": True, "unit_divisor": 1024}
        if is_shown and sys.stderr is not None and sys.stderr.isatty() and _columns():
            # The amount done may also fall, when a run begins an epoch again, so the bar is drawn
            # by time (`miniters` 0) and not by how far it has come.
            line = _Line(
                None,
                what,
                total,
                leave=False,
                file=sys.stderr,
                mininterval=DRAWN_SECONDS,
                miniters=0,
                dynamic_ncols=True,
                **style,
            )
            self._line = self.enter_context(line)
        elif is_shown and "ipykernel" in sys.modules and importlib.util.find_spec("ipywidgets"):
            # Late: importing it looks for a notebook. Without ipywidgets it would print a line at
            # each update.
            from tqdm.auto import tqdm as notebook_bar

            self._line = self.enter_context(notebook_bar(None, what, total, **style))

    def update(self, count: float = 1) -> None:
        """Add to the amount done."""
        self.done += count
        if self._line is not None:
            if self._note is not None:
                self._line.set_postfix_str(self._note(), refresh=False)
            # Set, not only added to, because callers may also assign `done`.
            self._line.n = self.done - count
            self._line.update(count)
        elif self._is_shown and time.monotonic() - self._logged >= LINE_SECONDS:
            self._logged = time.monotonic()
            share = f"{100 * self.done / self.total:.0f} %" if self.total else ""
            logger.info("%s: %s", self.what, ", ".join(filter(None, [share, self._status()])))

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items, counting each when the next is requested."""
        for item in items:
            yield item
            self.update()

    def _status(self) -> str:
        if self._note is not None:
            return self._note()
        amount = self._count(self.done)
        if self.total is not None:
            amount += f" of {self._count(self.total)}"
        if self._unit != "B":
            amount += f" {plural(self.total or self.done, self._unit)}"
        parts = [amount]
        worked = self.done - self._done_before
        seconds = time.monotonic() - self._began
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


# In a terminal that does not tell its width (a serial console, some containers) tqdm would draw
# empty lines, so log lines take the place of the bar there. Standard error is asked and not, as by
# shutil's function, standard output, which may be redirected to a file.
def _columns() -> int:
    """The width of the terminal; 0 if it is unknown."""
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno()).columns
    return 0
