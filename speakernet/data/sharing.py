"""Arrays that worker processes share: the same memory under fork and under spawn."""

import math
import shutil
import weakref
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from speakernet.files import human_bytes
from speakernet.machine.facts import usable_memory_bytes

if TYPE_CHECKING:
    import torch

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_BYTES = 1 << 20
"""Smaller arrays are copied."""


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


# A forked worker has the arrays of its parent. One that is spawned is sent them, and pickling would
# copy a list of a million rows into each worker; so a large array is sent as the handle of a tensor
# in shared memory, into which it is copied once.
_tensors: dict[int, "torch.Tensor"] = {}
"""id of an array -> the tensor that other processes are sent for it."""


def shared_array(tensor: "torch.Tensor") -> ndarray:
    """The array of a tensor in shared memory; other processes are sent the tensor's handle."""
    array = tensor.numpy()
    _remember(array, tensor)
    return array


def _remember(array: ndarray, tensor: "torch.Tensor") -> None:
    _tensors[id(array)] = tensor
    weakref.finalize(array, _tensors.pop, id(array), None)


def _reduce(array: ndarray) -> Any:
    """How an array is pickled for another process."""
    if id(array) not in _tensors:
        if array.nbytes < LEAST_SHARED_BYTES or array.dtype.kind not in "if":
            return array.__reduce__()
        tensor = shared_zeros(array.shape, array.dtype)
        tensor.numpy()[...] = array
        _remember(array, tensor)
    return shared_array, (_tensors[id(array)],)


ForkingPickler.register(ndarray, _reduce)
