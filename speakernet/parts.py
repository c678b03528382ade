"""Work in parts: `--part 2/4` is the second of four that as many machines, or tasks of a job array, do side by side.

Every command that takes `--part` gives each part neighbouring rows of the same order, leaves the outcome of each in a
folder that all of them see, and lets whichever part comes last put them together. Knows nothing of the work itself.
"""

import argparse
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Rows = TypeVar("Rows", bound=Sequence)

PATTERN = re.compile(r"part-(\d+)-of-(\d+)")
MOST_PARTS = 9999
MOST_NAMED = 20
"""Of missing parts, in messages."""


class PartError(ValueError):
    """Parts that do not make a whole; the message says which, and what to do."""


@dataclass(frozen=True, order=True)
class WorkPart:
    """One of several parts, counted from 1.

    >>> WorkPart(2, 4).name, str(WorkPart(2, 4))
    ('part-0002-of-0004', '2/4')
    """

    number: int
    count: int

    @property
    def name(self) -> str:
        """What its file or folder is called; in the order of the parts."""
        return f"part-{self.number:04d}-of-{self.count:04d}"

    @property
    def is_whole(self) -> bool:
        """Whether there is but one part."""
        return self.count == 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


WHOLE = WorkPart(1, 1)


def parse_part(text: str) -> WorkPart:
    """What `--part` says.

    Raises:
        PartError: not i/n with i from 1 to n.

    >>> parse_part("2/4")
    WorkPart(number=2, count=4)
    """
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text.strip())
    if match is None:
        raise PartError(f"--part {text}: expected i/n, such as 2/4 for the second of four parts")
    number, count = int(match[1]), int(match[2])
    if not 1 <= count <= MOST_PARTS:
        raise PartError(f"--part {text}: {count} parts; expected 1 to {MOST_PARTS}")
    if not 1 <= number <= count:
        raise PartError(
            f"--part {text}: there is no part {number} of {count}; the parts are counted from 1, so give 1/{count} to "
            f"{count}/{count} (in a job array the number of the task, plus 1 where it counts from 0)"
        )
    return WorkPart(number, count)


def add_part_argument(parser: argparse.ArgumentParser, more: str) -> None:
    """The option `--part`; `more` says what becomes of the parts."""
    parser.add_argument(
        "--part",
        metavar="I/N",
        help=f"do the I-th of N parts, counted from 1, as one of N machines or of a job array; {more}",
    )


def share(rows: Rows, number: int, count: int) -> Rows:
    """The rows of part `number` of `count`: neighbours, so that the parts one after the other are the whole.

    Sizes differ by one at most; of fewer rows than parts some parts get none.

    >>> [share(range(10), number, 4) for number in (1, 2, 3, 4)]
    [range(0, 2), range(2, 5), range(5, 7), range(7, 10)]
    """
    first, last = (len(rows) * one // count for one in (number - 1, number))
    return rows[first:last]  # type: ignore[return-value]


def is_in_part(name: str, part: WorkPart) -> bool:
    """Whether a part has an item by its name alone: for items that come and go while the parts are done.

    >>> [is_in_part("a.m4a", WorkPart(number, 4)) for number in (1, 2, 3, 4)].count(True)
    1
    """
    return zlib.crc32(name.encode("utf-8", "surrogateescape")) % part.count == part.number - 1


def parts_in(folder: str | Path, suffix: str = "") -> dict[WorkPart, Path]:
    """What lies in a folder under the names of parts, in their order.

    Args:
        folder: need not be there.
        suffix: what follows the names.
    """
    folder = Path(folder)
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = PATTERN.fullmatch(path.name.removesuffix(suffix)) if path.name.endswith(suffix) else None
        if match is not None:
            found[WorkPart(int(match[1]), int(match[2]))] = path
    return dict(sorted(found.items()))


def missing_parts(found: Sequence[WorkPart], folder: str | Path) -> list[WorkPart]:
    """The parts that are not there yet, of one at least that is.

    Raises:
        PartError: parts of another number of parts lie among them.
    """
    counts = sorted({part.count for part in found})
    if len(counts) > 1:
        raise PartError(
            f"{folder} holds parts of {' and of '.join(map(str, counts))}; remove those of the wrong number, or give "
            "every machine the same one"
        )
    return [part for part in (WorkPart(one, counts[0]) for one in range(1, counts[0] + 1)) if part not in set(found)]


def list_parts(some: Sequence[WorkPart]) -> str:
    """Parts for a message.

    >>> list_parts([WorkPart(2, 4), WorkPart(3, 4)])
    '2/4, 3/4'
    """
    shown = ", ".join(map(str, some[:MOST_NAMED]))
    return shown if len(some) <= MOST_NAMED else f"{shown} and {len(some) - MOST_NAMED} more"
