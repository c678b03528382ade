"""Parts of a long job that several machines or tasks of a job array process in parallel.

Used by `pack` and `embed`: each part writes into a shared folder, and the last one joins them.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Rows = TypeVar("Rows", bound=Sequence)

PART_NAME = re.compile(r"part-(\d+)-of-(\d+)")
MAX_PARTS = 9999  # names have four digits, so that they sort as text
MAX_PARTS_NAMED = 20


class PartError(ValueError):
    """Parts that do not form a whole; the message names them and what to do."""


@dataclass(frozen=True, order=True)
class WorkPart:
    """One of several parts of a job, counted from 1, which machines or tasks of a job array process
    in parallel.

    Each part processes neighbouring rows and writes its result to a shared folder; the last to
    finish joins them.

    >>> WorkPart(2, 4).name, str(WorkPart(2, 4))
    ('part-0002-of-0004', '2/4')
    """

    number: int
    count: int

    @property
    def name(self) -> str:
        """The name of the part's file or folder, which sorts by number."""
        return f"part-{self.number:04d}-of-{self.count:04d}"

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


WHOLE = WorkPart(1, 1)
PART_HELP = "process part I of N, counted from 1, on one of N machines or in a job array"


def parse_part(text: str) -> WorkPart:
    """Parse the value of `--part`.

    >>> parse_part("2/4")
    WorkPart(number=2, count=4)
    """
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= MAX_PARTS:
        raise PartError(
            f"--part {text}: expected i/n with i from 1 to n, n up to {MAX_PARTS}, such as 2/4 for "
            "the second of four parts (in a job array, i is the task number, plus 1 if that counts "
            "from 0)"
        )
    return WorkPart(int(match[1]), int(match[2]))


def share(rows: Rows, number: int, count: int) -> Rows:
    """The neighbouring rows of part `number` of `count`; the sizes of parts differ by at most one.

    >>> [share(range(10), number, 4) for number in (1, 2, 3, 4)]
    [range(0, 2), range(2, 5), range(5, 7), range(7, 10)]
    """
    # Each bound is computed by itself: parts of one size, rounded up, would leave the last ones
    # short or empty. Rows are neighbours, so that joining does not have to reorder them and a part
    # reads one stretch of an archive.
    first = len(rows) * (number - 1) // count
    return rows[first : len(rows) * number // count]  # type: ignore[return-value]


def parts_in(folder: str | Path, suffix: str = "") -> dict[WorkPart, Path]:
    """Part -> file or folder named after it plus `suffix`, in order; the folder need not exist."""
    parts = {}
    for path in Path(folder).glob(f"part-*{suffix}"):
        # The folder also has locks and files that are still being written.
        if match := PART_NAME.fullmatch(path.name.removesuffix(suffix)):
            parts[WorkPart(int(match[1]), int(match[2]))] = path
    return dict(sorted(parts.items()))


def missing_parts(finished: Collection[WorkPart], folder: str | Path) -> list[WorkPart]:
    """The unfinished parts, given at least one finished part."""
    counts = sorted({part.count for part in finished})
    if len(counts) > 1:
        raise PartError(
            f"{folder} has parts of {' and of '.join(map(str, counts))}; remove those with the "
            "wrong total, or give every machine the same total"
        )
    every_part = {WorkPart(number, counts[0]) for number in range(1, counts[0] + 1)}
    return sorted(every_part.difference(finished))


def list_parts(some: Sequence[WorkPart]) -> str:
    """Parts as text for a message.

    >>> list_parts([WorkPart(2, 4), WorkPart(3, 4)])
    '2/4, 3/4'
    """
    names = ", ".join(map(str, some[:MAX_PARTS_NAMED]))
    return f"{names} and more" if len(some) > MAX_PARTS_NAMED else names
