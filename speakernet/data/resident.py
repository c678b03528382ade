"""Device-resident mode: the whole corpus as one int16 tensor on the training device, crops gathered there.

The CPU only draws where crops begin. The same code runs on a CPU device, which is how it is tested.
"""

import numpy as np
import torch

from speakernet.data.datasets import _START, BatchRequest, to_float
from speakernet.data.keyed import KeyedRandom
from speakernet.data.packed import PackedRows

COPY_SAMPLES = 1 << 24  # moved at once, so that no second copy of the corpus is needed


class ResidentMaker:
    """Makes batches of crops on a device from a packed or in-memory corpus.

    Args:
        reader: rows over one int16 array.
        lengths: samples of each row, (rows,).
        seed: of the run; crops begin where `BatchMaker` would begin them.
        device: where the corpus goes.
    """

    def __init__(self, reader: PackedRows, lengths: np.ndarray, *, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.device = device
        self.lengths = lengths
        self._firsts = np.array([reader.span(row)[0] if lengths[row] else 0 for row in range(len(lengths))])
        samples = np.asarray(reader.samples)
        self.corpus = torch.empty(len(samples), dtype=torch.int16, device=device)
        for first in range(0, len(samples), COPY_SAMPLES):
            part = np.array(samples[first : first + COPY_SAMPLES])
            self.corpus[first : first + len(part)] = torch.from_numpy(part).to(device)

    def make(self, request: BatchRequest) -> torch.Tensor:
        """The request's crops, float32 (batch, samples), on the device; short utterances are wrapped around."""
        uniform = KeyedRandom(self.seed, request.epoch, request.rows).uniform(_START)[:, 0]
        lengths = self.lengths[request.rows]
        starts = (uniform * np.maximum(lengths - request.num_samples + 1, 1)).astype(np.int64)
        first = torch.from_numpy(self._firsts[request.rows]).to(self.device, non_blocking=True)
        start = torch.from_numpy(starts).to(self.device, non_blocking=True)
        period = torch.from_numpy(lengths.astype(np.int64)).to(self.device, non_blocking=True)
        place = start[:, None] + torch.arange(request.num_samples, device=self.device)
        return to_float(self.corpus[first[:, None] + place % period[:, None]])
