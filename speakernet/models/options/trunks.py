"""The options of trunks, one class per family, with facts about each. No torch here."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from annotated_types import Ge, Le

from speakernet.options import Options, Several

Channels = Annotated[int, Ge(8), Le(16_384)]
PlaneChannels = Annotated[int, Ge(8), Le(4096)]
Blocks = Several[Annotated[int, Ge(1), Le(1000)]]
Strides = Several[Annotated[int, Ge(1), Le(16)]]
# Blocks of each stage (He et al. 2016, table 1); ResNet-50 has the same number, of three
# convolutions each.
RESNET34 = (3, 4, 6, 3)
ECAPA_GROUPS = 8
"""Groups of channels in ECAPA-TDNN's split."""


class Published(NamedTuple):
    """The published model of a family or size; a slow test recounts its parameters and
    operations.
    """

    paper: str = ""
    dim: int = 256
    """Size of an embedding."""
    mels: int = 80
    """Mel bands; 0 if the input is samples."""
    parameters: int = 0
    macs: int = 0
    """Multiply-accumulate operations from the features of 2 seconds to the embedding."""


class TrunkOptions(Options):
    """Base class of the options of trunks, with facts about the network."""

    published: ClassVar[Published] = Published()
    front_end_defaults: ClassVar[Mapping[str, Any]] = {"name": "fbank"}
    """Front end of the published definition: its name, and the values that `auto` stands for."""
    poolings: ClassVar[Sequence[str]] = ("TSTP",)
    """Pooling of the published definition, then others that the tests cover; any other that fits
    works as well."""
    pooling_names: ClassVar[Mapping[str, str]] = {}
    """Common pooling names that mean a different pooling in this network."""
    gives_layers: ClassVar[bool] = False
    """Whether the trunk outputs the states of all its layers, which need special poolings."""
    training_only: ClassVar[frozenset[str]] = frozenset()
    """Options of training that do not describe the network."""
    has_norm_after_pooling: ClassVar[bool] = False
    """Whether a batch norm follows the pooling."""
    embedding_layer: ClassVar[str] = "linear"
    """The layer from pooled vector to embedding, see `speakernet.models.layers.make_embedding`."""

    @property
    def has_adapters(self) -> bool:
        """Whether training adds low-rank adapters, which are merged at the end."""
        return False

    def with_spare(self, path: str) -> "TrunkOptions":
        """These options, with a model file from which a pretrained backbone may be read; only such
        trunks need it.
        """
        return self


class TwoLayerOptions(TrunkOptions):
    """Base class for trunks that may be followed by two embedding layers."""

    two_layers: bool = False
    """Two embedding layers (`two_emb_layer` in wespeaker)."""

    @property
    def embedding_layer(self) -> str:  # type: ignore[override]
        """As set by `two_layers`."""
        return "two_linear" if self.two_layers else super().embedding_layer


class NormedEmbeddingOptions(TrunkOptions):
    """Base class for trunks whose embedding layer may be followed by a batch norm."""

    embedding_norm: bool = False
    """Batch norm after the embedding layer (`emb_bn` in wespeaker and ReDimNet)."""

    @property
    def embedding_layer(self) -> str:  # type: ignore[override]
        """As set by `embedding_norm`."""
        return "normed_linear" if self.embedding_norm else super().embedding_layer


SIZES = json.loads(Path(__file__).with_name("sizes.json").read_text("utf-8"))
"""Further published sizes by name, with what differs from the options of their family."""


def make_size(owner: type[TrunkOptions], name: str) -> type[Any]:
    """A size of a family in `SIZES`: a subclass with its own defaults and facts."""
    facts = dict(SIZES[name])
    figures = {figure: facts.pop(figure) for figure in Published._fields if figure in facts}
    fields = owner.model_fields
    annotations = {fact: fields[fact].rebuild_annotation() for fact in facts if fact in fields}
    namespace = {
        "__module__": owner.__module__,
        "__doc__": owner.__doc__,
        "__annotations__": annotations,
        "published": owner.published._replace(**figures),
        **facts,
    }
    metaclass: Any = type(owner)
    return metaclass(name, (owner,), namespace)


def family(first: str, owner: type[TrunkOptions], *others: str) -> dict[str, type[Any]]:
    """The sizes of a family by name; the defaults of `owner` are those of the first."""
    return {first: owner} | {name: make_size(owner, name) for name in others}


class ResNetSE34LOptions(TrunkOptions):
    """Light ResNet-34 with squeeze-and-excitation, 16 to 128 channels; 1.4 million parameters."""

    published = Published("Chung et al. 2020", 512, 40, 1_437_078, 440_270_784)
    front_end_defaults: ClassVar = {"name": "log_mel"}
    poolings = ("SAP", "ASP")


class ResNetSE34V2Options(TrunkOptions):
    """ResNet-34 with squeeze-and-excitation, 32 to 256 channels."""

    published = Published("Heo et al. 2020", 512, 64, 8_028_492, 3_636_556_544)
    front_end_defaults: ClassVar = {"name": "log_mel", "preemphasis": 0.97}
    poolings = ("ASP", "SAP")
    pooling_names: ClassVar = {"SAP": "ChannelSAP", "ASP": "ChannelASP"}


class ResNetOptions(TrunkOptions):
    """Residual network of any size; the defaults give a small network that trains fast on CPUs."""

    channels: PlaneChannels = 16
    """Channels of the first stage; each later stage has twice as many."""
    blocks: Blocks = (2, 2, 2, 2)
    """Residual blocks of each stage; [3, 4, 6, 3] is ResNet-34."""
    stem_stride: Annotated[int, Ge(1), Le(16)] = 1
    """Stride along mels of the first convolution; 2 halves all later work."""
    gated: bool = False
    """Squeeze-and-excitation in every block."""
    mel_strides: Strides = ()
    """Stride along mels of each stage; empty: 1, then 2 in all others. Golden Gemini has [2, 2, 2,
    2]."""
    frame_strides: Strides = ()
    """Stride along frames of each stage; empty: 1, then 2 in all others. Golden Gemini has [1, 2,
    1, 1]."""

    published = Published("He et al. 2016", 256, 80, 1_355_504, 543_631_360)
    front_end_defaults: ClassVar = {"name": "log_mel"}
    poolings = ("TSTP", "ASP", "ChannelASP")

    def problems(self):  # type: ignore[no-untyped-def]
        """No stages, too many for any input, or strides that do not match them."""
        blocks = list(self.blocks)
        if not 1 <= len(blocks) <= 8:
            yield "blocks", f"{blocks}; expected the block counts of 1 to 8 stages"
        for name in ("mel_strides", "frame_strides"):
            strides = list(getattr(self, name))
            if strides and len(strides) != len(blocks):
                yield name, f"{strides} for blocks {blocks}; expected one stride per stage, or none"


class VGGVoxOptions(TrunkOptions):
    """VGG-M on 40 log-mel bands; 4,032,448 parameters (SAP, 512-dimensional)."""

    published = Published("Nagrani et al. 2017", 512, 40, 4_032_448, 531_239_168)
    front_end_defaults: ClassVar = {"name": "log_mel", "window": "hann", "num_mels": 40}
    poolings = ("SAP", "TAP", "MAX")


class RawNet3Options(TrunkOptions):
    """Raw-waveform network with analytic sinc filters; 16,280,322 parameters (ECA,
    256-dimensional).
    """

    sinc_stride: Annotated[int, Ge(1), Le(10_000)] = 10
    """Hop of the filterbank in samples; 10 in the published model, larger is faster but coarser."""
    channels: Channels = 1024
    """Channels of the blocks."""
    scale: Annotated[int, Ge(1), Le(64)] = 8
    """Groups in a block's multi-scale convolution."""

    published = Published("Jung et al. 2022", 256, 0, 16_280_322, 9_521_052_160)
    front_end_defaults: ClassVar = {"name": "raw"}
    poolings = ("ECA", "ASP")
    pooling_names: ClassVar = {"ASP": "ContextASP"}
    has_norm_after_pooling = True


class XVectorOptions(TrunkOptions):
    """Time-delay network of the x-vector; 4.61 million parameters (TSTP, 80 mels,
    512-dimensional).
    """

    channels: Channels = 512
    """Channels of the first four layers."""
    statistics_channels: Channels = 1500
    """Channels of the fifth layer, whose statistics are pooled."""

    published = Published("Snyder et al. 2018", 512, 80, 4_610_524, 530_817_024)
    poolings = ("TSTP", "GlobalASTP")
    embedding_layer = "two_linear"


class ECAPAOptions(NormedEmbeddingOptions):
    """ECAPA-TDNN in the variant of wespeaker (the default), or of SpeechBrain and 3D-Speaker."""

    channels: Channels = 512
    """Channels of the blocks, a multiple of 8."""
    aggregate_channels: Channels = 1536
    """Channels of the layer that combines all blocks."""
    speechbrain: bool = False
    """SpeechBrain's variant: edges mirrored instead of zero-padded, the first instead of the last
    group of each split passed through, batch norm after the aggregation."""

    published = Published("Desplanques et al. 2020", 192, 80, 6_190_720, 1_037_271_040)
    poolings = ("GlobalASTP", "ASTP", "NormASTP")
    pooling_names: ClassVar = {"ASP": "GlobalASTP"}
    has_norm_after_pooling = True

    def problems(self):  # type: ignore[no-untyped-def]
        """Channels that cannot be split evenly into groups."""
        if self.channels % ECAPA_GROUPS:
            yield "channels", f"{self.channels}; expected a multiple of {ECAPA_GROUPS}"


ECAPAS = family("ECAPA_TDNN", ECAPAOptions, "ECAPA_TDNN_1024")


class DeepResNetOptions(TwoLayerOptions):
    """Residual network of a published depth, as wespeaker trains it on VoxCeleb."""

    channels: PlaneChannels = 32
    """Channels of the first stage; each later stage has twice as many."""

    published = Published("He et al. 2016", 256, 80, 4_105_440, 2_168_606_720)
    blocks: ClassVar[Sequence[int]] = (2, 2, 2, 2)
    """Blocks of each stage."""
    has_bottlenecks: ClassVar[bool] = False
    """Whether a block has three convolutions instead of two."""


DEPTHS = ("ResNet34", "ResNet50", "ResNet101", "ResNet152", "ResNet221", "ResNet293")
RESNETS = family("ResNet18", DeepResNetOptions, *DEPTHS)


class SimAMResNetOptions(TrunkOptions):
    """Residual network whose blocks scale every value by SimAM, an attention without weights."""

    channels: PlaneChannels = 64
    """Channels of the first stage; each later stage has twice as many."""

    published = Published("Qin et al. 2022", 256, 80, 25_213_760, 18_132_541_440)
    poolings = ("ASP",)
    pooling_names: ClassVar = {"ASP": "ChannelASP"}
    blocks: ClassVar[Sequence[int]] = RESNET34


SIMAM_RESNETS = family("SimAM_ResNet34", SimAMResNetOptions, "SimAM_ResNet100")


class GeminiOptions(TwoLayerOptions):
    """Deep and narrow residual network with the strides of Golden Gemini."""

    published = Published("Liu et al. 2023", 256, 80, 4_047_840, 2_793_103_360)
    blocks: ClassVar[Sequence[int]] = (3, 3, 9, 3)


GEMINIS = family("Gemini_DF_ResNet60", GeminiOptions, "Gemini_DF_ResNet114")


class Res2NetOptions(TwoLayerOptions):
    """Res2Net-34 of wespeaker and 3D-Speaker: two groups per block, one of which is convolved."""

    channels: PlaneChannels = 32
    """Channels of the first stage; wespeaker's base model has 32, its large one 64."""

    published = Published("Gao et al. 2019", 256, 80, 4_689_024, 1_711_165_440)


class CAMPPlusOptions(TrunkOptions):
    """CAM++, time-delay layers with context masks; 7.18 million parameters (TSTP, 80 mels,
    512-dimensional).
    """

    published = Published("Wang et al. 2023", 512, 80, 7_176_224, 1_073_491_968)
    embedding_layer = "plain_normed_linear"


class ERes2NetOptions(TwoLayerOptions):
    """Enhanced Res2Net: groups fused by attention within later blocks, and stages fused from the
    bottom up.
    """

    channels: PlaneChannels = 32
    """Channels of the first stage; each later stage has twice as many."""
    base_width: Annotated[int, Ge(1), Le(4096)] = 32
    """Channels per group, in 64ths of the stage's channels."""
    scale: Annotated[int, Ge(1), Le(64)] = 2
    """Groups per block."""
    expansion: Annotated[int, Ge(1), Le(64)] = 2
    """Output channels of a block, as a multiple of the stage's channels."""

    published = Published("Chen et al. 2023", 192, 80, 6_610_688, 3_360_174_080)
    first_joined_stage: ClassVar[int] = 0
    """The first stage that is fused with later stages."""


ERES2NETS = family("ERes2NetBase", ERes2NetOptions, "ERes2NetLarge")
# Its groups are narrower than the first version's: `baseWidth=26` in 3D-Speaker's ERes2NetV2.py.
ERES2NETV2S = {"ERes2NetV2": make_size(ERes2NetOptions, "ERes2NetV2")}
