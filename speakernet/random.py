"""Random numbers: seed the generators, and draw by key instead of by order.

Every random choice of the system comes from a generator made here from (seed, keys…), so that results do not depend on
the number of workers or ranks.
"""

import random
from collections.abc import Sequence

import numpy as np

# Streams that loading draws from; those of augmentation begin at 100 (`augment.augmenter`).
START_STREAM, REPLACEMENT_STREAM, VOICE_STREAM, REAL_STREAM = 1, 2, 3, 4
# 2^64 divided by the golden ratio: SplitMix64's step.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators (dropout and weight initialisation draw from torch's)."""
    # Late: what draws with NumPy alone does not wait for it.
    import torch

    random.seed(seed)
    # NumPy's global generator takes 32 bits, the others take more.
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def derive_seed(seed: int, *keys: int) -> int:
    """A 63-bit seed that depends on every key; neighbouring keys give unrelated streams (NumPy's SeedSequence)."""
    words = np.random.SeedSequence([seed, *keys]).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))


def numpy_generator(seed: int, *keys: int) -> np.random.Generator:
    """NumPy's generator keyed by (seed, keys…)."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *keys])))


class KeyedRandom:
    """Uniform numbers for the rows of one batch, one for each (seed, epoch, row, stream).

    A generator gives numbers in the order it is asked, so another number of workers or ranks would change them. Here an
    utterance's numbers depend only on its row and the epoch. The mixing is SplitMix64's.

    Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014, figure 17.
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
