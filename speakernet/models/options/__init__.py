"""The options of trunks and poolings, the section that selects them, and their tables. No torch
here.
"""

from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import Field, SerializeAsAny, model_validator

from speakernet.models.options.poolings import POOLINGS, PoolingOptions
from speakernet.models.options.pretrained import PretrainedOptions
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
from speakernet.options import Component, Options, lookup

FAMILIES: dict[str, dict[str, Component]] = {}
"""Sizes of each family by name, smallest first."""
MODELS: dict[str, Component] = {}
for _family, _trunk, _sizes in (
    ("ResNetSE34L", "classic:ResNetSE34L", {"ResNetSE34L": ResNetSE34LOptions}),
    ("ResNetSE34V2", "classic:ResNetSE34V2", {"ResNetSE34V2": ResNetSE34V2Options}),
    ("ResNet", "resnet:ResNet", {"ResNet": ResNetOptions}),
    ("VGGVox", "classic:VGGVox", {"VGGVox": VGGVoxOptions}),
    ("RawNet3", "rawnet3:RawNet3", {"RawNet3": RawNet3Options}),
    ("x-vector", "tdnn:XVector", {"XVector": XVectorOptions}),
    ("ECAPA-TDNN", "tdnn:ECAPA", ECAPAS),
    ("ResNet of published depth", "deep_resnet:DeepResNet", RESNETS),
    ("SimAM-ResNet", "deep_resnet:SimAMResNet", SIMAM_RESNETS),
    ("Gemini DF-ResNet", "deep_resnet:GeminiDFResNet", GEMINIS),
    ("Res2Net", "res2net:Res2Net", {"Res2Net34": Res2NetOptions}),
    ("CAM++", "campplus:CAMPPlus", {"CAMPPlus": CAMPPlusOptions}),
    ("ERes2Net", "res2net:ERes2Net", ERES2NETS),
    ("ERes2NetV2", "res2net:ERes2Net", ERES2NETV2S),
    ("ReDimNet", "redimnet:ReDimNet", REDIMNETS),
    ("ReDimNet2", "redimnet:ReDimNet", REDIMNET2S),
    ("Pretrained", "pretrained:Pretrained", {"Pretrained": PretrainedOptions}),
):
    FAMILIES[_family] = {
        name: Component(options, f"speakernet.models.{_trunk}") for name, options in _sizes.items()
    }
    MODELS |= FAMILIES[_family]


def pooling_of(model: str, pooling: str) -> str:
    """The name in POOLINGS that `pooling` refers to in a configuration with that model.

    Raises:
        ValueError: unknown model or pooling, or a pooling that does not fit the model.
    """
    trunk: Any = lookup(MODELS, model, "model").options
    name = trunk.poolings[0] if pooling == "auto" else pooling
    name = str(trunk.pooling_names.get(name, name))
    takes_layers = lookup(POOLINGS, name, "pooling").options.takes_layers
    # The states of all layers need poolings of their own.
    if takes_layers != trunk.gives_layers:
        fitting = [
            other
            for other, component in POOLINGS.items()
            if component.options.takes_layers == trunk.gives_layers
        ]
        raise ValueError(
            f"pooling {name} does not work with {model}; expected {', '.join(fitting)}"
        )
    return name


class ModelOptions(Options):
    """The network between features and embedding."""

    name: str = "ResNetSE34L"
    """Name of the model; `speakernet list models` shows all."""
    pooling: str = "auto"
    """Pooling from frames to one vector; `speakernet list poolings` shows all; auto: the model's
    own."""
    embedding_dim: Annotated[int, Ge(1), Le(65_536)] = 256
    """Size of an embedding."""
    options: SerializeAsAny[TrunkOptions] = Field(default_factory=TrunkOptions)
    """Further options of the model, such as {channels: 32} for ResNet or {sinc_stride: 10} for
    RawNet3."""
    pooling_options: SerializeAsAny[PoolingOptions] = Field(default_factory=PoolingOptions)
    """Further options of the pooling, such as {heads: 4} for MQMHASTP or {variance_floor: 1e-8} for
    TSTP."""

    @model_validator(mode="after")
    def _fill_in_options(self) -> "ModelOptions":
        """Fill in the defaults of the named model and pooling, unless their options are given."""
        pooling = pooling_of(self.name, self.pooling)
        named = (
            ("options", MODELS[self.name], self.name),
            ("pooling_options", POOLINGS[pooling], pooling),
        )
        for field, component, name in named:
            options = getattr(self, field)
            # The base classes are the fields' defaults: nothing was given.
            if type(options) in (TrunkOptions, PoolingOptions):
                object.__setattr__(self, field, component.options())
            elif type(options) is not component.options:
                raise ValueError(f"{field}: {type(options).__name__} does not belong to {name}")
        return self


__all__ = [
    "FAMILIES",
    "MODELS",
    "POOLINGS",
    "ModelOptions",
    "PoolingOptions",
    "TrunkOptions",
    "pooling_of",
]
