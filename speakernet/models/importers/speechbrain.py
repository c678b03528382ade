"""ECAPA-TDNN of SpeechBrain (github speechbrain/speechbrain, commit 9c826ef): the bare
`embedding_model.ckpt`.
"""

from collections.abc import Mapping
from typing import Any

from speakernet.models.importers.weights import (
    Describe,
    NetworkDescription,
    Weights,
    embedding_dim_of,
    first_shape,
    rules_of,
)
from speakernet.models.options.trunks import ECAPAS
from speakernet.options import default_of

SOURCE = "speechbrain"
# `Fbank` and `InputNormalization(norm_type="sentence", std_norm=False)` of its recipes.
FRONT_END = {"name": "speechbrain", "normalize": "mean"}
# Every tensor of a file belongs to the network.
UNUSED: dict[str, str] = {}

_RULES = rules_of(r"""
    blocks.0.conv.conv. trunk.conv.
    blocks.0.norm.norm. trunk.norm.
    mfa.conv.conv.      trunk.aggregate.
    mfa.norm.norm.      trunk.aggregate_norm.
    asp.tdnn.conv.conv. pooling.squeeze.
    asp.tdnn.norm.norm. pooling.norm.
    asp.conv.conv.      pooling.expand.
    asp_bn.norm.        norm.
    fc.conv.            embedding.
    in blocks.([123]). trunk.blocks.<\1-1>.
        tdnn1.conv.conv.                     conv_in.
        tdnn1.norm.norm.                     norm_in.
        res2net_block.blocks.(\d).conv.conv. convs.\2.
        res2net_block.blocks.(\d).norm.norm. norms.\2.
        tdnn2.conv.conv.                     conv_out.
        tdnn2.norm.norm.                     norm_out.
        se_block.conv1.conv.                 gate.squeeze.
        se_block.conv2.conv.                 gate.excite.
""")


def ecapa(weights: Weights) -> NetworkDescription:
    """ECAPA-TDNN of any width, with mirrored edges; 3D-Speaker uses the same definition and
    names.
    """
    channels, num_mels, _ = first_shape(weights, "blocks.0.conv.conv.weight")
    aggregate = first_shape(weights, "mfa.conv.conv.weight")[0]
    options = {"channels": channels, "aggregate_channels": aggregate, "speechbrain": True}
    model = "ECAPA_TDNN"
    for name, its_options in ECAPAS.items():
        if default_of(its_options, "channels") == channels:
            model = name
    return NetworkDescription(
        model,
        _RULES,
        embedding_dim_of(weights, "fc.conv"),
        num_mels,
        pooling="NormASTP",
        options=options,
    )


MODELS: dict[str, Describe] = {"ECAPA_TDNN": ecapa}


def models(contents: Mapping[str, Any]) -> dict[str, Describe]:
    """The models of SpeechBrain by the names of its classes."""
    return MODELS
