"""Vocal-tract-length perturbation: mel bands that hear every frequency as if the speaker's throat were another's.

A shorter vocal tract raises all resonances by about one factor; pitch and tempo stay. Moving the bands instead of the
audio costs nothing: a mel matrix for each factor, made once. In training only.

Source: Jaitly and Hinton 2013, "Vocal tract length perturbation (VTLP) improves speech recognition", section 2.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

# The boundary of the warp is 4800 Hz in the source, whose speech is at 16 kHz: that share of half the sample rate.
BOUNDARY_SHARE = 0.6
FINER = 64
"""Points of a fine bank between two bins, between which filters are taken to be straight."""


class VocalTracts(nn.Module):
    """The mel matrix of each utterance of a batch.

    Args:
        plain: the front end's own matrix, (bins, mels).
        warped: one for each factor, each (bins, mels).
    """

    def __init__(self, plain: Tensor, warped: list[Tensor]) -> None:
        super().__init__()
        self.register_buffer("plain", plain, persistent=False)
        self.register_buffer("banks", torch.stack(warped), persistent=False)
        self._coming: np.ndarray | None = None

    def take_warps(self, warps: np.ndarray) -> None:
        """Say for the next pass, and for it alone, which factor each utterance is heard with: indices, (batch,)."""
        self._coming = warps

    # What was said lies on the host, and which of the two shapes follows from it: nothing to be traced.
    @torch.compiler.disable
    def forward(self, batch: int) -> Tensor:
        """(bins, mels) where one matrix serves all, else (batch, bins, mels); the plain one where nobody said.

        Raises:
            ValueError: other utterances were announced than came.
        """
        warps, self._coming = self._coming, None
        plain, banks = self.get_buffer("plain"), self.get_buffer("banks")
        if warps is None:
            return plain
        if len(warps) != batch:
            raise ValueError(f"a pass over {batch} utterances, but vocal tracts were said for {len(warps)}")
        if not warps.any():
            return banks[0]
        return banks[torch.from_numpy(np.asarray(warps, dtype=np.int64)).to(banks.device, non_blocking=True)]


def warped_banks(
    plain: Tensor, make_bank: Callable[[int], Tensor], factors: tuple[float, ...], sample_rate: int
) -> list[Tensor]:
    """A mel matrix for each factor, (bins, mels); of factor 1 the plain one itself.

    Args:
        plain: the front end's own matrix, (bins, mels).
        make_bank: gives it with so many points for each step between bins, ((bins - 1) x points + 1, mels).
        factors: of the frequencies.
        sample_rate: in Hz.
    """
    last = len(plain) - 1
    fine = make_bank(FINER)
    hertz = torch.linspace(0, sample_rate / 2, last + 1, dtype=torch.float64)
    banks = []
    for factor in factors:
        if factor == 1:
            banks.append(plain)
            continue
        # A bin counts where its frequency is heard: the filters stay, the spectrum moves below them.
        places = warped(hertz, factor, sample_rate) * (last * FINER / (sample_rate / 2))
        below = places.floor().long().clamp(0, last * FINER - 1)
        share = (places - below).unsqueeze(1).float()
        banks.append((1 - share) * fine[below] + share * fine[below + 1])
    return banks


def warped(hertz: Tensor, factor: float, sample_rate: int) -> Tensor:
    """Where frequencies are heard: times the factor up to a boundary, from there straight to half the sample rate.

    >>> warped(torch.tensor([0.0, 1000.0, 4000.0, 8000.0]), 1.1, 16000)
    tensor([   0., 1100., 4400., 8000.])
    """
    half = sample_rate / 2
    boundary = BOUNDARY_SHARE * half * min(factor, 1.0)
    slope = (half - boundary) / (half - boundary / factor)
    return torch.where(hertz <= boundary / factor, hertz * factor, half - slope * (half - hertz))
