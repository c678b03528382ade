"""The samples of a packed corpus that memory does not hold: read from the file slice by slice, and nothing around them.

A memory map reads what lies around a page that is not there too, which for crops at random places is mostly thrown
away: by the system's read-ahead, 128 KiB on most machines and megabytes on some.
"""

import contextlib
import os
import threading
import weakref
from pathlib import Path

import numpy as np

from speakernet.data.audio import AudioError
from speakernet.data.sources import OPEN_FLAGS, read_at


class FileSamples:
    """Int16 (samples,) in a file, sliced like the array that they are; every slice is a copy.

    Threads may slice at once.

    Args:
        path: the file.
        begin: byte at which the samples begin.
        num_samples: how many there are.
    """

    def __init__(self, path: Path, begin: int, num_samples: int) -> None:
        self._path, self._begin, self._num_samples = path, begin, num_samples
        self._file = os.open(path, OPEN_FLAGS)
        weakref.finalize(self, os.close, self._file)
        # Where nothing reads at a place, going there and reading are two steps.
        self._turn = contextlib.nullcontext() if hasattr(os, "preadv") else threading.Lock()

    def __len__(self) -> int:
        return self._num_samples

    @property
    def nbytes(self) -> int:
        """Of all samples."""
        return 2 * len(self)

    def __getitem__(self, some: slice) -> np.ndarray:
        """Raises AudioError where the disk does not give them."""
        first, stop, step = some.indices(len(self))
        assert step == 1, "samples are taken in their order"
        samples = np.empty(max(0, stop - first), dtype=np.int16)
        done = 0
        while done < len(samples):
            try:
                with self._turn:
                    num_bytes = read_at(self._file, samples[done:], self._begin + 2 * (first + done))
            except OSError as error:
                raise AudioError(f"{self._path}: cannot be read ({error.strerror or error})") from error
            if num_bytes < 2:
                raise AudioError(f"{self._path}: became shorter while it was being read; copy it again")
            # Half a sample is read again.
            done += num_bytes // 2
        return samples
