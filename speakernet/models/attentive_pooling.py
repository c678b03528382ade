"""Attentive poolings: a small network computes the weights of the frames."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from speakernet.frontend.features import Lengths
from speakernet.models.layers import mask_frames
from speakernet.models.options.poolings import MultiQueryPoolingOptions
from speakernet.models.pooling import Pooling, mean_and_variance


class Variances(NamedTuple):
    """How weighted variances are computed, and their bounds."""

    floor: float = 1e-5
    ceiling: float | None = None
    is_centred: bool = False
    """Mean squares of the deviations, as in SpeechBrain; otherwise differences of squares."""


VARIANCES = Variances()


class SelfAttentivePooling(Pooling):
    """Mean over frames weighted by attention: one weight per frame, from a tanh layer and a learned
    vector.

    Source: Okabe et al. 2018, "Attentive Statistics Pooling", equations 4 to 6, in
    voxceleb_trainer's form.

    >>> SelfAttentivePooling(4)(torch.ones(2, 4, 7)).shape
    torch.Size([2, 4])
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.hidden = nn.Linear(channels, channels)
        self.attention = nn.Parameter(torch.empty(channels, 1))
        nn.init.xavier_normal_(self.attention)

    def weights(self, frames: Tensor, lengths: Lengths) -> Tensor:
        """Attention weights, (batch, 1, frames), which sum to one over the valid frames."""
        hidden = self.hidden(frames.transpose(1, 2)).tanh()  # (batch, frames, channels)
        logits = hidden @ self.attention  # (batch, frames, 1)
        return softmax_over_frames(logits.transpose(1, 2), lengths)

    def forward(self, frames: Tensor, lengths: Lengths = None) -> Tensor:
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

    def forward(self, frames: Tensor, lengths: Lengths = None) -> Tensor:
        """Weighted means, then weighted standard deviations, (batch, 2 channels)."""
        return weighted_statistics(frames, self.weights(frames, lengths), VARIANCES)


class ChannelAttentivePooling(Pooling):
    """Attention from a bottleneck of two 1 x 1 convolutions, with separate weights for every
    channel.

    The channel- and context-dependent poolings of the toolkits differ in the layers between the
    convolutions, in the input of the attention (with or without the utterance's mean and deviation)
    and in the bounds of the variance.

    Source: Desplanques et al. 2020, "ECAPA-TDNN", section 3.1.

    >>> ChannelAttentivePooling(4)(torch.ones(2, 4, 7)).shape
    torch.Size([2, 8])
    """

    # The same in voxceleb_trainer, wespeaker and SpeechBrain.
    BOTTLENECK = 128

    def __init__(
        self,
        channels: int,
        with_deviation: bool = True,
        with_context: bool = False,
        one_weight: bool = False,
        relu_norm: bool = True,
        tanh: bool = False,
        variances: Variances = VARIANCES,
        bottleneck: int = BOTTLENECK,
    ) -> None:
        super().__init__(2 * channels if with_deviation else channels)
        self.with_deviation = with_deviation
        self.with_context = with_context
        self.variances = variances
        self.squeeze = nn.Conv1d(3 * channels if with_context else channels, bottleneck, 1)
        self.norm = nn.BatchNorm1d(bottleneck) if relu_norm else None
        self.tanh = tanh
        self.expand = nn.Conv1d(bottleneck, 1 if one_weight else channels, 1)

    def forward(self, frames: Tensor, lengths: Lengths = None) -> Tensor:
        """Weighted means, then standard deviations if enabled, (batch, dim)."""
        # Frames differ in what they tell about a speaker: a vowel says more than a pause, and
        # different channels listen for different sounds. So each channel weighs the frames by
        # itself.
        hidden = self.squeeze(self._add_context(frames, lengths))  # (batch, bottleneck, frames)
        if self.norm is not None:
            hidden = self.norm(hidden.relu())
        if self.tanh:
            hidden = hidden.tanh()
        # (batch, channels or 1, frames)
        weights = softmax_over_frames(self.expand(hidden), lengths)
        if not self.with_deviation:
            return (frames * weights).sum(dim=2)
        return weighted_statistics(frames, weights, self.variances)

    def _add_context(self, frames: Tensor, lengths: Lengths) -> Tensor:
        """Input of the attention, (batch, channels or 3 channels, frames)."""
        if not self.with_context:
            return frames
        floor, ceiling, is_centred = self.variances
        # SpeechBrain divides the context's variance by n, the other toolkits by n - 1.
        mean, variance = mean_and_variance(frames, lengths, not is_centred)
        deviation = variance.clamp(floor, ceiling).sqrt()
        # The same at every frame: is this frame unusual for this utterance?
        context = torch.cat((mean, deviation), dim=1).unsqueeze(2)  # (batch, 2 channels, 1)
        return torch.cat((frames, context.expand(-1, -1, frames.shape[2])), dim=1)


# SAP of ResNetSE34V2: means only.
ChannelSelfAttentivePooling = partial(ChannelAttentivePooling, with_deviation=False)
# ECA of RawNet3, with the bounds of its `clamp(min=1e-4, max=1e4)`.
ContextAttentivePooling = partial(
    ChannelAttentivePooling, with_context=True, variances=Variances(1e-4, 1e4)
)
# ASP of RawNet3: one weight per frame.
ContextFramePooling = partial(ContextAttentivePooling, one_weight=True)
# ASTP of wespeaker: tanh instead of ReLU and norm.
TanhAttentivePooling = partial(
    ChannelAttentivePooling, relu_norm=False, tanh=True, variances=Variances(1e-7)
)
# ASTP of wespeaker with global context.
GlobalAttentivePooling = partial(TanhAttentivePooling, with_context=True)
# The pooling of SpeechBrain's ECAPA-TDNN: ReLU and batch norm before the tanh.
NormedAttentivePooling = partial(
    ChannelAttentivePooling,
    with_context=True,
    tanh=True,
    variances=Variances(1e-12, is_centred=True),
)


class MultiQueryPooling(Pooling):
    """MQMHASTP: several queries, each of which attends to every head (group of channels)
    separately.

    Source: Zhao et al. 2021, "Multi-query multi-head attention pooling and inter-topK penalty for
    speaker verification", with a weight for every channel (vector attention), as in wespeaker's
    defaults.

    >>> MultiQueryPooling(MultiQueryPoolingOptions(), 16)(torch.rand(2, 16, 7)).shape
    torch.Size([2, 64])
    """

    def __init__(self, options: MultiQueryPoolingOptions, channels: int) -> None:
        heads = options.heads
        if channels % heads:
            raise ValueError(
                f"MQMHASTP: {heads} heads cannot split {channels} channels; use a divisor of "
                f"{channels}"
            )
        super().__init__(2 * channels * options.queries)
        self.heads = heads
        self.queries = nn.ModuleList()
        for _ in range(options.queries):
            query = nn.ModuleList()
            for _ in range(heads):
                query.append(_HeadAttention(channels // heads, options.bottleneck))
            self.queries.append(query)

    def forward(self, frames: Tensor, lengths: Lengths = None) -> Tensor:
        """For each query and head: weighted means, then standard deviations; (batch, 2 channels x
        queries).
        """
        groups = frames.chunk(self.heads, dim=1)  # (batch, channels / heads, frames) each
        statistics = []
        for query in self.queries:
            for group, head in zip(groups, query, strict=True):  # type: ignore[call-overload]
                weights = softmax_over_frames(head(group), lengths)
                statistics.append(weighted_statistics(group, weights, Variances(1e-7)))
        return torch.cat(statistics, dim=1)


class _HeadAttention(nn.Module):
    """Attention logits of one head for every channel and frame."""

    def __init__(self, channels: int, bottleneck: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv1d(channels, bottleneck, 1)
        self.expand = nn.Conv1d(bottleneck, channels, 1)

    def forward(self, frames: Tensor) -> Tensor:
        """(batch, channels, frames) in and out."""
        return self.expand(self.squeeze(frames).tanh())


def softmax_over_frames(logits: Tensor, lengths: Lengths) -> Tensor:
    """Softmax over the last axis of (batch, channels, frames), zero past an utterance's end."""
    return mask_frames(logits, lengths, -torch.inf).softmax(dim=-1)


def weighted_statistics(frames: Tensor, weights: Tensor, variances: Variances) -> Tensor:
    """Means and standard deviations under weights that sum to one over frames, (batch, 2
    channels).
    """
    mean = (frames * weights).sum(dim=2)  # (batch, channels)
    if variances.is_centred:
        variance = ((frames - mean.unsqueeze(2)).square() * weights).sum(dim=2)
    else:
        variance = (frames.square() * weights).sum(dim=2) - mean.square()
    # A difference of squares can round below zero, and the root's gradient at zero is infinite.
    return torch.cat((mean, variance.clamp(variances.floor, variances.ceiling).sqrt()), dim=1)
