"""The options of poolings, and their table. No torch here."""

from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from speakernet.options import Component, Options


class PoolingOptions(Options):
    """Base class of the options of poolings; most have none."""

    takes_layers: ClassVar[bool] = False
    """Whether the pooling takes the states of all layers of a pretrained model."""


class StatisticsPoolingOptions(PoolingOptions):
    """Mean and standard deviation over frames (TSTP in wespeaker)."""

    variance_floor: Annotated[float, Ge(1e-12), Le(1.0)] = 1e-7
    """Added to the variance; 1e-7 in wespeaker, 1e-8 in 3D-Speaker's ERes2Net."""


class MultiQueryPoolingOptions(PoolingOptions):
    """Attentive statistics of several queries over several groups of channels."""

    queries: Annotated[int, Ge(1), Le(64)] = 2
    """Number of attentions over all channels, each with separate statistics."""
    heads: Annotated[int, Ge(1), Le(1024)] = 8
    """Number of equal groups of the trunk's channels, each with a separate attention."""
    bottleneck: Annotated[int, Ge(1), Le(65_536)] = 64
    """Hidden channels of each attention."""


class LayerSumOptions(PoolingOptions):
    """Learned weighted sum over layers, then a pooling over frames."""

    takes_layers: ClassVar[bool] = True

    over_frames: str = "TSTP"
    """The pooling over frames, with its defaults."""


class MHFAOptions(PoolingOptions):
    """Multi-head factorized attentive pooling: keys and values from separate layer sums, one
    attention per head.
    """

    takes_layers: ClassVar[bool] = True

    heads: Annotated[int, Ge(1), Le(1024)] = 64
    """Number of attentions over frames."""
    compression: Annotated[int, Ge(1), Le(4096)] = 128
    """Dimensions of keys and values."""
    context: Annotated[int, Ge(0), Le(100)] = 0
    """Frames on each side that the attention of each head sees; 1 or more makes it context-aware
    MHFA."""


class AdapterMFAOptions(PoolingOptions):
    """An adapter for each layer, concatenated, then attentive statistics over frames (wespeaker's
    w2v-BERT recipe).
    """

    takes_layers: ClassVar[bool] = True

    dim: Annotated[int, Ge(1), Le(4096)] = 128
    """Dimensions of each adapter, and hidden channels of the attention."""


POOLINGS: dict[str, Component] = {
    "LayerSum": Component(LayerSumOptions, "speakernet.models.layer_pooling:LayerSum"),
    "MHFA": Component(MHFAOptions, "speakernet.models.layer_pooling:MHFA"),
    "AdapterMFA": Component(AdapterMFAOptions, "speakernet.models.layer_pooling:AdapterMFA"),
    "TSTP": Component(StatisticsPoolingOptions, "speakernet.models.pooling:StatisticsPooling"),
    "MQMHASTP": Component(
        MultiQueryPoolingOptions, "speakernet.models.attentive_pooling:MultiQueryPooling"
    ),
} | {
    name: Component(PoolingOptions, f"speakernet.models.{path}", what)
    for name, path, what in (
        ("TAP", "pooling:MeanPooling", "Mean over frames."),
        ("MAX", "pooling:MaxPooling", "Largest value over frames."),
        (
            "SAP",
            "attentive_pooling:SelfAttentivePooling",
            "Mean over frames, weighted by attention.",
        ),
        (
            "ASP",
            "attentive_pooling:AttentiveStatisticsPooling",
            "Mean and standard deviation over frames, weighted by attention.",
        ),
        (
            "ChannelSAP",
            "attentive_pooling:ChannelSelfAttentivePooling",
            "Mean over frames, weighted by a separate attention for each channel.",
        ),
        (
            "ChannelASP",
            "attentive_pooling:ChannelAttentivePooling",
            "Mean and standard deviation over frames, weighted by a separate attention for each "
            "channel.",
        ),
        (
            "ECA",
            "attentive_pooling:ContextAttentivePooling",
            "Attentive statistics per channel; the attention sees the utterance's mean and "
            "deviation (ECAPA).",
        ),
        (
            "ContextASP",
            "attentive_pooling:ContextFramePooling",
            "Attentive statistics, one weight per frame; the attention sees the utterance's mean "
            "and deviation.",
        ),
        (
            "ASTP",
            "attentive_pooling:TanhAttentivePooling",
            "Attentive statistics per channel, with a tanh (ASTP in wespeaker).",
        ),
        (
            "GlobalASTP",
            "attentive_pooling:GlobalAttentivePooling",
            "ASTP whose attention also sees the utterance's mean and deviation (wespeaker's "
            "`global_context_att`).",
        ),
        (
            "NormASTP",
            "attentive_pooling:NormedAttentivePooling",
            "GlobalASTP with ReLU and batch norm before the tanh (SpeechBrain).",
        ),
    )
}
