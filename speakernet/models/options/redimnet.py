"""The options of ReDimNet and ReDimNet2, and their published sizes. No torch here."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le
from pydantic import Field

from speakernet.models.options.trunks import (
    NormedEmbeddingOptions,
    Published,
    TwoLayerOptions,
    sized,
)

Channels = Annotated[int, Ge(1), Le(16_384)]
Stages = list[list[Annotated[float, Ge(0.0), Le(4096.0)]]]
MAX_STAGES = 64


class FoldedOptions(NormedEmbeddingOptions):
    """Options of both ReDimNet and ReDimNet2."""

    block: Literal["basic_resnet", "basic_resnet_fwse", "convnext_like", "convnext_like_relu"] = (
        "basic_resnet"
    )
    """Kind of the blocks over mels and frames, by its name in the published configurations."""
    context: Literal["att", "conv", "conv+att"] = "conv+att"
    """Layers of the time context: attention, convolutions or both."""
    group_channels: Channels = 1
    """Channels per group in the blocks' convolutions."""

    front_end_defaults: ClassVar = {
        "name": "log_mel",
        "num_mels": 72,
        "normalize": "mean",
        "preemphasis": 0.97,
        "low_hz": 20.0,
        "high_hz": 7600.0,
        "normalize_waveform": True,
    }
    numbers: ClassVar[str]
    """Meaning of a stage's numbers; all but the width are integers, and all but the divisor are
    above 0."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Malformed stages."""
        stages: Stages = self.stages  # type: ignore[attr-defined]
        if not 1 <= len(stages) <= MAX_STAGES or not all(map(self._fits, stages)):
            yield "stages", f"{stages}; expected 1 to {MAX_STAGES} stages, each of {self.numbers}"

    def _fits(self, stage: Sequence[float]) -> bool:
        """Whether these are the numbers of a stage."""
        names = self.numbers.split(", ")
        if len(stage) != len(names) or min(stage[:-1]) <= 0:
            return False
        pairs = zip(stage, names, strict=True)
        return all(value % 1 == 0 or name == "width" for value, name in pairs)


class ReDimNetOptions(TwoLayerOptions, FoldedOptions):
    """Reshape-dimensions network: maps of mels and frames folded into frames and back, sizes B0 to
    B6.
    """

    channels: Channels = 10
    """Channels of the first stage."""
    stages: Stages = Field(
        default=[[1, 2, 1, 30], [2, 3, 2, 30], [1, 3, 3, 30], [2, 4, 2, 10], [1, 3, 1, 10]]
    )
    """For each stage: stride along mels, number of blocks, width factor inside the blocks, and the
    divisor of the channels in the time context (0: no context)."""
    aggregate_channels: Annotated[int, Ge(0), Le(65_536)] = 0
    """Channels of a last convolution over frames; 0 for none."""
    pooled_norm: bool = True
    """Batch norm after the pooling, which the authors have but wespeaker does not."""

    published = Published("Yakovlev et al. 2024", 192, 72, 1_068_271, 722_695_680)
    poolings = ("ASTP", "GlobalASTP")
    numbers = "stride along mels, blocks, width, divisor"

    @property
    def has_norm_after_pooling(self) -> bool:  # type: ignore[override]
        """As set by `pooled_norm`."""
        return self.pooled_norm

    def problems(self) -> Iterator[tuple[str, str]]:
        """Malformed stages, or a second norm with two embedding layers."""
        yield from super().problems()
        if self.two_layers and self.embedding_norm:
            yield (
                "embedding_norm",
                "true; expected false with two_layers, which already include a norm",
            )


B4_STAGES = [
    [1, 4, 2, 48],
    [2, 4, 2, 48],
    [1, 6, 2, 48],
    [2, 6, 1, 32],
    [1, 8, 1, 24],
    [2, 4, 1, 16],
]
# The sizes behind the names are wespeaker's; the authors' files give theirs in `model_config`.
REDIMNETS: dict[str, type[Any]] = {"ReDimNetB0": ReDimNetOptions} | {
    name: sized(ReDimNetOptions, name, parameters, macs, defaults)
    for name, parameters, macs, defaults in (
        (
            "ReDimNetB1",
            1_905_753,
            860_616_576,
            {
                "channels": 12,
                "block": "convnext_like",
                "group_channels": 8,
                "stages": [[1, 2, 1, 0], [2, 3, 1, 0], [3, 4, 1, 12], [2, 5, 1, 12], [2, 3, 1, 8]],
            },
        ),
        (
            "ReDimNetB2",
            4_597_937,
            1_368_096_768,
            {
                "channels": 16,
                "block": "convnext_like",
                "group_channels": 4,
                "stages": [
                    [1, 2, 1, 12],
                    [2, 2, 1, 12],
                    [1, 3, 1, 12],
                    [2, 4, 1, 8],
                    [1, 4, 1, 8],
                    [2, 4, 1, 4],
                ],
            },
        ),
        (
            "ReDimNetB3",
            2_930_109,
            4_308_377_472,
            {
                "channels": 16,
                "block": "basic_resnet_fwse",
                "stages": [
                    [1, 6, 4, 32],
                    [2, 6, 2, 32],
                    [1, 8, 2, 32],
                    [2, 10, 2, 16],
                    [1, 10, 1, 16],
                    [2, 8, 1, 16],
                ],
            },
        ),
        (
            "ReDimNetB4",
            5_851_697,
            6_964_441_344,
            {"channels": 32, "block": "basic_resnet_fwse", "stages": B4_STAGES},
        ),
        (
            "ReDimNetB5",
            7_069_937,
            13_060_825_344,
            {
                "channels": 32,
                "block": "basic_resnet_fwse",
                "group_channels": 16,
                "stages": B4_STAGES,
            },
        ),
        (
            "ReDimNetB6",
            14_425_649,
            29_937_102_336,
            {
                "channels": 32,
                "group_channels": 32,
                "stages": [
                    [1, 4, 4, 32],
                    [2, 6, 2, 32],
                    [1, 6, 2, 24],
                    [3, 8, 1, 24],
                    [1, 8, 1, 16],
                    [2, 8, 1, 16],
                ],
            },
        ),
    )
}


def _halving(divisors: Sequence[int], widths: Sequence[float]) -> list[list[float]]:
    """Six stages that alternately halve mels and frames."""
    strides = ((1, 1), (2, 1), (1, 2), (2, 1), (1, 2), (2, 1))
    rows = zip(strides, (2, 3, 4, 5, 4, 3), widths, divisors, strict=True)
    stages = []
    for stride, num_blocks, width, divisor in rows:
        stages.append([*stride, num_blocks, width, 3, 3, divisor])
    return stages


NARROW = (2, 1, 1, 1, 1, 1)
WIDE = (4, 3, 2, 1, 1, 1)


class ReDimNet2Options(FoldedOptions):
    """ReDimNet whose later stages see fewer frames, sizes B0 to B6."""

    channels: Channels = 12
    """Channels of the first stage."""
    stages: Stages = _halving((36, 36, 36, 36, 18, 18), NARROW)
    """For each stage: strides along mels and frames, number of blocks, width factor inside the
    blocks, kernels along mels and frames (if the blocks use them), and the divisor of the channels
    in the time context (0: no context)."""
    grouped_strides: bool = True
    """Group the strided convolutions as far as their channels allow."""
    aggregate_channels: Annotated[int, Ge(0), Le(65_536)] = 64
    """Channels of the last 1 x 1 convolution; 0 for none."""
    keeps_mels: bool = False
    """Unfold the frames into channels and mels before that convolution (or the pooling), else leave
    them folded."""
    joins_both: bool = False
    """Add each stage's values from both before and after its context to the maps (`dual_agg`)."""
    map_norm: bool = False
    """Group norm of every map before it joins the others (`agg_gnorm`)."""

    published = Published("ReDimNet2 2026", 192, 72, 703_060, 270_318_976)
    poolings = ("GlobalASTP",)
    has_norm_after_pooling = True
    numbers = (
        "stride along mels, stride along frames, blocks, width, kernel along mels, kernel "
        "along frames, divisor"
    )


REDIMNET2S: dict[str, type[Any]] = {"ReDimNet2B0": ReDimNet2Options} | {
    name: sized(ReDimNet2Options, name, parameters, macs, defaults)
    for name, parameters, macs, defaults in (
        (
            "ReDimNet2B1",
            1_254_992,
            458_766_976,
            {"channels": 16, "stages": _halving((32, 32, 32, 32, 16, 16), NARROW)},
        ),
        (
            "ReDimNet2B2",
            2_530_208,
            820_427_776,
            {
                "channels": 20,
                "stages": [
                    [1, 1, 2, 2, 3, 5, 40],
                    [2, 1, 3, 1, 3, 5, 30],
                    [1, 2, 4, 1, 3, 5, 30],
                    [3, 1, 5, 1, 3, 5, 20],
                    [1, 2, 4, 1, 3, 7, 20],
                    [2, 1, 3, 1, 3, 7, 10],
                ],
            },
        ),
        ("ReDimNet2B3", 2_364_712, 935_416_576, {"channels": 24}),
        (
            "ReDimNet2B4",
            6_659_744,
            4_635_227_136,
            {
                "channels": 32,
                "stages": _halving((24, 24, 24, 24, 24, 24), WIDE),
                "aggregate_channels": 0,
            },
        ),
        (
            "ReDimNet2B5",
            7_900_456,
            9_466_607_104,
            {
                "channels": 48,
                "stages": _halving((48, 48, 48, 48, 32, 32), WIDE),
                "aggregate_channels": 256,
            },
        ),
        (
            "ReDimNet2B6",
            12_394_784,
            13_125_874_944,
            {
                "channels": 64,
                "aggregate_channels": 224,
                "keeps_mels": True,
                "stages": [
                    [1, 1, 3, 3, 3, 3, 64],
                    [2, 1, 4, 2, 3, 3, 64],
                    [1, 2, 5, 2, 3, 3, 48],
                    [2, 1, 5, 1, 3, 3, 48],
                    [1, 2, 4, 0.75, 3, 3, 32],
                    [2, 1, 3, 0.5, 3, 3, 24],
                ],
            },
        ),
    )
}
