"""The options of ReDimNet and ReDimNet2, and their published sizes. No torch is imported here."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import Field

from speakernet.models.options.trunks import NormedEmbeddingOptions, TwoLayerOptions
from speakernet.options import variant

Channels = Annotated[int, Ge(1), Le(16_384)]
Stages = list[list[Annotated[float, Ge(0.0), Le(4096.0)]]]
Block = Literal["basic_resnet", "basic_resnet_fwse", "convnext_like", "convnext_like_relu"]
Context = Literal["att", "conv", "conv+att"]
MOST_STAGES = 64
WIDTH = "width"
"""What may be a fraction among the numbers of a stage."""
FRONT_END = {
    **{"name": "log_mel", "num_mels": 72, "normalize": "mean"},
    **{"preemphasis": 0.97, "low_hz": 20.0, "high_hz": 7600.0, "normalize_waveform": True},
}
"""The mel features that the authors train on."""
HALF_STRIDES = ((1, 1), (2, 1), (1, 2), (2, 1), (1, 2), (2, 1))
"""Strides along mels and frames of stages that halve them in turn."""


class ReDimNetOptions(TwoLayerOptions, NormedEmbeddingOptions):
    """Reshape-dimensions network: maps of mels and frames folded into frames and back, sizes B0 to B6."""

    channels: Channels = 10
    """Channels of the first stage."""
    stages: Stages = Field(default=[[1, 2, 1, 30], [2, 3, 2, 30], [1, 3, 3, 30], [2, 4, 2, 10], [1, 3, 1, 10]])
    """For each stage its stride along mels, blocks, how much wider they are inside, and by what its context divides the
    channels (0: no context)."""
    block: Block = "basic_resnet"
    """What the blocks over mels and frames are, by the name that the published configurations give it."""
    context: Context = "conv+att"
    """What the context, which looks along time, is made of."""
    group_channels: Channels = 1
    """Channels of a group in the blocks' convolutions."""
    aggregate_channels: Annotated[int, Ge(0), Le(65_536)] = 0
    """Channels of a last convolution over frames; 0 for none."""
    pooled_norm: bool = True
    """Batch norm behind the pooling, as the authors have it and wespeaker has not."""

    front_end_defaults = FRONT_END
    default_pooling = "ASTP"
    tested_poolings = ("ASTP", "GlobalASTP")
    paper = "Yakovlev et al. 2024"
    published_dim = 192
    published_mels = 72
    parameters = 1_068_271
    macs = 722_695_680

    @property
    def has_norm_after_pooling(self) -> bool:
        """Where it is asked for."""
        return self.pooled_norm

    def problems(self) -> Iterator[tuple[str, str]]:
        """Stages that are none, and a norm that two embedding layers leave no place for."""
        yield from _stage_problems(self.stages, ("stride along mels", "blocks", WIDTH, "divisor"))
        if self.two_layers and self.embedding_norm:
            yield "embedding_norm", "true; expected false beside two_layers, which have a norm of their own"


B4_STAGES = [[1, 4, 2, 48], [2, 4, 2, 48], [1, 6, 2, 48], [2, 6, 1, 32], [1, 8, 1, 24], [2, 4, 1, 16]]
# The names stand for wespeaker's tables; the authors' files say in their `model_config` what they are.
REDIMNETS: dict[str, type[Any]] = {
    "ReDimNetB0": ReDimNetOptions,
    "ReDimNetB1": variant(
        ReDimNetOptions,
        "ReDimNetB1",
        {
            **{"channels": 12, "block": "convnext_like", "group_channels": 8},
            "stages": [[1, 2, 1, 0], [2, 3, 1, 0], [3, 4, 1, 12], [2, 5, 1, 12], [2, 3, 1, 8]],
        },
        parameters=1_905_753,
        macs=860_616_576,
    ),
    "ReDimNetB2": variant(
        ReDimNetOptions,
        "ReDimNetB2",
        {
            **{"channels": 16, "block": "convnext_like", "group_channels": 4},
            "stages": [[1, 2, 1, 12], [2, 2, 1, 12], [1, 3, 1, 12], [2, 4, 1, 8], [1, 4, 1, 8], [2, 4, 1, 4]],
        },
        parameters=4_597_937,
        macs=1_368_096_768,
    ),
    "ReDimNetB3": variant(
        ReDimNetOptions,
        "ReDimNetB3",
        {
            **{"channels": 16, "block": "basic_resnet_fwse"},
            "stages": [[1, 6, 4, 32], [2, 6, 2, 32], [1, 8, 2, 32], [2, 10, 2, 16], [1, 10, 1, 16], [2, 8, 1, 16]],
        },
        parameters=2_930_109,
        macs=4_308_377_472,
    ),
    "ReDimNetB4": variant(
        ReDimNetOptions,
        "ReDimNetB4",
        {"channels": 32, "block": "basic_resnet_fwse", "stages": B4_STAGES},
        parameters=5_851_697,
        macs=6_964_441_344,
    ),
    "ReDimNetB5": variant(
        ReDimNetOptions,
        "ReDimNetB5",
        {"channels": 32, "block": "basic_resnet_fwse", "group_channels": 16, "stages": B4_STAGES},
        parameters=7_069_937,
        macs=13_060_825_344,
    ),
    "ReDimNetB6": variant(
        ReDimNetOptions,
        "ReDimNetB6",
        {
            **{"channels": 32, "group_channels": 32},
            "stages": [[1, 4, 4, 32], [2, 6, 2, 32], [1, 6, 2, 24], [3, 8, 1, 24], [1, 8, 1, 16], [2, 8, 1, 16]],
        },
        parameters=14_425_649,
        macs=29_937_102_336,
    ),
}


def _pooled_stages(divisors: Sequence[int], widths: Sequence[float]) -> list[list[float]]:
    """Six stages that halve mels and frames in turn."""
    blocks = (2, 3, 4, 5, 4, 3)
    return [
        [*stride, num_blocks, width, 3, 3, divisor]
        for stride, num_blocks, width, divisor in zip(HALF_STRIDES, blocks, widths, divisors, strict=True)
    ]


NARROW = (2, 1, 1, 1, 1, 1)
WIDE = (4, 3, 2, 1, 1, 1)


class ReDimNet2Options(NormedEmbeddingOptions):
    """ReDimNet whose later stages see fewer frames, sizes B0 to B6."""

    channels: Channels = 12
    """Channels of the first stage."""
    stages: Stages = _pooled_stages((36, 36, 36, 36, 18, 18), NARROW)
    """For each stage its strides along mels and frames, blocks, how much wider they are inside, the kernel along mels
    and frames of blocks that have a choice, and by what its context divides the channels (0: no context)."""
    block: Block = "basic_resnet"
    """What the blocks over mels and frames are, by the name that the published configurations give it."""
    context: Context = "conv+att"
    """What the context, which looks along time, is made of."""
    group_channels: Channels = 1
    """Channels of a group in the blocks' convolutions."""
    grouped_strides: bool = True
    """Group the striding convolutions as far as their channels allow."""
    aggregate_channels: Annotated[int, Ge(0), Le(65_536)] = 64
    """Channels of the last 1 x 1 convolution; 0 for none."""
    keeps_mels: bool = False
    """Lay out the frames as channels and mels before that convolution (or the pooling), else as they were folded."""
    joins_both: bool = False
    """What each stage holds before and behind its context joins the maps (`dual_agg`)."""
    map_norm: bool = False
    """Group norm of every map before it joins the others (`agg_gnorm`)."""

    front_end_defaults = FRONT_END
    default_pooling = "GlobalASTP"
    tested_poolings = ("GlobalASTP",)
    paper = "ReDimNet2 2026"
    published_dim = 192
    published_mels = 72
    parameters = 703_060
    macs = 270_318_976

    @property
    def has_norm_after_pooling(self) -> bool:
        """As published."""
        return True

    def problems(self) -> Iterator[tuple[str, str]]:
        """Stages that are none."""
        strides, kernel = ("stride along mels", "stride along frames"), ("kernel along mels", "kernel along frames")
        yield from _stage_problems(self.stages, (*strides, "blocks", WIDTH, *kernel, "divisor"))


REDIMNET2S: dict[str, type[Any]] = {
    "ReDimNet2B0": ReDimNet2Options,
    "ReDimNet2B1": variant(
        ReDimNet2Options,
        "ReDimNet2B1",
        {"channels": 16, "stages": _pooled_stages((32, 32, 32, 32, 16, 16), NARROW)},
        parameters=1_254_992,
        macs=458_766_976,
    ),
    "ReDimNet2B2": variant(
        ReDimNet2Options,
        "ReDimNet2B2",
        {
            "channels": 20,
            "stages": [
                *([1, 1, 2, 2, 3, 5, 40], [2, 1, 3, 1, 3, 5, 30], [1, 2, 4, 1, 3, 5, 30]),
                *([3, 1, 5, 1, 3, 5, 20], [1, 2, 4, 1, 3, 7, 20], [2, 1, 3, 1, 3, 7, 10]),
            ],
        },
        parameters=2_530_208,
        macs=820_427_776,
    ),
    "ReDimNet2B3": variant(ReDimNet2Options, "ReDimNet2B3", {"channels": 24}, parameters=2_364_712, macs=935_416_576),
    "ReDimNet2B4": variant(
        ReDimNet2Options,
        "ReDimNet2B4",
        {"channels": 32, "stages": _pooled_stages((24, 24, 24, 24, 24, 24), WIDE), "aggregate_channels": 0},
        parameters=6_659_744,
        macs=4_635_227_136,
    ),
    "ReDimNet2B5": variant(
        ReDimNet2Options,
        "ReDimNet2B5",
        {"channels": 48, "stages": _pooled_stages((48, 48, 48, 48, 32, 32), WIDE), "aggregate_channels": 256},
        parameters=7_900_456,
        macs=9_466_607_104,
    ),
    "ReDimNet2B6": variant(
        ReDimNet2Options,
        "ReDimNet2B6",
        {
            **{"channels": 64, "aggregate_channels": 224, "keeps_mels": True},
            "stages": [
                *([1, 1, 3, 3, 3, 3, 64], [2, 1, 4, 2, 3, 3, 64], [1, 2, 5, 2, 3, 3, 48]),
                *([2, 1, 5, 1, 3, 3, 48], [1, 2, 4, 0.75, 3, 3, 32], [2, 1, 3, 0.5, 3, 3, 24]),
            ],
        },
        parameters=12_394_784,
        macs=13_125_874_944,
    ),
}


def _stage_problems(stages: Sequence[Sequence[float]], meaning: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What is wrong with a list of stages, whose numbers mean that; the last one may be 0."""
    if not 1 <= len(stages) <= MOST_STAGES:
        yield "stages", f"{stages}; expected 1 to {MOST_STAGES} stages"
    for stage in stages:
        is_fit = len(stage) == len(meaning) and min(stage[:-1]) > 0
        counts = [value for value, one in zip(stage, meaning, strict=False) if one != WIDTH]
        if not is_fit or any(value != int(value) for value in counts):
            yield (
                "stages",
                f"{stage} among them; expected {len(meaning)} numbers above 0 (the last may be 0), whole but for the "
                f"width: {', '.join(meaning)}",
            )
