"""The augmenter as the loader uses it: draw, gather and apply for one batch, in pieces that stay in the CPU's cache."""

import numpy as np
import torch

from speakernet.data.augment import Augmenter

CPU_ROWS = 16  # a piece of 2-second crops with its noises is a few megabytes; on a GPU the batch is one piece


class BatchAugmenter:
    """Callable (batch, samples) -> the same, disturbed; every choice keyed by (epoch, row)."""

    def __init__(self, augmenter: Augmenter) -> None:
        self.augmenter = augmenter

    def __call__(self, waveforms: torch.Tensor, *, epoch: int, rows: np.ndarray) -> torch.Tensor:
        """Disturb in place. The choices are keyed by row, so cutting the batch into pieces changes nothing."""
        num_rows = CPU_ROWS if waveforms.device.type == "cpu" else max(1, len(rows))
        for first in range(0, len(rows), num_rows):
            piece = waveforms[first : first + num_rows]
            drawn = self.augmenter.draw(rows[first : first + num_rows], epoch)
            ingredients = self.augmenter.gather(drawn, waveforms.shape[1]).to(waveforms.device, non_blocking=True)
            self.augmenter.apply(piece, drawn, ingredients)
        return waveforms

    def divide_cache(self, num_workers: int) -> None:
        """Give each of the workers its part of the cache's budget."""
        caches = [getattr(bank.reader, "_cache", None) for bank in self.augmenter.banks.values()]
        if self.augmenter.rooms is not None:
            caches.append(self.augmenter.rooms.cache)
        for cache in {id(one): one for one in caches if one is not None}.values():
            cache.budget_bytes //= num_workers
