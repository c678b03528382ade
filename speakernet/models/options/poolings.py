"""The options of poolings, and their table. No torch is imported here."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from speakernet.options import Options
from speakernet.registry import Part


@dataclass(kw_only=True)
class PoolingOptions(Options):
    """The base of the options of poolings."""


@dataclass(kw_only=True)
class MeanPoolingOptions(PoolingOptions):
    """Mean over frames."""


@dataclass(kw_only=True)
class MaxPoolingOptions(PoolingOptions):
    """Largest value over frames."""


@dataclass(kw_only=True)
class StatisticsPoolingOptions(PoolingOptions):
    """Mean and standard deviation over frames (TSTP in wespeaker)."""

    variance_floor: Annotated[float, Ge(1e-12), Le(1.0)] = 1e-7
    """Added to the variance; 1e-7 in wespeaker, 1e-8 in 3D-Speaker's ERes2Net."""


@dataclass(kw_only=True)
class SelfAttentivePoolingOptions(PoolingOptions):
    """Mean over frames, weighted by attention."""


@dataclass(kw_only=True)
class AttentiveStatisticsPoolingOptions(PoolingOptions):
    """Mean and standard deviation over frames, weighted by attention."""


@dataclass(kw_only=True)
class ChannelSelfAttentivePoolingOptions(PoolingOptions):
    """Mean over frames, weighted by attention of each channel's own."""


@dataclass(kw_only=True)
class ChannelAttentivePoolingOptions(PoolingOptions):
    """Mean and standard deviation over frames, weighted by attention of each channel's own."""


@dataclass(kw_only=True)
class ContextAttentivePoolingOptions(PoolingOptions):
    """Attentive statistics of each channel, the attention seeing the utterance's mean and deviation (ECAPA)."""


@dataclass(kw_only=True)
class ContextFramePoolingOptions(PoolingOptions):
    """Attentive statistics, one weight a frame, the attention seeing the utterance's mean and deviation."""


@dataclass(kw_only=True)
class TanhAttentivePoolingOptions(PoolingOptions):
    """Attentive statistics of each channel, through a tanh (ASTP in wespeaker)."""


@dataclass(kw_only=True)
class GlobalAttentivePoolingOptions(PoolingOptions):
    """As ASTP, the attention seeing the utterance's mean and deviation (wespeaker's `global_context_att`)."""


@dataclass(kw_only=True)
class NormedAttentivePoolingOptions(PoolingOptions):
    """As GlobalASTP, with ReLU and batch norm before the tanh (SpeechBrain)."""


@dataclass(kw_only=True)
class MultiQueryPoolingOptions(PoolingOptions):
    """Attentive statistics of several queries over several groups of channels."""

    queries: Annotated[int, Ge(1), Le(64)] = 2
    """Attentions over all channels; each gives statistics of its own."""
    heads: Annotated[int, Ge(1), Le(1024)] = 8
    """Groups of channels with an attention of their own; they share the trunk's channels evenly."""
    bottleneck: Annotated[int, Ge(1), Le(65_536)] = 64
    """Hidden channels of each attention."""


POOLINGS: dict[str, Part] = {
    "TAP": Part(MeanPoolingOptions, "speakernet.models.pooling:MeanPooling"),
    "MAX": Part(MaxPoolingOptions, "speakernet.models.pooling:MaxPooling"),
    "TSTP": Part(StatisticsPoolingOptions, "speakernet.models.pooling:StatisticsPooling"),
    "SAP": Part(SelfAttentivePoolingOptions, "speakernet.models.pooling:SelfAttentivePooling"),
    "ASP": Part(AttentiveStatisticsPoolingOptions, "speakernet.models.pooling:AttentiveStatisticsPooling"),
    "ChannelSAP": Part(ChannelSelfAttentivePoolingOptions, "speakernet.models.pooling:ChannelSelfAttentivePooling"),
    "ChannelASP": Part(ChannelAttentivePoolingOptions, "speakernet.models.pooling:ChannelAttentivePooling"),
    "ECA": Part(ContextAttentivePoolingOptions, "speakernet.models.pooling:ContextAttentivePooling"),
    "ContextASP": Part(ContextFramePoolingOptions, "speakernet.models.pooling:ContextFramePooling"),
    "ASTP": Part(TanhAttentivePoolingOptions, "speakernet.models.pooling:TanhAttentivePooling"),
    "GlobalASTP": Part(GlobalAttentivePoolingOptions, "speakernet.models.pooling:GlobalAttentivePooling"),
    "NormASTP": Part(NormedAttentivePoolingOptions, "speakernet.models.pooling:NormedAttentivePooling"),
    "MQMHASTP": Part(MultiQueryPoolingOptions, "speakernet.models.pooling:MultiQueryPooling"),
}
