"""Random numbers drawn by key instead of by order.

Every random choice about data comes from a generator keyed by (seed, keys…), so that batches do not
depend on the number of workers or ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

# Streams of the loader; those of augmentation start at 100 (`augment.augmenter`).
START_STREAM = 1
REPLACEMENT_STREAM = 2
VOICE_STREAM = 3
REAL_STREAM = 4
# 2^64 divided by the golden ratio: SplitMix64's step.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class DrawingPart(ABC):
    """A part of a network that draws for each utterance, such as masks and dither."""

    num_numbers: int
    """Numbers for each utterance."""

    @abstractmethod
    def draw(self, key: int, rows: np.ndarray) -> np.ndarray:
        """The numbers of a pass, float64 (batch, num_numbers) in [0, 1): of the epoch's key, and of
        a number that keys each utterance's draws, (batch,).
        """

    @abstractmethod
    def announce(self, numbers: "Tensor") -> None:
        """Hand over what `draw` returned, on the device, for the next pass."""


def derive_seed(seed: int, *keys: int) -> int:
    """A 63-bit seed that depends on every key; neighbouring keys give unrelated streams (NumPy's
    SeedSequence).
    """
    words = np.random.SeedSequence([seed, *keys]).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))


def numpy_generator(seed: int, *keys: int) -> np.random.Generator:
    """A NumPy generator keyed by (seed, keys…)."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *keys])))


class KeyedRandom:
    """Uniform random numbers for the rows of a batch, keyed by (seed, epoch, row, stream).

    An ordinary generator's numbers depend on the order of draws, and so on the number of workers or
    ranks. Here an utterance's numbers depend only on its row and the epoch. The mixing is
    SplitMix64's.

    Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014, figure
    17.
    """

    def __init__(self, seed: int, epoch: int, rows: np.ndarray) -> None:
        self.rows = np.asarray(rows, dtype=np.uint64)
        self._key = np.uint64(derive_seed(seed, epoch))
        with np.errstate(over="ignore"):
            self._row_words = _mix(self.rows * GOLDEN + GOLDEN)

    def uniform(self, stream: int, count: int = 1) -> np.ndarray:
        """Numbers in [0, 1), float64 (batch, count); streams are unrelated."""
        return self.uniforms((stream,), count)[0]

    def uniforms(self, streams: Sequence[int], count: int = 1) -> np.ndarray:
        """The numbers of several streams at once, float64 (streams, batch, count)."""
        with np.errstate(over="ignore"):
            keys = _mix(self._key + np.array(streams, dtype=np.uint64) * GOLDEN)
            base = _mix(keys[:, None] ^ self._row_words)
            words = _mix(base[:, :, None] + np.arange(1, count + 1, dtype=np.uint64) * GOLDEN)
        # The upper 53 bits fit a float64 exactly, so no number is rounded up to one.
        return (words >> np.uint64(11)) * 2.0**-53

    def between(self, stream: int, low: float, high: float) -> np.ndarray:
        """Numbers in [low, high), (batch,)."""
        return low + (high - low) * self.uniform(stream)[:, 0]


def _mix(words: np.ndarray) -> np.ndarray:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
