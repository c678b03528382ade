"""Random state and random numbers: seed it, capture it, and draw by key instead of by order.

Every random choice of the system comes from a generator made here from (seed, keys…), so that results do not depend on
the number of workers or ranks. torch is imported late: commands that draw with NumPy alone (score intervals, the
preparation of corpora) do not wait for it.
"""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

# Streams that loading draws from; those of augmentation begin at 100 (`augment.augmenter`).
START_STREAM, REPLACEMENT_STREAM, VOICE_STREAM, REAL_STREAM = 1, 2, 3, 4
# 2^64 divided by the golden ratio: SplitMix64's step.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators (dropout and weight initialisation draw from torch's)."""
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


def capture_random_state() -> dict[str, Any]:
    """All global random state as tensors and plain values, so that it loads with `weights_only=True`."""
    import torch

    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    return {
        "python": {"version": version, "internal": torch.tensor(internal, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Put back what `capture_random_state` took; CUDA states only if the device count is the same."""
    import torch

    python = state["python"]
    random.setstate((python["version"], tuple(python["internal"].tolist()), python["gauss"]))
    saved = state["numpy"]
    keys = saved["keys"].numpy().astype(np.uint32)
    np.random.set_state((saved["name"], keys, saved["position"], saved["has_gauss"], saved["cached"]))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _mix(words: np.ndarray) -> np.ndarray:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
