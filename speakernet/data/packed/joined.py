"""Several arrays that act like one: the samples of a corpus that was packed in parts."""

import bisect
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from speakernet.data.lists import StringTable
from speakernet.data.packed.on_disk import FileSamples


class JoinedSamples:
    """The samples of the parts one after the other, int16 (samples,); sliced like the array that they would be.

    What lies within a part, as every utterance does, is a view where the part is memory; nothing is held.

    >>> joined = JoinedSamples([np.arange(3, dtype=np.int16), np.arange(3, 8, dtype=np.int16)])
    >>> len(joined), joined[3:5], joined[2:4]
    (8, array([3, 4], dtype=int16), array([2, 3], dtype=int16))
    """

    def __init__(self, parts: Sequence[np.ndarray | FileSamples]) -> None:
        self.parts = list(parts)
        self._begins = np.cumsum([0, *map(len, self.parts)]).tolist()

    def __len__(self) -> int:
        return int(self._begins[-1])

    @property
    def nbytes(self) -> int:
        """Of all samples."""
        return 2 * len(self)

    def __getitem__(self, some: slice) -> np.ndarray:
        first, stop, step = some.indices(len(self))
        assert step == 1, "samples are taken in their order"
        part = bisect.bisect_right(self._begins, first) - 1
        if part < len(self.parts) and stop <= self._begins[part + 1]:
            return self.parts[part][first - self._begins[part] : stop - self._begins[part]]
        pieces = [
            samples[max(first - begin, 0) : max(stop - begin, 0)]
            for samples, begin in zip(self.parts, self._begins, strict=False)
            if begin < stop
        ]
        return np.concatenate(pieces) if pieces else self.parts[0][:0]


Samples: TypeAlias = np.ndarray | JoinedSamples | FileSamples
"""Of a packed corpus, int16 (samples,), one after the other; sliced without a step."""


def join_tables(tables: Sequence[StringTable]) -> StringTable:
    """The strings of all tables, one table's after another's."""
    begins = np.cumsum([0, *(len(table.content) for table in tables)])
    offsets = [table.offsets[:-1] + begin for table, begin in zip(tables, begins, strict=False)]
    return StringTable(np.concatenate([table.content for table in tables]), np.concatenate([*offsets, begins[-1:]]))
