"""The options of trunks, one class a family, and what each says of itself. No torch is imported here."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le
from pydantic import Field

from speakernet.options import Options, variant

Channels = Annotated[int, Ge(8), Le(16_384)]
Blocks = list[Annotated[int, Ge(1), Le(1000)]]
Strides = list[Annotated[int, Ge(1), Le(16)]]
# Blocks of each stage (He et al. 2016, table 1); ResNet-50 has as many, of three convolutions each.
RESNET34 = (3, 4, 6, 3)
ECAPA_GROUPS = 8
"""Groups of channels in ECAPA-TDNN's split."""


class TrunkOptions(Options):
    """Facts about a network between features and pooling, and the base of its options."""

    front_end_defaults: ClassVar[Mapping[str, Any]] = {"name": "fbank"}
    """The front end of its published definition: name, and the values that `auto` stands for."""
    default_pooling: ClassVar[str] = "TSTP"
    """The pooling of its published definition."""
    pooling_names: ClassVar[Mapping[str, str]] = {}
    """Common names of poolings that mean another pooling in this network."""
    tested_poolings: ClassVar[Sequence[str]] = ("TSTP",)
    """Poolings that the tests run over; any other works as well."""
    paper: ClassVar[str] = ""
    """Who published it."""
    published_dim: ClassVar[int] = 256
    """Numbers in an embedding of the published model."""
    published_mels: ClassVar[int] = 80
    """Mel bands of the published model; 0 if it takes samples."""
    published_rate: ClassVar[int] = 16000
    """Sample rate of the published model in Hz."""
    parameters: ClassVar[int] = 0
    """Of the published model; a slow test counts them again."""
    macs: ClassVar[int] = 0
    """Multiply-accumulate operations from the features of 2 seconds to the embedding; a slow test counts them again."""

    @property
    def has_norm_after_pooling(self) -> bool:
        """Whether there is a batch norm between pooling and embedding layer."""
        return False

    @property
    def embedding_layer(self) -> str:
        """The layer from pooled vector to embedding: a name in `EMBEDDING_LAYERS`."""
        return "linear"


class TwoLayerOptions(TrunkOptions):
    """The base of trunks that may be followed by two embedding layers."""

    two_layers: bool = False
    """Two embedding layers (`two_emb_layer` in wespeaker)."""

    @property
    def embedding_layer(self) -> str:
        """Two linear layers if they are chosen."""
        return "two_linear" if self.two_layers else super().embedding_layer


class NormedEmbeddingOptions(TrunkOptions):
    """The base of trunks whose embedding layer may have a batch norm behind it."""

    embedding_norm: bool = False
    """Batch norm behind the embedding layer (`emb_bn` in wespeaker and ReDimNet)."""

    @property
    def embedding_layer(self) -> str:
        """A linear layer, and a batch norm if it is chosen."""
        return "normed_linear" if self.embedding_norm else super().embedding_layer


class ResNetSE34LOptions(TrunkOptions):
    """Light ResNet-34 with squeeze-and-excitation, 16 to 128 channels; 1.4 million parameters."""

    front_end_defaults: ClassVar = {"name": "log_mel"}
    default_pooling = "SAP"
    tested_poolings = ("SAP", "ASP")
    paper = "Chung et al. 2020"
    published_dim = 512
    published_mels = 40
    parameters = 1_437_078
    macs = 440_270_784


class ResNetSE34V2Options(TrunkOptions):
    """ResNet-34 with squeeze-and-excitation, 32 to 256 channels."""

    front_end_defaults: ClassVar = {"name": "log_mel", "preemphasis": 0.97}
    default_pooling = "ASP"
    pooling_names: ClassVar = {"SAP": "ChannelSAP", "ASP": "ChannelASP"}
    tested_poolings = ("SAP", "ASP")
    paper = "Heo et al. 2020"
    published_dim = 512
    published_mels = 64
    parameters = 8_028_492
    macs = 3_636_556_544


class ResNetOptions(TrunkOptions):
    """Residual network whose size is set by options; the defaults make a small one that trains fast on CPUs."""

    channels: Annotated[int, Ge(8), Le(4096)] = 16
    """Channels of the first stage; each following stage has twice as many."""
    blocks: Blocks = Field(default=[2, 2, 2, 2])
    """Residual blocks of each stage; [3, 4, 6, 3] is ResNet-34."""
    stem_stride: Annotated[int, Ge(1), Le(16)] = 1
    """Stride along mels of the first convolution; 2 halves all later work."""
    gated: bool = False
    """Squeeze-and-excitation in every block."""
    mel_strides: Strides = Field(default=[])
    """Stride along mels of each stage; empty: 1, then 2 in all others. [2, 2, 2, 2] is golden gemini's."""
    frame_strides: Strides = Field(default=[])
    """Stride along frames of each stage; empty: 1, then 2 in all others. [1, 2, 1, 1] is golden gemini's."""

    front_end_defaults: ClassVar = {"name": "log_mel"}
    tested_poolings = ("TSTP", "ASP", "ChannelASP")
    paper = "He et al. 2016"
    parameters = 1_355_504
    macs = 543_631_360

    def problems(self):  # type: ignore[no-untyped-def]
        """No stage, or more than fit any input."""
        if not 1 <= len(self.blocks) <= 8:
            yield "blocks", f"{self.blocks}; expected the block counts of 1 to 8 stages"
        for name in ("mel_strides", "frame_strides"):
            strides = getattr(self, name)
            if strides and len(strides) != len(self.blocks):
                yield name, f"{strides} for blocks {self.blocks}; expected a stride of each stage, or none at all"

    @property
    def strides(self) -> list[tuple[int, int]]:
        """Of each stage, along mels and frames."""
        usual = [1, *[2] * (len(self.blocks) - 1)]
        return list(zip(self.mel_strides or usual, self.frame_strides or usual, strict=True))


class VGGVoxOptions(TrunkOptions):
    """VGG-M on 40 log-mel bands; 4,032,448 parameters with SAP at 512 dimensions."""

    front_end_defaults: ClassVar = {"name": "log_mel", "window": "hann", "num_mels": 40}
    default_pooling = "SAP"
    tested_poolings = ("SAP", "TAP", "MAX")
    paper = "Nagrani et al. 2017"
    published_dim = 512
    published_mels = 40
    parameters = 4_032_448
    macs = 531_239_168


class RawNet3Options(TrunkOptions):
    """Raw-waveform network with analytic sinc filters; 16,280,322 parameters with ECA at 256 dimensions."""

    sinc_stride: Annotated[int, Ge(1), Le(10_000)] = 10
    """Hop of the filterbank in samples; 10 in the published model, larger is faster and coarser."""
    channels: Channels = 1024
    """Channels of the blocks."""
    scale: Annotated[int, Ge(1), Le(64)] = 8
    """Groups of a block's multi-scale convolution."""

    front_end_defaults: ClassVar = {"name": "raw"}
    default_pooling = "ECA"
    pooling_names: ClassVar = {"ASP": "ContextASP"}
    tested_poolings = ("ECA", "ASP")
    paper = "Jung et al. 2022"
    published_mels = 0
    parameters = 16_280_322
    macs = 9_521_052_160

    @property
    def has_norm_after_pooling(self) -> bool:
        """As published."""
        return True


class XVectorOptions(TrunkOptions):
    """Time-delay network of the x-vector; 4.61 million parameters with TSTP, 80 mels and 512 dimensions."""

    channels: Channels = 512
    """Channels of the first four layers."""
    statistics_channels: Channels = 1500
    """Channels of the fifth layer, whose statistics are pooled."""

    tested_poolings = ("TSTP", "GlobalASTP")
    paper = "Snyder et al. 2018"
    published_dim = 512
    parameters = 4_610_524
    macs = 530_817_024

    @property
    def embedding_layer(self) -> str:
        """As published."""
        return "two_linear"


class ECAPAOptions(NormedEmbeddingOptions):
    """ECAPA-TDNN as wespeaker has it (the default) or as SpeechBrain and 3D-Speaker have it."""

    channels: Channels = 512
    """Channels of the blocks, a multiple of 8."""
    aggregate_channels: Channels = 1536
    """Channels of the layer that sees all blocks."""
    speechbrain: bool = False
    """Edges mirrored instead of padded with zeros, the first group of each split passed on instead of the last, batch
    norm behind the aggregation."""

    default_pooling = "GlobalASTP"
    pooling_names: ClassVar = {"ASP": "GlobalASTP"}
    tested_poolings = ("GlobalASTP", "ASTP", "NormASTP")
    paper = "Desplanques et al. 2020"
    published_dim = 192
    parameters = 6_190_720
    macs = 1_037_271_040

    @property
    def has_norm_after_pooling(self) -> bool:
        """As published."""
        return True

    def problems(self):  # type: ignore[no-untyped-def]
        """Channels that the groups do not share evenly."""
        if self.channels % ECAPA_GROUPS:
            yield "channels", f"{self.channels}; expected a multiple of {ECAPA_GROUPS}"


ECAPAS: dict[str, type[Any]] = {
    "ECAPA_TDNN": ECAPAOptions,
    "ECAPA_TDNN_1024": variant(
        ECAPAOptions, "ECAPA_TDNN_1024", {"channels": 1024}, parameters=14_657_088, macs=2_649_030_656
    ),
}


class DeepResNetOptions(TwoLayerOptions):
    """Residual network of a published depth, as wespeaker trains it on VoxCeleb."""

    channels: Annotated[int, Ge(8), Le(4096)] = 32
    """Channels of the first stage; each following stage has twice as many."""

    paper = "He et al. 2016"
    parameters = 4_105_440
    macs = 2_168_606_720
    blocks: ClassVar[Sequence[int]] = (2, 2, 2, 2)
    """Of each stage."""
    has_bottlenecks: ClassVar[bool] = False
    """Whether its blocks are of three convolutions instead of two."""


RESNETS: dict[str, type[Any]] = {"ResNet18": DeepResNetOptions} | {
    name: variant(
        DeepResNetOptions, name, blocks=blocks, has_bottlenecks=name != "ResNet34", parameters=parameters, macs=macs
    )
    for name, blocks, parameters, macs in (
        ("ResNet34", RESNET34, 6_634_336, 4_527_902_720),
        ("ResNet50", RESNET34, 11_131_360, 5_072_506_880),
        ("ResNet101", (3, 4, 23, 3), 15_892_448, 9_807_482_880),
        ("ResNet152", (3, 8, 36, 3), 19_814_880, 14_542_458_880),
        ("ResNet221", (6, 16, 48, 3), 23_792_224, 20_948_602_880),
        ("ResNet293", (10, 20, 64, 3), 28_626_016, 27_633_274_880),
    )
}


class SimAMResNetOptions(TrunkOptions):
    """Residual network whose blocks scale every value by SimAM, an attention without weights."""

    channels: Annotated[int, Ge(8), Le(4096)] = 64
    """Channels of the first stage; each following stage has twice as many."""

    default_pooling = "ASP"
    pooling_names: ClassVar = {"ASP": "ChannelASP"}
    tested_poolings = ("ASP",)
    paper = "Qin et al. 2022"
    parameters = 25_213_760
    macs = 18_132_541_440
    blocks: ClassVar[Sequence[int]] = RESNET34


SIMAM_RESNETS: dict[str, type[Any]] = {
    "SimAM_ResNet34": SimAMResNetOptions,
    "SimAM_ResNet100": variant(
        SimAMResNetOptions, "SimAM_ResNet100", blocks=(6, 16, 24, 3), parameters=50_232_896, macs=57_060_925_440
    ),
}


class GeminiOptions(TwoLayerOptions):
    """Deep and narrow residual network with the strides of Golden Gemini."""

    paper = "Liu et al. 2023"
    parameters = 4_047_840
    macs = 2_793_103_360
    blocks: ClassVar[Sequence[int]] = (3, 3, 9, 3)


GEMINIS: dict[str, type[Any]] = {
    "Gemini_DF_ResNet60": GeminiOptions,
    "Gemini_DF_ResNet114": variant(
        GeminiOptions, "Gemini_DF_ResNet114", blocks=(3, 3, 27, 3), parameters=6_531_552, macs=5_235_343_360
    ),
}


class Res2NetOptions(TwoLayerOptions):
    """Res2Net-34 of wespeaker and 3D-Speaker: two groups a block, one of which is convolved."""

    channels: Annotated[int, Ge(8), Le(4096)] = 32
    """Channels of the first stage; 32 is wespeaker's base, 64 its large one."""

    paper = "Gao et al. 2019"
    parameters = 4_689_024
    macs = 1_711_165_440


class CAMPPlusOptions(TrunkOptions):
    """CAM++, time-delay layers with context masks; 7.18 million parameters with TSTP, 80 mels and 512 dimensions."""

    paper = "Wang et al. 2023"
    published_dim = 512
    parameters = 7_176_224
    macs = 1_073_491_968

    @property
    def embedding_layer(self) -> str:
        """As published."""
        return "plain_normed_linear"


class ERes2NetOptions(TwoLayerOptions):
    """Enhanced Res2Net: groups fused by attention within later blocks, and stages fused from the bottom up."""

    channels: Annotated[int, Ge(8), Le(4096)] = 32
    """Channels of the first stage; each following stage has twice as many."""
    base_width: Annotated[int, Ge(1), Le(4096)] = 32
    """Channels of a group, in 64ths of the stage's."""
    scale: Annotated[int, Ge(1), Le(64)] = 2
    """Groups of a block."""
    expansion: Annotated[int, Ge(1), Le(64)] = 2
    """Channels of a block's output, in the stage's."""

    paper = "Chen et al. 2023"
    published_dim = 192
    parameters = 6_610_688
    macs = 3_360_174_080
    first_joined_stage: ClassVar[int] = 0
    """The first stage that is fused with those after it."""


ERES2NETS: dict[str, type[Any]] = {
    "ERes2NetBase": ERes2NetOptions,
    "ERes2NetLarge": variant(
        ERes2NetOptions, "ERes2NetLarge", {"channels": 64}, parameters=22_462_784, macs=13_427_548_160
    ),
}
ERES2NETV2S: dict[str, type[Any]] = {
    "ERes2NetV2": variant(
        ERes2NetOptions,
        "ERes2NetV2",
        # `baseWidth=26` of 3D-Speaker's ERes2NetV2.py: narrower groups than the first version's 32.
        {"channels": 64, "base_width": 26},
        first_joined_stage=2,
        paper="Chen et al. 2024",
        parameters=17_859_632,
        macs=8_296_588_160,
    )
}
