"""The random draws that a network makes in training (masks, dither), each keyed by the utterance that it is for."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from speakernet.keyed import KeyedRandom
from speakernet.seeding import derive_seed

Draw = Callable[[KeyedRandom], tuple[Tensor, ...]]
"""From the numbers of a pass to the tensors that it uses; needs nothing of the pass but its shape."""


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
        # How the last pass drew, and the likes of what; and where the next one finds its draws instead.
        self._draw: Draw | None = None
        self._kinds: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._room: tuple[Tensor, ...] | None = None

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
    def drawn(self, batch: int, draw: Draw) -> tuple[Tensor, ...]:
        """What this pass over `batch` utterances draws, or finds in the room that `draw_into` has filled."""
        if self._room is not None:
            room, self._room, self._coming = self._room, None, None
            return room
        made = draw(self.random(batch))
        self._draw, self._kinds = draw, [(one.shape, one.dtype, one.device) for one in made]
        return made

    def room(self) -> tuple[Tensor, ...]:
        """Tensors like those that the last pass drew; none where it drew nothing."""
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in self._kinds)

    def take_from(self, room: tuple[Tensor, ...]) -> None:
        """Let the next pass find its draws there."""
        self._room = room if room else None

    def draw_into(self, room: tuple[Tensor, ...]) -> None:
        """Draw for the utterances that were announced, as the last pass did, into tensors that stay where they are."""
        if room and self._draw is not None:
            for kept, made in zip(room, self._draw(self.random(len(room[0]))), strict=True):
                kept.copy_(made)

    @torch.compiler.disable
    def normal_like(self, tensor: Tensor) -> Tensor:
        """Standard normal noise of the shape of (batch, samples), drawn on its device."""
        shape, dtype, device = tensor.shape, tensor.dtype, tensor.device

        def draw(random: KeyedRandom) -> tuple[Tensor, ...]:
            noise = torch.empty(shape, dtype=dtype, device=device)
            generator = torch.Generator(device)
            seeds = (random.uniform(0)[:, 0] * 2.0**53).astype(np.int64).tolist()
            for row, seed in zip(noise, seeds, strict=True):
                row.normal_(generator=generator.manual_seed(seed))
            return (noise,)

        return self.drawn(len(tensor), draw)[0]

    def get_extra_state(self) -> Tensor:
        """The number of passes that nobody had announced."""
        return torch.tensor(self.count, dtype=torch.int64)

    def set_extra_state(self, state: Tensor) -> None:
        """Go on after so many."""
        self.count = int(state)
