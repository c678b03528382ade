"""ECAPA-TDNN of SpeechBrain (github speechbrain/speechbrain, commit 9c826ef): the bare
`embedding_model.ckpt`.
"""

from collections.abc import Mapping
from typing import Any

from speakernet.models.importers.weights import (
    Describe,
    Described,
    Rules,
    Weights,
    first_shape,
    last_dim,
)
from speakernet.models.options.trunks import ECAPAS
from speakernet.options import default_of

SOURCE = "speechbrain"
# `Fbank` and `InputNormalization(norm_type="sentence", std_norm=False)` of its recipes.
FRONT_END = {"name": "speechbrain", "normalize": "mean"}
UNUSED: dict[str, str] = {}

_BLOCK = r"^blocks\.([123])\."
_RULES: Rules = (
    (r"^blocks\.0\.conv\.conv\.", "trunk.conv."),
    (r"^blocks\.0\.norm\.norm\.", "trunk.norm."),
    (_BLOCK + r"tdnn1\.conv\.conv\.", r"trunk.blocks.<\1-1>.conv_in."),
    (_BLOCK + r"tdnn1\.norm\.norm\.", r"trunk.blocks.<\1-1>.norm_in."),
    (_BLOCK + r"res2net_block\.blocks\.(\d)\.conv\.conv\.", r"trunk.blocks.<\1-1>.convs.\2."),
    (_BLOCK + r"res2net_block\.blocks\.(\d)\.norm\.norm\.", r"trunk.blocks.<\1-1>.norms.\2."),
    (_BLOCK + r"tdnn2\.conv\.conv\.", r"trunk.blocks.<\1-1>.conv_out."),
    (_BLOCK + r"tdnn2\.norm\.norm\.", r"trunk.blocks.<\1-1>.norm_out."),
    (_BLOCK + r"se_block\.conv1\.conv\.", r"trunk.blocks.<\1-1>.gate.squeeze."),
    (_BLOCK + r"se_block\.conv2\.conv\.", r"trunk.blocks.<\1-1>.gate.excite."),
    (r"^mfa\.conv\.conv\.", "trunk.aggregate."),
    (r"^mfa\.norm\.norm\.", "trunk.aggregate_norm."),
    (r"^asp\.tdnn\.conv\.conv\.", "pooling.squeeze."),
    (r"^asp\.tdnn\.norm\.norm\.", "pooling.norm."),
    (r"^asp\.conv\.conv\.", "pooling.expand."),
    (r"^asp_bn\.norm\.", "norm."),
    (r"^fc\.conv\.", "embedding."),
)


def ecapa(weights: Weights) -> Described:
    """ECAPA-TDNN of any width, with mirrored edges; 3D-Speaker uses the same definition and
    names.
    """
    channels, num_mels, _ = first_shape(weights, "blocks.0.conv.conv.weight")
    aggregate = first_shape(weights, "mfa.conv.conv.weight")[0]
    options = {"channels": channels, "aggregate_channels": aggregate, "speechbrain": True}
    model = "ECAPA_TDNN"
    for name, size in ECAPAS.items():
        if default_of(size, "channels") == channels:
            model = name
    return Described(model, _RULES, last_dim(weights, "fc.conv"), num_mels, "NormASTP", options)


MODELS: dict[str, Describe] = {"ECAPA_TDNN": ecapa}


def models(contents: Mapping[str, Any]) -> dict[str, Describe]:
    """The models of SpeechBrain by the names of its classes."""
    return MODELS
