"""A folder of voices prepared by several machines: each converts its share of the files and reads their headers.

What a part has done it leaves beside the lists, in a file that appears when it is whole. Whoever comes last has all of
them, and makes of them the lists that one machine would have made.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speakernet.corpora.conversion import Conversion
from speakernet.corpora.summary import StepSummary
from speakernet.corpora.utterances import Row
from speakernet.data.lists import StringTable
from speakernet.data.lookup import LookupTable, pack_texts, unpack_texts
from speakernet.files import (
    PartError,
    WorkPart,
    atomic_write,
    list_parts,
    missing_parts,
    parts_in,
    read_arrays,
    reading,
    share,
)
from speakernet.options import SAMPLE_RATE

FOLDER, SUFFIX, WORK_SUFFIX = "prepared_parts", ".npz", ".work"
WHAT = "what a part of the preparation leaves; remove it and do that part again"


@dataclass(frozen=True)
class Voices:
    """The utterances of a folder.

    Attributes:
        plain: those that are read where they lie.
        foreign: those that are converted first.
        conversions: of the foreign ones, in their order.
    """

    plain: Sequence[Row]
    foreign: Sequence[Row]
    conversions: Sequence[Conversion]

    def converted(self, is_made: np.ndarray | None = None) -> list[Row]:
        """The plain ones, and the foreign ones by the files that were made of them.

        Args:
            is_made: of which; None looks whether they are there.
        """
        made = [one.target.exists() for one in self.conversions] if is_made is None else is_made.tolist()
        rows = zip(self.foreign, self.conversions, made, strict=True)
        return [*self.plain, *(row._replace(name=str(one.target)) for row, one, is_there in rows if is_there)]

    def share(self, part: WorkPart) -> "Voices":
        """A part's: neighbours of either kind."""
        number, count = part.number, part.count
        foreign, conversions = share(self.foreign, number, count), share(self.conversions, number, count)
        return Voices(share(self.plain, number, count), foreign, conversions)

    def key(self, count: int) -> str:
        """By which parts of the same whole are known."""
        digest = hashlib.sha256(str(count).encode())
        for row in (*self.plain, *self.foreign):
            digest.update(json.dumps(row).encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class Prepared:
    """What all parts together have done.

    Attributes:
        rows: every utterance that a list can name, in the order of one machine.
        lookup: what their headers say.
        conversion: what the conversions counted; None where there were none.
    """

    rows: list[Row]
    lookup: LookupTable
    conversion: StepSummary | None


def do_part(
    voices: Voices,
    part: WorkPart,
    folder: Path,
    convert: Callable[[Sequence[Conversion], Path], StepSummary],
    read_headers: Callable[[StringTable], LookupTable],
) -> None:
    """Convert a part's files, read the headers of its utterances, and leave word; nothing where that was done.

    Args:
        voices: all of them.
        part: which share of them.
        folder: where the parts leave word.
        convert: makes the files, and counts into a summary in the folder that it is given.
        read_headers: of the files that are named.

    Raises:
        PartError: parts of another number are there.
    """
    path = folder / (part.name + SUFFIX)
    missing_parts([part, *parts_in(folder, SUFFIX)], folder)
    if path.exists():
        return
    own = voices.share(part)
    counts, broken = [0, 0], []
    if own.conversions:
        summary = convert(own.conversions, folder / (part.name + WORK_SUFFIX))
        counts = [summary.made, summary.skipped]
        if summary.broken:
            broken = summary.broken_path.read_text(encoding="utf-8").splitlines()
    is_made = np.array([one.target.exists() for one in own.conversions], dtype=bool)
    lookup = read_headers(StringTable.from_strings([row.name for row in own.converted(is_made)]))
    content = {
        "key": np.array(voices.key(part.count)),
        "num_plain": np.array(len(own.plain)),
        "is_made": is_made,
        "counts": np.array(counts),
        "broken": pack_texts(dict(enumerate(broken))),
        **lookup.arrays(),
    }
    with atomic_write(path, "wb") as file:
        np.savez(file, allow_pickle=False, **content)  # type: ignore[arg-type]


def missing_of(folder: Path) -> list[WorkPart]:
    """The parts that have not left word; there is one at least that has."""
    return missing_parts(list(parts_in(folder, SUFFIX)), folder)


def join_parts(voices: Voices, folder: Path, save_path: Path) -> Prepared:
    """Put together what all parts have left.

    Raises:
        PartError: some are damaged, or were done of other files.
    """
    done = parts_in(folder, SUFFIX)
    stored = {part: read_arrays(path, WHAT) for part, path in done.items()}
    key = voices.key(len(done))
    if strange := [part for part, arrays in stored.items() if str(arrays.get("key")) != key]:
        raise PartError(
            f"{folder}: the parts {list_parts(strange)} were done of other files or speakers than are there now; "
            "remove that folder and do the parts again"
        )
    plain, made, is_made = [], [], []
    for part, arrays in stored.items():
        with reading(done[part], WHAT):
            table, num_plain = LookupTable.from_arrays(arrays, SAMPLE_RATE), int(arrays["num_plain"])
            plain.append(table.take(np.arange(num_plain)))
            made.append(table.take(np.arange(num_plain, len(table))))
            is_made.append(arrays["is_made"])
    summary = _sum_of_conversions(stored, save_path) if voices.conversions else None
    return Prepared(voices.converted(np.concatenate(is_made)), LookupTable.joined([*plain, *made]), summary)


def _sum_of_conversions(stored: Mapping[WorkPart, Mapping[str, np.ndarray]], save_path: Path) -> StepSummary:
    with StepSummary("convert", save_path) as summary:
        for arrays in stored.values():
            made, skipped = arrays["counts"].tolist()
            summary.add_made(made)
            summary.add_skipped(skipped)
            for line in unpack_texts(arrays["broken"]).values():
                summary.add_broken(*line.split("\t", 1))
    return summary
