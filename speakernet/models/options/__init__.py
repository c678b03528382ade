"""The options of trunks and poolings, the section that chooses them, and their tables. No torch is imported here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Le

from speakernet.models.options.poolings import POOLINGS, PoolingOptions
from speakernet.models.options.redimnet import REDIMNET2S, REDIMNETS
from speakernet.models.options.trunks import (
    ECAPAS,
    ERES2NETS,
    ERES2NETV2S,
    GEMINIS,
    RESNETS,
    SIMAM_RESNETS,
    CAMPPlusOptions,
    RawNet3Options,
    Res2NetOptions,
    ResNetOptions,
    ResNetSE34LOptions,
    ResNetSE34V2Options,
    TrunkOptions,
    VGGVoxOptions,
    XVectorOptions,
)
from speakernet.options import NamedOptions, OptionError
from speakernet.registry import Part, lookup


def _sizes(path: str, sizes: Mapping[str, type[TrunkOptions]]) -> dict[str, Part]:
    """A row for every size of a family, which share one trunk."""
    return {name: Part(options, path) for name, options in sizes.items()}


FAMILIES: dict[str, dict[str, Part]] = {
    "ResNetSE34L": {"ResNetSE34L": Part(ResNetSE34LOptions, "speakernet.models.resnet:ResNetSE34L")},
    "ResNetSE34V2": {"ResNetSE34V2": Part(ResNetSE34V2Options, "speakernet.models.resnet:ResNetSE34V2")},
    "ResNet": {"ResNet": Part(ResNetOptions, "speakernet.models.resnet:ResNet")},
    "VGGVox": {"VGGVox": Part(VGGVoxOptions, "speakernet.models.vggvox:VGGVox")},
    "RawNet3": {"RawNet3": Part(RawNet3Options, "speakernet.models.rawnet3:RawNet3")},
    "x-vector": {"XVector": Part(XVectorOptions, "speakernet.models.xvector:XVector")},
    "ECAPA-TDNN": _sizes("speakernet.models.ecapa:ECAPA", ECAPAS),
    "ResNet of published depth": _sizes("speakernet.models.resnet:DeepResNet", RESNETS),
    "SimAM-ResNet": _sizes("speakernet.models.resnet:SimAMResNet", SIMAM_RESNETS),
    "Gemini DF-ResNet": _sizes("speakernet.models.gemini:GeminiDFResNet", GEMINIS),
    "Res2Net": {"Res2Net34": Part(Res2NetOptions, "speakernet.models.res2net:Res2Net")},
    "CAM++": {"CAMPPlus": Part(CAMPPlusOptions, "speakernet.models.campplus:CAMPPlus")},
    "ERes2Net": _sizes("speakernet.models.res2net:ERes2Net", ERES2NETS),
    "ERes2NetV2": _sizes("speakernet.models.res2net:ERes2Net", ERES2NETV2S),
    "ReDimNet": _sizes("speakernet.models.redimnet:ReDimNet", REDIMNETS),
    "ReDimNet2": _sizes("speakernet.models.redimnet:ReDimNet2", REDIMNET2S),
}
"""Sizes of each family by name, smallest first."""

MODELS: dict[str, Part] = {name: part for sizes in FAMILIES.values() for name, part in sizes.items()}


def pooling_of(model: str, pooling: str) -> str:
    """The row of POOLINGS that a configuration means by `pooling` beside that model.

    Raises:
        ValueError: an unknown model or pooling.
    """
    trunk: Any = lookup(MODELS, model, "model").options
    name = trunk.default_pooling if pooling == "auto" else pooling
    name = trunk.pooling_names.get(name, name)
    lookup(POOLINGS, name, "pooling")
    return str(name)


@dataclass(kw_only=True)
class ModelOptions(NamedOptions):
    """The network between features and embedding."""

    name: str = "ResNetSE34L"
    """Name of the model; `speakernet list models` shows them all."""
    pooling: str = "auto"
    """How frames become one vector; `speakernet list poolings` shows them all; auto: the model's own."""
    embedding_dim: Annotated[int, Ge(1), Le(65_536)] = 256
    """Numbers in an embedding."""
    options: TrunkOptions = field(default_factory=TrunkOptions)
    """Further options of that model, such as {channels: 32} for ResNet or {sinc_stride: 10} for RawNet3."""
    pooling_options: PoolingOptions = field(default_factory=PoolingOptions)
    """Further options of that pooling, such as {heads: 4} for MQMHASTP or {variance_floor: 1e-8} for TSTP."""

    def __post_init__(self) -> None:
        super().__post_init__()
        trunk = lookup(MODELS, self.name, "model")
        self.options = _own(self.options, TrunkOptions, trunk, self.name)
        pooling = pooling_of(self.name, self.pooling)
        self.pooling_options = _own(self.pooling_options, PoolingOptions, POOLINGS[pooling], pooling)


def _own(given: Any, base: type, part: Part, name: str) -> Any:
    """The options given, or the part's defaults where nothing but the bare base is.

    Raises:
        OptionError: options of another part.
    """
    if type(given) is base:
        return part.options()
    if type(given) is not part.options:
        raise OptionError(f"{type(given).__name__} are no options of {name}; expected {part.options.__name__}")
    return given


__all__ = ["FAMILIES", "MODELS", "POOLINGS", "ModelOptions", "PoolingOptions", "TrunkOptions", "pooling_of"]
