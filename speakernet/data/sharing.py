"""Arrays that worker processes share: the same memory under fork and under spawn, nothing copied, nothing pickled."""

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from speakernet.files import human_bytes
from speakernet.machine.facts import usable_memory_bytes

if TYPE_CHECKING:
    import torch


SHARED_MEMORY = Path("/dev/shm")


class SharedMemoryError(ValueError):
    """What processes are to share does not fit; the message says how much there is."""


def free_shared_memory() -> int:
    """Bytes left for memory that processes share; Docker gives 64 MiB unless told otherwise."""
    free = usable_memory_bytes()
    return min(free, shutil.disk_usage(SHARED_MEMORY).free) if SHARED_MEMORY.is_dir() else free


class SharedArray:
    """A NumPy array that moves into shared memory on `share()` and is then handed to other processes by handle.

    Before `share()` it is a plain array (what a single process needs costs nothing).
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self._tensor: torch.Tensor | None = None

    def share(self) -> "SharedArray":
        """Copy into shared memory, once; returns itself.

        Raises:
            SharedMemoryError: it does not fit.
        """
        if self._tensor is None and self.array.size:
            shared = _shared_zeros(self.array.shape, self.array.dtype)
            shared.numpy()[...] = self.array
            self._adopt(shared)
        return self

    @classmethod
    def allocate(cls, shape: tuple[int, ...], dtype: Any) -> "SharedArray":
        """Zeros that are shared from the start, so that filling them needs no second copy.

        Raises:
            SharedMemoryError: they do not fit.
        """
        made = cls(np.empty((0,), dtype=dtype))
        made._adopt(_shared_zeros(shape, np.dtype(dtype)))
        return made

    def _adopt(self, tensor: "torch.Tensor") -> None:
        # The tensor is kept: its memory goes with it, and torch's handle is what another process opens.
        self._tensor = tensor
        self.array = tensor.numpy()

    def __getstate__(self) -> Any:
        return {"tensor": self._tensor} if self._tensor is not None else {"array": self.array}

    def __setstate__(self, state: Any) -> None:
        self._tensor = None
        if "tensor" in state:
            self._adopt(state["tensor"])
        else:
            self.array = state["array"]


def _shared_zeros(shape: tuple[int, ...], dtype: np.dtype) -> "torch.Tensor":
    # Late: lists are arrays of this kind, and who only reads them (speakernet compare, prepare) shares nothing.
    import torch

    # Asked first: where the pages are missing only when they are written, the system ends the process.
    needed, free = math.prod(shape) * dtype.itemsize, free_shared_memory()
    full = (
        f"{human_bytes(needed)} are needed in shared memory, {human_bytes(free)} are free there (in Docker: "
        "--shm-size, or --ipc=host)"
    )
    if needed > free:
        raise SharedMemoryError(full)
    try:
        return torch.zeros(shape, dtype=torch.from_numpy(np.empty(0, dtype=dtype)).dtype).share_memory_()
    except RuntimeError as error:
        # Another process was faster.
        raise SharedMemoryError(full) from error
