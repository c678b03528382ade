"""The random draws that a network makes in training (masks, dither), each keyed by the utterance that it is for."""

import numpy as np
import torch
from torch import Tensor, nn

from speakernet.keyed import KeyedRandom
from speakernet.seeding import derive_seed


class KeyedDraws(nn.Module):
    """Random draws of a training-only step, each keyed by the utterance that it is for.

    Whoever trains says before a pass which utterances come (`key_draws`): their draws then depend neither on their
    batch nor on the process that computes it. Where nobody says, the n-th pass draws the same in every run; the count
    travels in the state dictionary.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.count = 0
        self._coming: tuple[int, np.ndarray] | None = None

    def key_draws(self, key: int, rows: np.ndarray) -> None:
        """Say for the next pass whose draws it makes.

        Args:
            key: of the epoch.
            rows: of the training list, (batch,).
        """
        self._coming = (key, rows)

    @torch.compiler.disable
    def random(self, batch: int) -> KeyedRandom:
        """The numbers of this pass over `batch` utterances.

        Raises:
            ValueError: other utterances were announced than came.
        """
        if self._coming is None:
            self.count += 1
            return KeyedRandom(self.seed, self.count, np.arange(batch))
        (key, rows), self._coming = self._coming, None
        if len(rows) != batch:
            raise ValueError(f"a pass over {batch} utterances, but draws were keyed for {len(rows)}")
        return KeyedRandom(derive_seed(self.seed, key), 0, rows)

    @torch.compiler.disable
    def normal_like(self, tensor: Tensor) -> Tensor:
        """Standard normal noise of the shape of (batch, samples), drawn on its device."""
        uniform = self.random(len(tensor)).uniform(0)[:, 0]
        noise = torch.empty_like(tensor)
        generator = torch.Generator(tensor.device)
        for row, seed in zip(noise, (uniform * 2.0**53).astype(np.int64).tolist(), strict=True):
            row.normal_(generator=generator.manual_seed(seed))
        return noise

    def get_extra_state(self) -> Tensor:
        """The number of passes that nobody had announced."""
        return torch.tensor(self.count, dtype=torch.int64)

    def set_extra_state(self, state: Tensor) -> None:
        """Go on after so many."""
        self.count = int(state)
