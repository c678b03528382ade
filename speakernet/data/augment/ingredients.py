"""The audio that the choices of a batch need, gathered on the host or on the device where it is mixed."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ingredients:
    """The audio that the choices need; moves to a device with the batch.

    Attributes:
        noises: crops of the sources, float32 (sources, samples).
        reverberation: by length of transform: utterances int64 (rows,), spectra complex64 (rows, bins), length.
    """

    noises: Tensor
    reverberation: tuple[tuple[Tensor, Tensor, int], ...] = ()

    def to(self, device: torch.device, non_blocking: bool = False) -> "Ingredients":
        """The same on another device."""
        rirs = tuple(
            (rows.to(device, non_blocking=non_blocking), spectra.to(device, non_blocking=non_blocking), length)
            for rows, spectra, length in self.reverberation
        )
        return replace(self, noises=self.noises.to(device, non_blocking=non_blocking), reverberation=rirs)
