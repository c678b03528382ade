"""What a preparation step found, made, skipped and could not do, told once at its end.

Every step (download, extract, convert, …) counts into one `StepSummary`. Broken items go straight to a text file, one a
line with the reason, so that a million bad files cost no memory. The exit code of a script says whether anything is
missing. Nothing here knows what an item is.
"""

import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from speakernet.files import atomic_write
from speakernet.terminal import MAX_NAMED

logger = logging.getLogger(__name__)


def one_line(text: str) -> str:
    r"""The text with line breaks, tabs and other control characters escaped, so that it fits one line of a file or log.

    >>> one_line("two\nlines")
    'two\\nlines'
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


class StepSummary:
    """Counts of one step: found = made + skipped + broken; a context manager that writes the file of broken items.

    `made` and `skipped` name the two in the step's own words: a scan makes nothing, it finds what is usable.

    Safe to count into from several threads. The file of broken items appears under its final name only when the step
    ends, and an old one is removed when nothing is broken any more.
    """

    def __init__(self, step: str, folder: str | Path, made: str = "made", skipped: str = "skipped") -> None:
        self.step = step
        self._words = (made, skipped)
        self.broken_path = Path(folder) / f"broken_{step}.txt"
        self.found = 0
        self.made = 0
        self.skipped = 0
        self.broken = 0
        self.first_broken: list[str] = []
        self._lock = threading.Lock()
        self._partial = self.broken_path.with_name(f".{self.broken_path.name}.tmp")

    def __enter__(self) -> "StepSummary":
        self._partial.unlink(missing_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Also where the step failed: what was broken so far may be why.
        if self.broken:
            self._partial.replace(self.broken_path)
        else:
            self.broken_path.unlink(missing_ok=True)

    def add_made(self, count: int = 1) -> None:
        """Count items that were made now."""
        with self._lock:
            self.found += count
            self.made += count

    def add_skipped(self, count: int = 1) -> None:
        """Count items that were already there, whole."""
        with self._lock:
            self.found += count
            self.skipped += count

    def add_broken(self, item: str, reason: str) -> None:
        """Count an item that could not be done and write it down."""
        line = f"{one_line(item)}\t{one_line(reason)}"
        with self._lock:
            self.found += 1
            self.broken += 1
            # The rest stands in the file alone: a million of them must not be kept in memory.
            if len(self.first_broken) < MAX_NAMED:
                self.first_broken.append(line)
            self._partial.parent.mkdir(parents=True, exist_ok=True)
            with self._partial.open("a", encoding="utf-8", newline="\n") as file:
                file.write(line + "\n")

    def text(self) -> str:
        """The counts for people, one line."""
        made, skipped = self._words
        counts = f"{self.found} found, {self.made} {made}, {self.skipped} {skipped}, {self.broken} broken"
        return f"{self.step}: {counts}" + (f" (listed in {self.broken_path})" if self.broken else "")

    def log(self) -> None:
        """Log the counts, and the first broken items as warnings."""
        logger.info("%s", self.text())
        for line in self.first_broken:
            logger.warning("%s: broken: %s", self.step, line)


def finish(summaries: Iterable[StepSummary], report_path: str | Path | None = None) -> int:
    """Log every step's counts, also into `report_path`, and give the exit code: 1 if anything is broken."""
    summaries = list(summaries)
    for summary in summaries:
        summary.log()
    if report_path is not None:
        with atomic_write(report_path) as file:
            file.writelines(summary.text() + "\n" for summary in summaries)
    return 1 if any(summary.broken for summary in summaries) else 0
