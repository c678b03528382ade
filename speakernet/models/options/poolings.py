"""The options of poolings, and their table. No torch is imported here."""

from typing import Annotated

from annotated_types import Ge, Le

from speakernet.options import Component, Options


class PoolingOptions(Options):
    """The base of the options of poolings."""


class MeanPoolingOptions(PoolingOptions):
    """Mean over frames."""


class MaxPoolingOptions(PoolingOptions):
    """Largest value over frames."""


class StatisticsPoolingOptions(PoolingOptions):
    """Mean and standard deviation over frames (TSTP in wespeaker)."""

    variance_floor: Annotated[float, Ge(1e-12), Le(1.0)] = 1e-7
    """Added to the variance; 1e-7 in wespeaker, 1e-8 in 3D-Speaker's ERes2Net."""


class SelfAttentivePoolingOptions(PoolingOptions):
    """Mean over frames, weighted by attention."""


class AttentiveStatisticsPoolingOptions(PoolingOptions):
    """Mean and standard deviation over frames, weighted by attention."""


class ChannelSelfAttentivePoolingOptions(PoolingOptions):
    """Mean over frames, weighted by attention of each channel's own."""


class ChannelAttentivePoolingOptions(PoolingOptions):
    """Mean and standard deviation over frames, weighted by attention of each channel's own."""


class ContextAttentivePoolingOptions(PoolingOptions):
    """Attentive statistics of each channel, the attention seeing the utterance's mean and deviation (ECAPA)."""


class ContextFramePoolingOptions(PoolingOptions):
    """Attentive statistics, one weight a frame, the attention seeing the utterance's mean and deviation."""


class TanhAttentivePoolingOptions(PoolingOptions):
    """Attentive statistics of each channel, through a tanh (ASTP in wespeaker)."""


class GlobalAttentivePoolingOptions(PoolingOptions):
    """As ASTP, the attention seeing the utterance's mean and deviation (wespeaker's `global_context_att`)."""


class NormedAttentivePoolingOptions(PoolingOptions):
    """As GlobalASTP, with ReLU and batch norm before the tanh (SpeechBrain)."""


class MultiQueryPoolingOptions(PoolingOptions):
    """Attentive statistics of several queries over several groups of channels."""

    queries: Annotated[int, Ge(1), Le(64)] = 2
    """Attentions over all channels; each gives statistics of its own."""
    heads: Annotated[int, Ge(1), Le(1024)] = 8
    """Groups of channels with an attention of their own; they share the trunk's channels evenly."""
    bottleneck: Annotated[int, Ge(1), Le(65_536)] = 64
    """Hidden channels of each attention."""


POOLINGS: dict[str, Component] = {
    "TAP": Component(MeanPoolingOptions, "speakernet.models.pooling:MeanPooling"),
    "MAX": Component(MaxPoolingOptions, "speakernet.models.pooling:MaxPooling"),
    "TSTP": Component(StatisticsPoolingOptions, "speakernet.models.pooling:StatisticsPooling"),
    "SAP": Component(SelfAttentivePoolingOptions, "speakernet.models.pooling:SelfAttentivePooling"),
    "ASP": Component(AttentiveStatisticsPoolingOptions, "speakernet.models.pooling:AttentiveStatisticsPooling"),
    "ChannelSAP": Component(
        ChannelSelfAttentivePoolingOptions, "speakernet.models.pooling:ChannelSelfAttentivePooling"
    ),
    "ChannelASP": Component(ChannelAttentivePoolingOptions, "speakernet.models.pooling:ChannelAttentivePooling"),
    "ECA": Component(ContextAttentivePoolingOptions, "speakernet.models.pooling:ContextAttentivePooling"),
    "ContextASP": Component(ContextFramePoolingOptions, "speakernet.models.pooling:ContextFramePooling"),
    "ASTP": Component(TanhAttentivePoolingOptions, "speakernet.models.pooling:TanhAttentivePooling"),
    "GlobalASTP": Component(GlobalAttentivePoolingOptions, "speakernet.models.pooling:GlobalAttentivePooling"),
    "NormASTP": Component(NormedAttentivePoolingOptions, "speakernet.models.pooling:NormedAttentivePooling"),
    "MQMHASTP": Component(MultiQueryPoolingOptions, "speakernet.models.pooling:MultiQueryPooling"),
}
