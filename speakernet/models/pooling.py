"""Poolings from `(batch, channels, frames)` to `(batch, dim)`, with statistics in float32 over
valid frames only.

In a batch of different lengths, every utterance is pooled as if it were alone.
"""

import torch
from torch import Tensor, nn

from speakernet.frontend.features import Lengths
from speakernet.models.layers import mask_frames, mean_over_frames
from speakernet.models.options.poolings import StatisticsPoolingOptions


class Pooling(nn.Module):
    """The abstract pooling; `dim` is the size of its output."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dim = channels

    def forward(self, frames: Tensor, lengths: Lengths = None) -> Tensor:
        """(batch, channels, frames), and (batch,) valid frames or None, to (batch, dim)."""
        raise NotImplementedError


class MeanPooling(Pooling):
    """Mean over frames.

    >>> MeanPooling(1)(torch.tensor([[[1.0, 2.0, 6.0]]]))
    tensor([[3.]])
    """

    def forward(self, frames: Tensor, lengths: Lengths = None) -> Tensor:
        """Means, (batch, channels)."""
        return mean_over_frames(mask_frames(frames, lengths), lengths)


class MaxPooling(Pooling):
    """Largest value over frames.

    >>> MaxPooling(1)(torch.tensor([[[1.0, 2.0, 6.0]]]), torch.tensor([2]))
    tensor([[2.]])
    """

    def forward(self, frames: Tensor, lengths: Lengths = None) -> Tensor:
        """Maxima, (batch, channels)."""
        # Not zero, which would exceed all values of a negative channel.
        return mask_frames(frames, lengths, -torch.inf).amax(dim=2)


class StatisticsPooling(Pooling):
    """Mean and standard deviation over frames (TSTP in wespeaker).

    >>> StatisticsPooling(StatisticsPoolingOptions(), 1)(torch.tensor([[[1.0, 3.0]]]))
    tensor([[2.0000, 1.4142]])
    """

    def __init__(self, options: StatisticsPoolingOptions, channels: int) -> None:
        super().__init__(2 * channels)
        self.variance_floor = options.variance_floor

    def forward(self, frames: Tensor, lengths: Lengths = None) -> Tensor:
        """Means, then standard deviations with divisor n - 1, (batch, 2 channels)."""
        mean, variance = mean_and_variance(frames, lengths)
        # As in wespeaker; needed because a single frame has variance 0, where the root's gradient
        # is infinite.
        return torch.cat((mean, (variance + self.variance_floor).sqrt()), dim=1)


def mean_and_variance(
    frames: Tensor, lengths: Lengths, is_unbiased: bool = True
) -> tuple[Tensor, Tensor]:
    """Mean and variance over the valid frames, each (batch, channels); a single frame has variance
    0.
    """
    frames = mask_frames(frames, lengths)
    mean = mean_over_frames(frames, lengths)
    # Centred first, because a difference of squares loses digits if the mean is large.
    centred = mask_frames(frames - mean.unsqueeze(2), lengths)
    squares = centred.square().sum(dim=2)  # (batch, channels)
    if lengths is None:
        return mean, squares / max(frames.shape[2] - int(is_unbiased), 1)
    return mean, squares / (lengths - int(is_unbiased)).clamp(min=1).unsqueeze(1)
