"""Variation of features in training: SpecAugment and dither noise.

Draws are keyed by their utterance, so that they depend neither on the batch nor on the process.

Source: Park et al. 2019, "SpecAugment", frequency and time masking.
"""

import types
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from speakernet.frontend.options import SpecAugmentOptions
from speakernet.random import GOLDEN, KeyedRandom, derive_seed

MEL_STREAM = 0
FRAME_STREAM = 1
# Shifts and factors of SplitMix64's mixing, as signed numbers; the last one only shifts.
MIXING = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))


def keep_draws_eager(net: nn.Module) -> None:
    """Keep methods that draw on the host out of compiled graphs; call it before compiling a
    network.
    """
    for module in net.modules():
        for name in getattr(module, "eager_methods", ()):
            # Not as decorators, which would load torch's compiler: two seconds for every command.
            eager = torch.compiler.disable(getattr(type(module), name))
            setattr(module, name, types.MethodType(eager, module))


class KeyedDraws(nn.Module):
    """Random draws of one component in training.

    The trainer announces the utterances of each pass (`key_draws`). Without that, the n-th pass
    draws the same numbers in every run; the count is part of the state dictionary.
    """

    eager_methods = ("random", "normal_like")

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.count = 0
        self._coming: tuple[int, np.ndarray] | None = None

    def key_draws(self, key: int, rows: np.ndarray) -> None:
        """Announce the next pass: the key of the epoch, and a number that keys each utterance's
        draws, (batch,).
        """
        self._coming = (key, rows)

    def random(self, batch: int) -> KeyedRandom:
        """The random numbers of this pass."""
        if self._coming is None:
            self.count += 1
            return KeyedRandom(self.seed, self.count, np.arange(batch))
        (key, rows), self._coming = self._coming, None
        if len(rows) != batch:
            raise ValueError(
                f"the pass has {batch} utterances, but draws were announced for {len(rows)}"
            )
        return KeyedRandom(derive_seed(self.seed, key), 0, rows)

    def normal_like(self, tensor: Tensor) -> Tensor:
        """Standard normal noise with the shape of `tensor`, (batch, samples), drawn on its
        device.
        """
        keys = torch.from_numpy(
            (self.random(len(tensor)).uniform(0)[:, 0] * 2.0**53).astype(np.int64)
        )
        return normal_noise(keys.to(tensor.device, non_blocking=True), tensor.shape[1]).to(
            tensor.dtype
        )

    def get_extra_state(self) -> Tensor:
        """The number of unannounced passes."""
        return torch.tensor(self.count, dtype=torch.int64)

    def set_extra_state(self, state: Tensor) -> None:
        """Continue after that many passes."""
        self.count = int(state)


def normal_noise(keys: Tensor, count: int) -> Tensor:
    """Standard normal numbers, float32 (keys, count), each a function of its key and position
    alone.

    A few operations for the whole batch, identical on every device; a generator would have to be
    called row by row.

    Sources: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", figure 17
    (SplitMix64); Box and Muller 1958, "A note on the generation of random normal deviates".
    """
    # torch has no unsigned 64-bit arithmetic: signed products wrap in the same way, shifts are
    # masked.
    words = keys.unsqueeze(1) + torch.arange(1, (count + 1) // 2 + 1, device=keys.device) * (
        int(GOLDEN) - 2**64
    )
    for shift, factor in MIXING:
        words = words.bitwise_xor_((words >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(
            factor
        )
    # A word gives two numbers: 32 bits for the radius, from (0, 1], and 32 for the angle.
    radius = (
        (((words >> 32).bitwise_and_(2**32 - 1) + 1).float() * 2.0**-32).log_().mul_(-2.0).sqrt_()
    )
    angle = words.bitwise_and_(2**32 - 1).float() * (2.0**-32 * 2.0 * torch.pi)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=2).flatten(1)[:, :count]


# Masked stretches along one axis: first position and width, both (batch, masks).
Stretches: TypeAlias = tuple[Tensor, Tensor]


class SpecAugment(nn.Module):
    """Masks of zeros (the mean of normalised features), drawn for every utterance; no time
    warping.
    """

    eager_methods = ("forward",)

    def __init__(self, options: SpecAugmentOptions, seed: int = 0) -> None:
        super().__init__()
        self.options = options
        self.draws = KeyedDraws(seed)

    def forward(self, features: Tensor) -> Tensor:
        """(batch, mels, frames), masked in training mode."""
        if not self.training:
            return features
        batch, num_mels, num_frames = features.shape
        options = self.options
        random = self.draws.random(batch)
        mels = draw_stretches(
            random, MEL_STREAM, options.mel_masks, options.mel_mask_width, num_mels
        )
        frames = draw_stretches(
            random, FRAME_STREAM, options.frame_masks, options.frame_mask_width, num_frames
        )
        return masked(features, mels, frames)


def draw_stretches(
    random: KeyedRandom, stream: int, count: int, max_width: int, size: int
) -> Stretches:
    """Draw widths uniformly from 0..max_width (never the whole axis), and starts uniformly among
    those that fit.
    """
    widest = min(max_width, size - 1)
    uniform = torch.from_numpy(random.uniform(stream, 2 * count))  # (batch, 2 x masks)
    width = (uniform[:, :count] * (widest + 1)).long()
    start = (uniform[:, count:] * (size - width + 1)).long()
    return start, width


def masked(features: Tensor, mels: Stretches, frames: Stretches) -> Tensor:
    """Zero the stretches of (batch, mels, frames).

    >>> mels, frames = ((torch.tensor([[start]]), torch.tensor([[1]])) for start in (0, 1))
    >>> masked(torch.ones(1, 2, 3), mels, frames)
    tensor([[[0., 0., 0.],
             [1., 0., 1.]]])
    """
    hidden = []
    for (start, width), size in zip((mels, frames), features.shape[1:], strict=True):
        position = torch.arange(size) - start.unsqueeze(-1)
        inside = ((position >= 0) & (position < width.unsqueeze(-1))).any(dim=1)
        hidden.append(inside.to(features.device, non_blocking=True))
    return features.masked_fill(hidden[0].unsqueeze(2) | hidden[1].unsqueeze(1), 0.0)
