"""Int16 audio on a device as one tensor: crops by one indexed read, and the transfer of small
arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from speakernet.data.sources import INT16_SCALE


# A transfer to a GPU costs some microseconds however small it is, and a batch needs a dozen arrays
# of indices and factors. They travel as one parcel: all of them as 64-bit words in one page-locked
# buffer, cut into views on the other side. Page-locked memory lets the copy run while the host goes
# on.
def send(device: torch.device, arrays: Sequence[ndarray]) -> list[Tensor]:
    """Send flat int64 and float64 arrays to a device as tensors, in one asynchronous transfer."""
    words = [
        array.astype(np.float64 if array.dtype.kind == "f" else np.int64, copy=False)
        for array in arrays
    ]
    # torch's allocator reuses page-locked memory only after its copy is done.
    parcel = torch.empty(sum(map(len, words)), dtype=torch.int64, pin_memory=device.type == "cuda")
    np.concatenate([word.view(np.int64) for word in words], out=parcel.numpy())
    sent = parcel.to(device, non_blocking=True).split([len(word) for word in words])
    return [
        part.view(torch.float64) if word.dtype == np.float64 else part
        for part, word in zip(sent, words, strict=True)
    ]


def to_float(crops: Tensor) -> Tensor:
    """Convert int16 samples to float32 in -1..1; copy float32 samples."""
    if crops.dtype == torch.int16:
        return crops.to(torch.float32).mul_(float(INT16_SCALE))
    return crops.clone()


@dataclass(eq=False)
class DeviceAudio:
    """Recordings end to end in one int16 tensor."""

    samples: Tensor

    def crops(self, firsts: ndarray, starts: ndarray, lengths: ndarray, num_samples: int) -> Tensor:
        """Crops of `num_samples`; a recording that ends before that wraps around to its start.

        Returns:
            Int16 (crops, num_samples), on the device.
        """
        device = self.samples.device
        # Computed on the host: asking the device which recordings are too short would wait for it.
        short = np.flatnonzero(starts + num_samples > lengths)
        begins = firsts + starts
        begins[short] = 0
        begins_there, rows, first, start, length = send(
            device, [begins, short, firsts[short], starts[short], lengths[short]]
        )
        if len(short) < len(begins):
            # A view with a window at every sample of the corpus: reading by window needs no index
            # for each sample.
            crops = self.samples.unfold(0, num_samples, 1)[begins_there]
        else:
            crops = torch.empty(len(begins), num_samples, dtype=torch.int16, device=device)
        if len(short):
            places = (start[:, None] + torch.arange(num_samples, device=device)) % length[:, None]
            crops.index_copy_(0, rows, self.samples[first[:, None] + places])
        return crops
