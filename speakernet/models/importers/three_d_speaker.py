"""Checkpoints of 3D-Speaker (github modelscope/3D-Speaker, commit 09e7806): plain state
dictionaries of the network.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from speakernet.models.importers.speechbrain import ecapa
from speakernet.models.importers.weights import (
    Describe,
    NetworkDescription,
    Weights,
    embedding_dim_of,
    first_shape,
    rules_of,
)
from speakernet.models.importers.wespeaker import (
    FUSIONS,
    RES2,
    campplus,
    ends_of,
    pooled_width,
    pooling_of,
)

SOURCE = "3dspeaker"
FRONT_END = {"name": "fbank", "scale": 1.0, "window": "povey", "normalize": "mean"}
UNUSED: dict[str, str] = {}
# Added to the variance in its statistics; CAM++ adds nothing, but a gradient needs a small floor.
VARIANCE_FLOOR = 1e-8
MIN_FLOOR = 1e-12
# The width of a group is channels x base width / 64.
WIDTH_UNIT = 64

_RULES = rules_of("""
    layer3_ds.        trunk.downsamples.0.
    fuse34.local_att. trunk.fusions.0.attention.
""")
_RULES += FUSIONS + RES2


def _campplus(weights: Weights) -> NetworkDescription:
    return dataclasses.replace(campplus(weights), pooling_options={"variance_floor": MIN_FLOOR})


def _eres2net(weights: Weights) -> NetworkDescription:
    channels = first_shape(weights, "conv1.weight")[0]
    return _describe_fused("ERes2NetLarge" if channels == WIDTH_UNIT else "ERes2NetBase", weights)


def _eres2net_v2(weights: Weights) -> NetworkDescription:
    # Only V2 fuses the last two stages alone; any other file is refused here.
    first_shape(weights, "layer3_ds.weight")
    return _describe_fused("ERes2NetV2", weights)


def _describe_fused(model: str, weights: Weights) -> NetworkDescription:
    channels = first_shape(weights, "conv1.weight")[0]
    width = first_shape(weights, "layer1.0.convs.0.weight")[0]
    options = {
        "channels": channels,
        "base_width": width * WIDTH_UNIT // channels,
        "scale": first_shape(weights, "layer1.0.conv1.weight")[0] // width,
        "expansion": first_shape(weights, "layer1.0.conv3.weight")[0] // channels,
    }
    # The last stage has one row per 8 mel bands.
    num_mels = 8 * pooled_width(weights) // first_shape(weights, "layer4.0.shortcut.0.weight")[0]
    ends, layers = ends_of(weights)
    pooling = pooling_of(weights)
    floor = {"variance_floor": VARIANCE_FLOOR} if pooling == "TSTP" else {}
    dim = embedding_dim_of(weights, "seg_1")
    options |= layers
    return NetworkDescription(model, _RULES + ends, dim, num_mels, pooling, options, floor)


MODELS: dict[str, Describe] = {
    "CAMPPlus": _campplus,
    "ERes2Net": _eres2net,
    "ERes2NetV2": _eres2net_v2,
    "ECAPA_TDNN": ecapa,
}


def models(contents: Mapping[str, Any]) -> dict[str, Describe]:
    """The models of 3D-Speaker by the names of its classes."""
    return MODELS
