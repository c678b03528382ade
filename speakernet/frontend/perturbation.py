"""Variation of features in training: SpecAugment and dither noise.

Draws are keyed by their utterance, so that they depend neither on the batch nor on the process.
Numbers are drawn on the host; all that follows from them is computed on the device.

Source: Park et al. 2019, "SpecAugment", frequency and time masking.
"""

import types
from typing import TypeAlias

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor, nn

from speakernet.frontend.options import SpecAugmentOptions
from speakernet.random import GOLDEN, DrawingPart, KeyedRandom, derive_seed

MEL_STREAM = 0
FRAME_STREAM = 1
CHOICE_STREAM = 2
# SplitMix64's step as a signed number: torch has no unsigned 64-bit arithmetic.
STEP = int(GOLDEN) - 2**64
# Shifts and factors of SplitMix64's mixing, as signed numbers; the last one only shifts.
MIXING = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))


def keep_draws_eager(net: nn.Module) -> None:
    """Keep what draws on the host or waits for other ranks out of compiled graphs; call it before
    compiling a network.
    """
    # Late: most runs compile nothing.
    from speakernet.parallel.sync_norm import SYNCHRONIZED

    for module in net.modules():
        if isinstance(module, KeyedDraws):
            _keep_eager(module, "draw_unannounced")
        elif isinstance(module, SYNCHRONIZED):
            _keep_eager(module, "forward")


def _keep_eager(module: nn.Module, method: str) -> None:
    # Not as a decorator, which would load torch's compiler: two seconds for every command.
    eager = torch.compiler.disable(getattr(type(module), method))
    setattr(module, method, types.MethodType(eager, module))


class KeyedDraws(DrawingPart, nn.Module):
    """Random numbers of one component in training, from which it computes on the device alone.

    The step draws the numbers of a pass on the host (`draw`), takes those of all components to the
    device in one copy, and hands them over (`announce`). Without that, the n-th pass draws the same
    numbers in every run; the count is part of the state dictionary.
    """

    def __init__(self, seed: int, num_numbers: int = 1) -> None:
        super().__init__()
        self.seed = seed
        self.num_numbers = num_numbers
        self.count = 0
        self._coming: Tensor | None = None

    def draw(self, key: int, rows: ndarray) -> ndarray:
        """See `DrawingPart.draw`."""
        return self._uniform(KeyedRandom(derive_seed(self.seed, key), 0, rows))

    def announce(self, numbers: Tensor) -> None:
        """See `DrawingPart.announce`."""
        self._coming = numbers

    def take(self, batch: int, device: torch.device) -> Tensor:
        """The numbers of this pass, float64 (batch, num_numbers) on the device."""
        numbers = self._coming
        self._coming = None
        if numbers is None:
            return self.draw_unannounced(batch, device)
        if len(numbers) != batch:
            raise ValueError(
                f"the pass has {batch} utterances, but draws were announced for {len(numbers)}"
            )
        return numbers

    def draw_unannounced(self, batch: int, device: torch.device) -> Tensor:
        """The numbers of a pass that nobody announced."""
        self.count += 1
        numbers = self._uniform(KeyedRandom(self.seed, self.count, np.arange(batch)))
        return torch.from_numpy(numbers).to(device, non_blocking=True)

    def normal_like(self, tensor: Tensor) -> Tensor:
        """Standard normal noise with the shape of `tensor`, (batch, samples), drawn on its
        device.
        """
        keys = (self.take(len(tensor), tensor.device)[:, 0] * 2.0**53).long()
        return normal_noise(keys, tensor.shape[1]).to(tensor.dtype)

    def get_extra_state(self) -> Tensor:
        """The number of unannounced passes."""
        return torch.tensor(self.count, dtype=torch.int64)

    def set_extra_state(self, state: Tensor) -> None:
        """Continue after that many passes."""
        self.count = int(state)

    def _uniform(self, random: KeyedRandom) -> ndarray:
        return random.uniform(0, self.num_numbers)


# Dither is noise for every sample of a batch, which a generator on the host could not draw in time
# and a generator on the device would draw in the order of the batch. So the noise is a function: a
# key for each utterance, mixed with the place of each sample, gives 64 random bits, and those give
# two normal numbers. Whoever computes it, in whatever batch, gets the same noise.
def normal_noise(keys: Tensor, count: int) -> Tensor:
    """Standard normal numbers, float32 (keys, count), each a function of its key and position
    alone.

    A few operations for the whole batch, identical on every device; a generator would have to be
    called row by row.

    Sources: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", figure 17
    (SplitMix64); Box and Muller 1958, "A note on the generation of random normal deviates".
    """
    # Signed products wrap as unsigned ones do; shifts are masked.
    places = torch.arange(1, (count + 1) // 2 + 1, device=keys.device)
    words = keys.unsqueeze(1) + places * STEP
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

    def __init__(self, options: SpecAugmentOptions, seed: int = 0) -> None:
        super().__init__()
        self.options = options
        self.draws = MaskDraws(seed, options)

    def forward(self, features: Tensor) -> Tensor:
        """(batch, mels, frames), masked in training mode."""
        if not self.training:
            return features
        batch, num_mels, num_frames = features.shape
        options = self.options
        numbers = self.draws.take(batch, features.device)
        of_mels, of_frames, of_choice = numbers.split(self.draws.widths, dim=1)
        mels = place_stretches(of_mels, options.mel_mask_width, num_mels)
        frames = place_stretches(of_frames, options.frame_mask_width, num_frames)
        result = mask_stretches(features, mels, frames)
        if not self.draws.chooses:
            return result
        is_masked = of_choice < options.spec_augment_probability  # (batch, 1)
        return torch.where(is_masked.unsqueeze(2), result, features)


class MaskDraws(KeyedDraws):
    """Two numbers for each mask, of mel bands and then of frames, and one that chooses the
    utterances if not all are masked.
    """

    def __init__(self, seed: int, options: SpecAugmentOptions) -> None:
        chooses = options.spec_augment_probability < 1
        widths = [2 * options.mel_masks, 2 * options.frame_masks, int(chooses)]
        super().__init__(seed, sum(widths))
        self.chooses = chooses
        self.widths = widths
        """Numbers of each kind, in the order of the streams."""

    def _uniform(self, random: KeyedRandom) -> ndarray:
        streams = zip((MEL_STREAM, FRAME_STREAM, CHOICE_STREAM), self.widths, strict=True)
        parts = [random.uniform(stream, count) for stream, count in streams]
        return np.concatenate(parts, axis=1)


def place_stretches(numbers: Tensor, max_width: int, size: int) -> Stretches:
    """Widths uniform in 0..max_width (never the whole axis), and starts uniform among those that
    fit, from numbers in [0, 1), (batch, 2 x masks): first those of the widths.
    """
    widest = min(max_width, size - 1)
    widths, starts = numbers.chunk(2, dim=1)
    width = (widths * (widest + 1)).long()
    start = (starts * (size - width + 1)).long()
    return start, width


def mask_stretches(features: Tensor, mels: Stretches, frames: Stretches) -> Tensor:
    """Zero the stretches of (batch, mels, frames).

    >>> mels, frames = ((torch.tensor([[start]]), torch.tensor([[1]])) for start in (0, 1))
    >>> mask_stretches(torch.ones(1, 2, 3), mels, frames)
    tensor([[[0., 0., 0.],
             [1., 0., 1.]]])
    """
    hidden = []
    for (start, width), size in zip((mels, frames), features.shape[1:], strict=True):
        position = torch.arange(size, device=features.device) - start.unsqueeze(-1)
        inside = (position >= 0) & (position < width.unsqueeze(-1))  # (batch, masks, size)
        hidden.append(inside.any(dim=1))
    return features.masked_fill(hidden[0].unsqueeze(2) | hidden[1].unsqueeze(1), 0.0)
