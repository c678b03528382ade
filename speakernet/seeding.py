"""Random state: seed it, derive generators from keys, capture and restore it.

Every random choice of the system comes from a generator made here from (seed, keys…), so that results do not depend on
the number of workers or ranks. Nothing below this file touches the global random state.
"""

import random
from typing import Any

import numpy as np


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators (dropout and weight initialisation draw from torch's)."""
    random.seed(seed)
    # NumPy's global generator takes 32 bits, the others take more.
    np.random.seed(seed % 2**32)
    _torch().manual_seed(seed)


def derive_seed(seed: int, *keys: int) -> int:
    """A 63-bit seed that depends on every key; neighbouring keys give unrelated streams (NumPy's SeedSequence)."""
    words = np.random.SeedSequence([seed, *keys]).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))


def numpy_generator(seed: int, *keys: int) -> np.random.Generator:
    """NumPy's generator keyed by (seed, keys…)."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *keys])))


def capture_random_state() -> dict[str, Any]:
    """All global random state as tensors and plain values, so that it loads with `weights_only=True`."""
    torch = _torch()
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
    """Put back what `capture_random_state` took; CUDA states only where the device count is the same."""
    torch = _torch()
    python = state["python"]
    random.setstate((python["version"], tuple(python["internal"].tolist()), python["gauss"]))
    saved = state["numpy"]
    keys = saved["keys"].numpy().astype(np.uint32)
    np.random.set_state((saved["name"], keys, saved["position"], saved["has_gauss"], saved["cached"]))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _torch() -> Any:
    # Late: who draws with NumPy alone (score intervals, the preparation of corpora) does not wait for torch.
    import torch

    return torch
