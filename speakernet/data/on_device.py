"""Int16 audio on a device as one tensor, from which crops are cut; and the transfer of small arrays
to a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from speakernet.data.sources import INT16_SCALE


# A transfer to a GPU costs some microseconds however small it is, and a batch needs a dozen arrays
# of indices and factors. So they are copied together, as 64-bit numbers in one page-locked buffer,
# and split into views on the device. Page-locked memory lets the copy run while the host goes on.
def send(device: torch.device, arrays: Sequence[ndarray]) -> list[Tensor]:
    """Copy flat arrays to a device, integers as int64 and others as float64, in one asynchronous
    transfer.
    """
    wide = [
        array.astype(np.float64 if array.dtype.kind == "f" else np.int64, copy=False)
        for array in arrays
    ]
    lengths = [len(array) for array in wide]
    # torch's allocator reuses page-locked memory only after its copy is done.
    buffer = torch.empty(sum(lengths), dtype=torch.int64, pin_memory=device.type == "cuda")
    np.concatenate([array.view(np.int64) for array in wide], out=buffer.numpy())
    sent = buffer.to(device, non_blocking=True).split(lengths)
    return [
        values.view(torch.float64) if array.dtype == np.float64 else values
        for values, array in zip(sent, wide, strict=True)
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

        Each crop has a row in three arrays: where its recording begins in `samples`, where the crop
        begins in its recording, and how many samples the recording has.

        Returns:
            Int16 (crops, num_samples), on the device.
        """
        device = self.samples.device
        # Computed on the host: asking the device which recordings are too short would wait for it.
        short = np.flatnonzero(starts + num_samples > lengths)
        begins = firsts + starts
        # Any valid place, because these rows are overwritten below.
        begins[short] = 0
        begins_sent, rows, first, start, length = send(
            device, [begins, short, firsts[short], starts[short], lengths[short]]
        )
        if len(short) < len(begins):
            # A view with a window at every sample of the corpus: reading by window needs no index
            # for each sample.
            crops = self.samples.unfold(0, num_samples, 1)[begins_sent]
        else:
            crops = torch.empty(len(begins), num_samples, dtype=torch.int16, device=device)
        if len(short):
            places = (start[:, None] + torch.arange(num_samples, device=device)) % length[:, None]
            crops.index_copy_(0, rows, self.samples[first[:, None] + places])
        return crops
