"""The options of trunks and poolings, the section that chooses them, and their tables. No torch is imported here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le

from speakernet.options import NamedOptions, Options
from speakernet.registry import Part


@dataclass(kw_only=True)
class TrunkOptions(Options):
    """What a network between features and pooling says of itself, and the base of its options."""

    front_end_defaults: ClassVar[Mapping[str, Any]] = {"name": "log_mel"}
    """The front end of its published definition: name, and the values that `auto` stands for."""
    default_pooling: ClassVar[str] = "TSTP"
    pooling_names: ClassVar[Mapping[str, str]] = {}
    """Common names of poolings that mean something of its own here."""
    tested_poolings: ClassVar[Sequence[str]] = ("TSTP",)
    has_norm_after_pooling: ClassVar[bool] = False


@dataclass(kw_only=True)
class ResNetSE34LOptions(TrunkOptions):
    """Light ResNet-34 with squeeze-and-excitation, 16 to 128 channels; 1.4 million parameters."""

    default_pooling: ClassVar[str] = "SAP"
    tested_poolings: ClassVar[Sequence[str]] = ("SAP", "ASP")


@dataclass(kw_only=True)
class ResNetSE34V2Options(TrunkOptions):
    """ResNet-34 with squeeze-and-excitation, 32 to 256 channels."""

    front_end_defaults: ClassVar[Mapping[str, Any]] = {"name": "log_mel", "preemphasis": 0.97}
    default_pooling: ClassVar[str] = "ASP"
    pooling_names: ClassVar[Mapping[str, str]] = {"SAP": "ChannelSAP", "ASP": "ChannelASP"}
    tested_poolings: ClassVar[Sequence[str]] = ("SAP", "ASP")


@dataclass(kw_only=True)
class ResNetOptions(TrunkOptions):
    """Residual network whose size is set by options; the defaults make a small one that trains fast on CPUs."""

    channels: Annotated[int, Ge(8), Le(4096)] = 16
    """Channels of the first stage; each following stage has twice as many."""
    blocks: list[Annotated[int, Ge(1), Le(1000)]] = field(default_factory=lambda: [2, 2, 2, 2])
    """Residual blocks of each stage; [3, 4, 6, 3] is ResNet-34."""
    stem_stride: Annotated[int, Ge(1), Le(16)] = 1
    """Stride along mels of the first convolution; 2 halves all later work."""
    gated: bool = False
    """Squeeze-and-excitation in every block."""

    tested_poolings: ClassVar[Sequence[str]] = ("TSTP", "ASP", "ChannelASP")

    def problems(self):  # type: ignore[no-untyped-def]
        """No stage, or more than fit any input."""
        if not 1 <= len(self.blocks) <= 8:
            yield "blocks", f"{self.blocks}; expected the block counts of 1 to 8 stages"


@dataclass(kw_only=True)
class VGGVoxOptions(TrunkOptions):
    """VGG-M on 40 log-mel bands; 4,032,448 parameters with SAP at 512 dimensions."""

    front_end_defaults: ClassVar[Mapping[str, Any]] = {"name": "log_mel", "window": "hann", "num_mels": 40}
    default_pooling: ClassVar[str] = "SAP"
    tested_poolings: ClassVar[Sequence[str]] = ("SAP", "TAP", "MAX")


@dataclass(kw_only=True)
class RawNet3Options(TrunkOptions):
    """Raw-waveform network with analytic sinc filters; 16,280,322 parameters with ECA at 256 dimensions."""

    sinc_stride: Annotated[int, Ge(1), Le(10_000)] = 10
    """Hop of the filterbank in samples; 10 in the published model, larger is faster and coarser."""
    channels: Annotated[int, Ge(8), Le(16_384)] = 1024
    """Channels of the blocks."""
    scale: Annotated[int, Ge(1), Le(64)] = 8
    """Groups of a block's multi-scale convolution."""

    front_end_defaults: ClassVar[Mapping[str, Any]] = {"name": "raw"}
    default_pooling: ClassVar[str] = "ECA"
    pooling_names: ClassVar[Mapping[str, str]] = {"ASP": "ContextASP"}
    tested_poolings: ClassVar[Sequence[str]] = ("ECA", "ASP")
    has_norm_after_pooling: ClassVar[bool] = True


MODELS: dict[str, Part] = {
    "ResNetSE34L": Part(ResNetSE34LOptions, "speakernet.models.resnet_se:ResNetSE34L"),
    "ResNetSE34V2": Part(ResNetSE34V2Options, "speakernet.models.resnet_se:ResNetSE34V2"),
    "ResNet": Part(ResNetOptions, "speakernet.models.resnet:ResNet"),
    "VGGVox": Part(VGGVoxOptions, "speakernet.models.vggvox:VGGVox"),
    "RawNet3": Part(RawNet3Options, "speakernet.models.rawnet3:RawNet3"),
}


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
    """Mean and standard deviation over frames."""


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
}


@dataclass(kw_only=True)
class ModelOptions(NamedOptions):
    """The network between features and embedding."""

    name: str = "ResNetSE34L"
    """Name of the model; `speakernet list models` shows them all."""
    pooling: str = "auto"
    """How frames become one vector; `speakernet list poolings` shows them all; auto: the model's own."""
    embedding_dim: Annotated[int, Ge(1), Le(65_536)] = 256
    """Numbers in an embedding."""
    options: TrunkOptions = field(default_factory=ResNetSE34LOptions)
    """Further options of that model, such as {channels: 32} for ResNet or {sinc_stride: 10} for RawNet3."""
