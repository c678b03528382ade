"""The options of ReDimNet and ReDimNet2, and their published sizes. No torch here."""

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le
from pydantic import Field

from speakernet.models.options.trunks import (
    NormedEmbeddingOptions,
    Published,
    TwoLayerOptions,
    family,
)
from speakernet.options import Several

Channels = Annotated[int, Ge(1), Le(16_384)]
Stages = Several[Several[Annotated[float, Ge(0.0), Le(4096.0)]]]
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
        stages = self.model_dump()["stages"]
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


# The sizes behind the names are wespeaker's; the authors' files give theirs in `model_config`.
REDIMNETS = family("ReDimNetB0", ReDimNetOptions, *(f"ReDimNetB{size}" for size in range(1, 7)))


class ReDimNet2Options(FoldedOptions):
    """ReDimNet whose later stages see fewer frames, sizes B0 to B6."""

    channels: Channels = 12
    """Channels of the first stage."""
    stages: Stages = Field(
        default=[
            [1, 1, 2, 2, 3, 3, 36],
            [2, 1, 3, 1, 3, 3, 36],
            [1, 2, 4, 1, 3, 3, 36],
            [2, 1, 5, 1, 3, 3, 36],
            [1, 2, 4, 1, 3, 3, 18],
            [2, 1, 3, 1, 3, 3, 18],
        ]
    )
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


REDIMNET2S = family("ReDimNet2B0", ReDimNet2Options, *(f"ReDimNet2B{size}" for size in range(1, 7)))
