"""The RAM corpus: every utterance decoded once to int16 in shared memory; FLAC then costs no more than a packed corpus.

Made in the training process before the workers start; they share it. Nothing is written to disk.
"""

from typing import Any

import numpy as np

from speakernet.data.audio import AudioError
from speakernet.data.lists import StringTable
from speakernet.data.lookup import LookupTable
from speakernet.data.packed.corpus import PackedRows
from speakernet.data.sharing import SharedArray
from speakernet.data.sources import AudioSource
from speakernet.files import parallel_map

ROWS_PER_TASK = 64


class RamRows(PackedRows):
    """Rows in memory; handed to a worker by handle."""

    def __init__(self, samples: SharedArray, starts: np.ndarray, lengths: np.ndarray, problems: dict[int, str]) -> None:
        super().__init__("the RAM corpus", samples.array, starts, lengths)
        self._shared = samples
        self._problems = problems

    def span(self, row: int) -> tuple[int, int]:
        """See `PackedRows.span`; a file that could not be decoded says why."""
        if row in self._problems:
            raise AudioError(self._problems[row])
        return super().span(row)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "samples": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.samples = self._shared.array


def load_into_ram(
    source: AudioSource, names: StringTable, table: LookupTable, *, num_threads: int = 4, show_progress: bool = False
) -> RamRows:
    """Decode all of `names` into shared int16 memory, at the source's rate."""
    lengths = table.num_samples.copy()
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if len(lengths) else np.zeros(0, np.int64)
    # Crops of FLAC come at 87,929 a second from here and at 1,548 from disk (one core, benchmarks/measurements.md).
    samples = SharedArray.allocate((int(lengths.sum()),), np.int16)
    # Several threads write to it, each to rows of its own; assigning is one step for the others.
    problems = dict(table.problems)

    def decode(first_row: int) -> int:
        # A reader holds a scratch buffer: one for each task, not one for all threads.
        reader = source.rows(names, table)
        rows = range(first_row, min(first_row + ROWS_PER_TASK, len(lengths)))
        for row in rows:
            if row in problems:
                continue
            try:
                place = samples.array[starts[row] : starts[row] + lengths[row]]
                have = reader.read_row(row, 0, place)
                if have < lengths[row]:
                    lengths[row] = have
            except AudioError as error:
                problems[row] = str(error)
                lengths[row] = 0
        return len(rows)

    first_rows = range(0, len(lengths), ROWS_PER_TASK)
    description = "decoding into memory" if show_progress else ""
    for _ in parallel_map(decode, first_rows, num_threads, description, total=len(lengths), units_of=int):
        pass
    return RamRows(samples, starts, lengths, problems)
