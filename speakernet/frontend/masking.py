"""SpecAugment: bands of mels and stretches of frames hidden in training, with masks of its own for every utterance.

Sits between the front end and the trunk; does nothing in evaluation mode. Time warping is left out, as everywhere in
the speaker field.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from speakernet.frontend.draws import KeyedDraws
from speakernet.frontend.options import SpecAugmentOptions
from speakernet.keyed import KeyedRandom

MEL_STREAM, FRAME_STREAM = 0, 1


class Stretches(NamedTuple):
    """Hidden stretches along one axis: first position and width, both (batch, masks)."""

    start: Tensor
    width: Tensor


class SpecAugment(nn.Module):
    """Masks of zeros, which is the mean of normalised features.

    Args:
        options: how many masks along each axis, and how wide; widths are drawn uniformly from 0 to the widest.
        seed: of the draws.

    Source: Park et al. 2019, "SpecAugment", frequency and time masking.
    """

    def __init__(self, options: SpecAugmentOptions, seed: int = 0) -> None:
        super().__init__()
        self.options = options
        self.draws = KeyedDraws(seed)

    # Draws from a host generator and counts in Python: tracing it would recompile at every step.
    @torch.compiler.disable
    def forward(self, features: Tensor) -> Tensor:
        """(batch, mels, frames), masked in training mode."""
        if not self.training:
            return features
        shape, device = features.shape, features.device
        hidden = self.draws.drawn(len(features), lambda random: hidden_by(shape, device, *self.draw(shape, random)))
        return hide(features, *hidden)

    def draw(self, shape: torch.Size, random: KeyedRandom) -> tuple[Stretches, Stretches]:
        """Every random choice for features of that shape: the masks along mels and along frames."""
        _, num_mels, num_frames = shape
        options = self.options
        return (
            draw_stretches(random, MEL_STREAM, options.mel_masks, options.mel_mask_width, num_mels),
            draw_stretches(random, FRAME_STREAM, options.frame_masks, options.frame_mask_width, num_frames),
        )


def draw_stretches(random: KeyedRandom, stream: int, count: int, max_width: int, size: int) -> Stretches:
    """Widths uniform in 0..max_width (never the whole axis), starts uniform where the stretch fits."""
    widest = min(max_width, size - 1)
    uniform = torch.from_numpy(random.uniform(stream, 2 * count))  # (batch, 2 x masks)
    width = (uniform[:, :count] * (widest + 1)).long()
    start = (uniform[:, count:] * (size - width + 1)).long()
    return Stretches(start, width)


def apply_masks(features: Tensor, mels: Stretches, frames: Stretches) -> Tensor:
    """Zero the drawn stretches of (batch, mels, frames); draws nothing.

    >>> mels = Stretches(torch.tensor([[0]]), torch.tensor([[1]]))
    >>> frames = Stretches(torch.tensor([[1]]), torch.tensor([[1]]))
    >>> apply_masks(torch.ones(1, 2, 3), mels, frames)
    tensor([[[0., 0., 0.],
             [1., 0., 1.]]])
    """
    return hide(features, *hidden_by(features.shape, features.device, mels, frames))


def hidden_by(shape: torch.Size, device: torch.device, mels: Stretches, frames: Stretches) -> tuple[Tensor, Tensor]:
    """Which mels (batch, mels) and which frames (batch, frames) are hidden, bool, on the device."""
    _, num_mels, num_frames = shape
    hidden = _hidden(mels, num_mels), _hidden(frames, num_frames)
    return hidden[0].to(device, non_blocking=True), hidden[1].to(device, non_blocking=True)


def hide(features: Tensor, mels: Tensor, frames: Tensor) -> Tensor:
    """Zero the hidden mels and frames of (batch, mels, frames)."""
    return features.masked_fill(mels.unsqueeze(2) | frames.unsqueeze(1), 0.0)


def _hidden(stretches: Stretches, size: int) -> Tensor:
    position = torch.arange(size).view(1, 1, -1)
    start, width = stretches.start.unsqueeze(-1), stretches.width.unsqueeze(-1)
    return ((position >= start) & (position < start + width)).any(dim=1)  # (batch, size)
