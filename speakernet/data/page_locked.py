"""Shared memory that a GPU copies from while it computes: page-locked where it lies, so that no copy is made of it."""

import logging

import numpy as np
import torch

logger = logging.getLogger(__name__)

PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every GPU of the process


class PageLock:
    """Keeps an array page-locked for CUDA until `release`.

    Where the system refuses (a limit on locked memory, say) the array stays as it is, which is said: batches are then
    copied into page-locked memory one by one.
    """

    def __init__(self, array: np.ndarray) -> None:
        self._address, self._runtime = 0, torch.cuda.cudart()
        if array.size == 0:
            return
        status = int(self._runtime.cudaHostRegister(array.ctypes.data, array.nbytes, PORTABLE))
        if status:
            logger.info("the ring of batches cannot be page-locked (CUDA error %d): each batch is copied once", status)
            return
        self._address = array.ctypes.data

    @property
    def is_held(self) -> bool:
        """Whether the array is page-locked."""
        return bool(self._address)

    def release(self) -> None:
        """Unlock the array; to be called before its memory goes."""
        if self._address:
            self._runtime.cudaHostUnregister(self._address)
            self._address = 0
