"""Arrays that worker processes share: the same memory under fork and under spawn, neither copied
nor pickled.
"""

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from speakernet.files import human_bytes
from speakernet.machine.facts import usable_memory_bytes

if TYPE_CHECKING:
    import torch

SHARED_MEMORY = Path("/dev/shm")


class SharedMemoryError(ValueError):
    """Shared memory is too small; the message says how much is free."""


def free_shared_memory() -> int:
    """Free bytes of shared memory; Docker provides 64 MiB by default."""
    free = usable_memory_bytes()
    return min(free, shutil.disk_usage(SHARED_MEMORY).free) if SHARED_MEMORY.is_dir() else free


def shared_zeros(shape: tuple[int, ...], dtype: Any) -> "torch.Tensor":
    """Zeros in shared memory."""
    # Imported late, so that commands that only read lists (compare, prepare) do not wait for torch.
    import torch

    # Checked first: the system kills a process that writes to pages it cannot provide.
    needed = math.prod(shape) * np.dtype(dtype).itemsize
    free = free_shared_memory()
    full = (
        f"{human_bytes(needed)} of shared memory needed, {human_bytes(free)} free (in Docker: "
        "--shm-size, --ipc=host)"
    )
    if needed > free:
        raise SharedMemoryError(full)
    try:
        return torch.zeros(
            shape, dtype=torch.from_numpy(np.empty(0, dtype=dtype)).dtype
        ).share_memory_()
    except RuntimeError as error:
        # Another process has taken the memory in the meantime.
        raise SharedMemoryError(full) from error


class Shareable:
    """Holds NumPy arrays that `share()` moves into shared memory; other processes then receive
    handles.
    """

    shared_arrays: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes to move."""

    def share(self) -> None:
        """Move the arrays, once."""
        handles = self.__dict__.setdefault("_handles", {})
        for name in self.shared_arrays:
            array = getattr(self, name)
            if name not in handles and array.size:
                handles[name] = shared_zeros(array.shape, array.dtype)
                handles[name].numpy()[...] = array
                setattr(self, name, handles[name].numpy())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **dict.fromkeys(self.__dict__.get("_handles", ()))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for name, tensor in state.get("_handles", {}).items():
            setattr(self, name, tensor.numpy())
