"""Pooling: from `(batch, channels, frames)` to `(batch, dim)`, with statistics in float32 and over valid frames only.

Each takes the number of channels and says in `dim` how long its vectors are. A batch of utterances of different
lengths pools to what the utterances alone give.
"""

import torch
from torch import Tensor, nn

from speakernet.frontend.features import valid_frames
from speakernet.models.layers import mask_frames, mean_over_frames


class Pooling(nn.Module):
    """The abstract pooling: it says how many values it gives."""

    dim: int

    def forward(self, frames: Tensor, lengths: Tensor | None = None) -> Tensor:
        """(batch, channels, frames), and (batch,) valid frames or None, to (batch, dim)."""
        raise NotImplementedError


class MeanPooling(Pooling):
    """Mean over frames.

    >>> MeanPooling(1)(torch.tensor([[[1.0, 2.0, 6.0]]]))
    tensor([[3.]])
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dim = channels

    def forward(self, frames: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Means, (batch, channels)."""
        return mean_over_frames(mask_frames(frames, lengths), lengths)


class MaxPooling(Pooling):
    """Largest value over frames.

    >>> MaxPooling(1)(torch.tensor([[[1.0, 2.0, 6.0]]]), torch.tensor([2]))
    tensor([[2.]])
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dim = channels

    def forward(self, frames: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Maxima, (batch, channels)."""
        if lengths is not None:
            hidden = ~valid_frames(lengths, frames.shape[-1]).unsqueeze(1)
            frames = frames.masked_fill(hidden, -torch.inf)
        return frames.amax(dim=2)


class StatisticsPooling(Pooling):
    """Mean and standard deviation over frames (TSTP in wespeaker, with its floor of 1e-7 below the root).

    >>> StatisticsPooling(1)(torch.tensor([[[1.0, 3.0]]]))
    tensor([[2.0000, 1.4142]])
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dim = 2 * channels

    def forward(self, frames: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Means, then standard deviations with n - 1 below, (batch, 2 channels)."""
        mean, variance = mean_and_variance(frames, lengths)
        return torch.cat((mean, (variance + 1e-7).sqrt()), dim=1)


class SelfAttentivePooling(Pooling):
    """Mean over frames weighted by attention: one weight a frame, from a tanh layer and a learned vector.

    Source: Okabe et al. 2018, "Attentive Statistics Pooling", equations 4 to 6, in voxceleb_trainer's form.

    >>> SelfAttentivePooling(4)(torch.ones(2, 4, 7)).shape
    torch.Size([2, 4])
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dim = channels
        self.hidden = nn.Linear(channels, channels)
        self.attention = nn.Parameter(torch.empty(channels, 1))
        nn.init.xavier_normal_(self.attention)

    def weights(self, frames: Tensor, lengths: Tensor | None) -> Tensor:
        """Attention over frames, (batch, 1, frames), which sums to one over the valid frames."""
        logits = self.hidden(frames.transpose(1, 2)).tanh() @ self.attention  # (batch, frames, 1)
        return softmax_over_frames(logits.transpose(1, 2), lengths)

    def forward(self, frames: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Weighted means, (batch, channels)."""
        return (frames * self.weights(frames, lengths)).sum(dim=2)


class AttentiveStatisticsPooling(SelfAttentivePooling):
    """Mean and standard deviation over frames weighted by the attention of SAP.

    Source: Okabe et al. 2018, equations 5 and 6; variance floor 1e-5 as in voxceleb_trainer.

    >>> AttentiveStatisticsPooling(4)(torch.ones(2, 4, 7)).shape
    torch.Size([2, 8])
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.dim = 2 * channels

    def forward(self, frames: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Weighted means, then weighted standard deviations, (batch, 2 channels)."""
        return weighted_statistics(frames, self.weights(frames, lengths), floor=1e-5)


class ChannelAttentivePooling(Pooling):
    """Attention from a bottleneck of two 1 x 1 convolutions, with weights of its own for every channel.

    The one class behind voxceleb_trainer's poolings of ResNetSE34V2 (SAP and ASP) and of RawNet3 (ECA, and ASP with
    one weight a frame for all channels).

    Args:
        channels: of the input.
        with_deviation: also give weighted standard deviations.
        with_context: let the attention see the utterance's mean and standard deviation beside each frame.
        one_weight: one weight a frame instead of one for every channel.
        floor: least variance (context and output).
        ceiling: largest variance.

    Source: Desplanques et al. 2020, "ECAPA-TDNN", section 3.1.

    >>> ChannelAttentivePooling(4)(torch.ones(2, 4, 7)).shape
    torch.Size([2, 8])
    """

    BOTTLENECK = 128

    def __init__(
        self,
        channels: int,
        with_deviation: bool = True,
        with_context: bool = False,
        one_weight: bool = False,
        floor: float = 1e-5,
        ceiling: float | None = None,
    ) -> None:
        super().__init__()
        self.dim = 2 * channels if with_deviation else channels
        self.with_deviation = with_deviation
        self.with_context = with_context
        self.floor = floor
        self.ceiling = ceiling
        self.squeeze = nn.Conv1d(3 * channels if with_context else channels, self.BOTTLENECK, 1)
        self.norm = nn.BatchNorm1d(self.BOTTLENECK)
        self.expand = nn.Conv1d(self.BOTTLENECK, 1 if one_weight else channels, 1)

    def forward(self, frames: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Weighted means, then standard deviations where asked for, (batch, dim)."""
        seen = frames
        if self.with_context:
            mean, variance = mean_and_variance(frames, lengths)
            deviation = variance.clamp(self.floor, self.ceiling).sqrt()
            context = torch.cat((mean, deviation), dim=1).unsqueeze(2)  # (batch, 2 channels, 1)
            seen = torch.cat((frames, context.expand(-1, -1, frames.shape[2])), dim=1)
        logits = self.expand(self.norm(self.squeeze(seen).relu()))
        weights = softmax_over_frames(logits, lengths)
        if not self.with_deviation:
            return (frames * weights).sum(dim=2)
        return weighted_statistics(frames, weights, self.floor, self.ceiling)


class ChannelSelfAttentivePooling(ChannelAttentivePooling):
    """SAP as ResNetSE34V2 has it: a weight for every channel and frame, means only.

    >>> ChannelSelfAttentivePooling(4)(torch.ones(2, 4, 7)).shape
    torch.Size([2, 4])
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, with_deviation=False)


class ContextAttentivePooling(ChannelAttentivePooling):
    """ECA as RawNet3 has it: a weight for every channel and frame that sees the whole utterance.

    >>> ContextAttentivePooling(4)(torch.rand(2, 4, 7)).shape
    torch.Size([2, 8])
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, with_context=True, floor=1e-4, ceiling=1e4)


class ContextFramePooling(ChannelAttentivePooling):
    """ASP as RawNet3 has it: one weight a frame that sees the whole utterance.

    >>> ContextFramePooling(4)(torch.rand(2, 4, 7)).shape
    torch.Size([2, 8])
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, with_context=True, one_weight=True, floor=1e-4, ceiling=1e4)


def softmax_over_frames(logits: Tensor, lengths: Tensor | None) -> Tensor:
    """Softmax over the last axis of (batch, channels, frames), zero past an utterance's end."""
    if lengths is not None:
        hidden = ~valid_frames(lengths, logits.shape[-1]).unsqueeze(1)
        logits = logits.masked_fill(hidden, -torch.inf)
    return logits.softmax(dim=-1)


def weighted_statistics(frames: Tensor, weights: Tensor, floor: float, ceiling: float | None = None) -> Tensor:
    """Means and standard deviations under weights that sum to one over frames, (batch, 2 channels)."""
    mean = (frames * weights).sum(dim=2)
    variance = (frames.square() * weights).sum(dim=2) - mean.square()
    return torch.cat((mean, variance.clamp(floor, ceiling).sqrt()), dim=1)


def mean_and_variance(frames: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and variance (n - 1 below) over the valid frames, each (batch, channels); one frame alone has variance 0."""
    frames = mask_frames(frames, lengths)
    mean = mean_over_frames(frames, lengths)
    centred = mask_frames(frames - mean.unsqueeze(2), lengths)
    if lengths is None:
        return mean, centred.square().sum(dim=2) / max(frames.shape[2] - 1, 1)
    return mean, centred.square().sum(dim=2) / (lengths - 1).clamp(min=1).unsqueeze(1)
