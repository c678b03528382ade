"""Random numbers by key instead of by order: one for each (seed, epoch, row, stream), whole batches at once.

A generator gives numbers in the order it is asked, so another number of workers or ranks would change them. Here an
utterance's numbers depend on nothing but its own row and the epoch. The mixing is SplitMix64's.

Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014, figure 17.
"""

from collections.abc import Sequence

import numpy as np

from speakernet.seeding import derive_seed

# Streams that loading draws from; those of augmentation begin at 100 (`augment.draw`).
START_STREAM, REPLACEMENT_STREAM, VOICE_STREAM, REAL_STREAM = 1, 2, 3, 4
# 2^64 divided by the golden ratio: SplitMix64's step.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class KeyedRandom:
    """Uniform numbers for the rows of one batch.

    Args:
        seed: of the run.
        epoch: counted from 0.
        rows: rows of the training list, (batch,).
    """

    def __init__(self, seed: int, epoch: int, rows: np.ndarray) -> None:
        self.rows = np.asarray(rows, dtype=np.uint64)
        self._key = np.uint64(derive_seed(seed, epoch))
        with np.errstate(over="ignore"):
            self._row_words = _mix(self.rows * GOLDEN + GOLDEN)

    def uniform(self, stream: int, count: int = 1) -> np.ndarray:
        """Numbers in [0, 1), float64 (batch, count); another stream gives unrelated ones."""
        return self.uniforms((stream,), count)[0]

    def uniforms(self, streams: Sequence[int], count: int = 1) -> np.ndarray:
        """The numbers of several streams at once, float64 (streams, batch, count)."""
        with np.errstate(over="ignore"):
            keys = _mix(self._key + np.array(streams, dtype=np.uint64) * GOLDEN)
            base = _mix(keys[:, None] ^ self._row_words)
            words = _mix(base[:, :, None] + np.arange(1, count + 1, dtype=np.uint64) * GOLDEN)
        # The upper 53 bits, as many as a float64 below one holds: never rounded up to one.
        return (words >> np.uint64(11)) * 2.0**-53

    def between(self, stream: int, low: float, high: float) -> np.ndarray:
        """Numbers in [low, high), (batch,)."""
        return low + (high - low) * self.uniform(stream)[:, 0]


def _mix(words: np.ndarray) -> np.ndarray:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
