"""Checkpoints of wespeaker (github wenet-e2e/wespeaker, commit dfa7419): plain state dictionaries,
head included.

Its models share their structure, so a few sets of rules cover all of them. Mel bands, pooling and
embedding layer follow from the shapes.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from speakernet.models.importers.redimnet import RULES as REDIMNET2_RULES
from speakernet.models.importers.redimnet import stage_rules
from speakernet.models.importers.weights import (
    Describe,
    NetworkDescription,
    Rules,
    Weights,
    embedding_dim_of,
    first_shape,
    rules_of,
)
from speakernet.models.options.redimnet import REDIMNET2S, REDIMNETS
from speakernet.models.options.trunks import RESNETS

SOURCE = "wespeaker"
FRONT_END = {"name": "fbank", "scale": 32768.0, "window": "hamming", "normalize": "mean"}
# Used by the ReDimNet2 recipes (`frontend: tfmel`); all others use Kaldi's features.
TF_FRONT_END = {"name": "tf_mel", "normalize_waveform": True}
UNUSED = {
    r"^projection\.": "the training head",
    r"^(?:frontend(?!\.encoder\.)|spec)\.": "constants of its front end",
    r"^xvector\.stats\.": "a second name of the pooling",
}

# wespeaker's `seg_1` is the embedding layer, `seg_2` an optional second one. The recipes of ECAPA
# and ReDimNet2 call it `linear`, between the norms `bn` and `bn2`.
POOLING = rules_of(r"""
    pool.linear1. pooling.squeeze.
    pool.linear2. pooling.expand.
    in pool.n_query.(\d+).heads_att_trans.(\d+). pooling.queries.\1.\2.
        att_0. squeeze.
        att_1. expand.
""")
ONE_LAYER = rules_of("seg_1. embedding.")
TWO_LAYERS = rules_of("""
    seg_1.    embedding.0.
    seg_bn_1. embedding.2.
    seg_2.    embedding.3.
""")
NORMED = rules_of("""
    bn.     norm.
    linear. embedding.
""")
NORMED_TWICE = rules_of("""
    bn.     norm.
    linear. embedding.0.
    bn2.    embedding.1.
""")

# models/tdnn.py
_XVECTOR = rules_of(r"""
    frame_(\d).conv_1d. trunk.convs.<\1-1>.
    frame_(\d).bn.      trunk.norms.<\1-1>.
""")
# models/ecapa_tdnn.py: layer1 is the first convolution, layers 2 to 4 are the blocks.
_ECAPA = rules_of(r"""
    layer1.conv. trunk.conv.
    layer1.bn.   trunk.norm.
    conv.        trunk.aggregate.
    in layer(\d).se_res2block. trunk.blocks.<\1-2>.
        0.conv.    conv_in.
        0.bn.      norm_in.
        1.convs.   convs.
        1.bns.     norms.
        2.conv.    conv_out.
        2.bn.      norm_out.
        3.linear1. gate.squeeze.
        3.linear2. gate.excite.
""")
# models/resnet.py; the other networks over mels and frames share most of its names.
_RESIDUAL_NAMES = r"""
    conv(\d). trunk.conv\1.
    bn(\d).   trunk.norm\1.
    in layer(\d).(\d+). trunk.stages.<\1-1>.blocks.\2.
        conv(\d).                conv\3.
        bn(\d).                  norm\3.
        (?:shortcut|downsample). shortcut.
"""
RESIDUAL = rules_of(_RESIDUAL_NAMES)
# models/samresnet.py, whose pooling is a sequence of layers.
SIMAM = rules_of(_RESIDUAL_NAMES, "front.") + rules_of("""
    pooling.attention.0. pooling.squeeze.
    pooling.attention.2. pooling.norm.
    pooling.attention.3. pooling.expand.
    bottleneck.          embedding.
""")
# models/gemini_dfresnet.py, whose first "downsampling" is the stem.
_GEMINI = rules_of(r"""
    downsample_layers.0.0.  trunk.conv1.
    downsample_layers.0.1.  trunk.norm1.
    downsample_layers.(\d). trunk.downsamples.<\1-1>.
    in stages.(\d).(\d+). trunk.stages.\1.blocks.\2.
        conv(\d). conv\3.
        bn(\d).   norm\3.
""")
# models/res2net.py; the 1 x 1 convolutions around a split are conv1 and conv3 there.
RES2 = rules_of(r"""
    conv1. trunk.conv1.
    bn1.   trunk.norm1.
    in layer(\d).(\d+). trunk.stages.<\1-1>.blocks.\2.
        conv1.    conv_in.
        bn1.      norm_in.
        convs.    convs.
        bns.      norms.
        conv3.    conv_out.
        bn3.      norm_out.
        shortcut. shortcut.
""")
# models/eres2net.py: fusions within blocks, then between stages.
FUSIONS = rules_of(r"""
    layer(\d)_downsample.    trunk.downsamples.<\1-1>.
    fuse_mode12.local_att.   trunk.fusions.0.attention.
    fuse_mode123.local_att.  trunk.fusions.1.attention.
    fuse_mode1234.local_att. trunk.fusions.2.attention.
    in layer(\d).(\d+). trunk.stages.<\1-1>.blocks.\2.
        fuse_models.(\d+).local_att. fusions.\3.attention.
""")
# wespeaker names the first convolution of its fusing blocks differently from the others.
_ERES2 = rules_of(r"""
    in layer(\d).(\d+). trunk.stages.<\1-1>.blocks.\2.
        conv2_1. convs.0.
        bn2_1.   norms.0.
    in layer([34]).(\d+). trunk.stages.<\1-1>.blocks.\2.
        convs.(\d). convs.<\3+1>.
        bns.(\d).   norms.<\3+1>.
""")
_ERES2 += FUSIONS + RES2
# models/campplus.py: a residual head, then dense blocks with transitions.
CAMPPLUS = rules_of(_RESIDUAL_NAMES, "head.") + rules_of(r"""
    xvector.tdnn.linear.                     trunk.conv_in.
    xvector.tdnn.nonlinear.batchnorm.        trunk.norm_in.
    xvector.transit(\d).nonlinear.batchnorm. trunk.transitions.<\1-1>.norm.
    xvector.transit(\d).linear.              trunk.transitions.<\1-1>.conv.
    xvector.out_nonlinear.batchnorm.         trunk.norm_out.
    xvector.dense.linear.                    embedding.0.
    xvector.dense.nonlinear.batchnorm.       embedding.1.
    in xvector.block(\d).tdnnd(\d+). trunk.dense.<\1-1>.layers.<\2-1>.
        nonlinear1.batchnorm.   bottleneck.norm.
        linear1.                bottleneck.conv.
        nonlinear2.batchnorm.   norm.
        cam_layer.linear_local. local.
        cam_layer.linear1.      squeeze.
        cam_layer.linear2.      excite.
""")
_W2VBERT = "frontend.encoder."
_W2VBERT_ADAPTER_MFA = rules_of("""
    frontend.encoder.    trunk.backbone.
    adapter_layers.      pooling.adapters.
    pooling.attention.0. pooling.attentive.squeeze.
    pooling.attention.2. pooling.attentive.norm.
    pooling.attention.3. pooling.attentive.expand.
    bottleneck.          embedding.
""")
# A file only shows the sum of `left_max_position_embeddings` and `right_max_position_embeddings`.
W2VBERT_RIGHT = 8


def pooling_of(weights: Weights) -> str:
    """The pooling, recognised by its weights; TSTP if it has none."""
    if any(name.startswith("pool.n_query.") for name in weights):
        return "MQMHASTP"
    if "pool.linear1.weight" not in weights:
        return "TSTP"
    seen = weights["pool.linear1.weight"].shape[1]
    channels = weights["pool.linear2.weight"].shape[0]
    return "GlobalASTP" if seen == 3 * channels else "ASTP"


def ends_of(weights: Weights) -> tuple[Rules, dict[str, Any]]:
    """Rules for pooling and embedding layer, and the option for two embedding layers or a norm
    after one.
    """
    if "seg_2.weight" in weights:
        return POOLING + TWO_LAYERS, {"two_layers": True}
    if "linear.weight" not in weights:
        return POOLING + ONE_LAYER, {}
    if "bn2.weight" in weights:
        return POOLING + NORMED_TWICE, {"embedding_norm": True}
    return POOLING + NORMED, {}


def pooled_width(weights: Weights) -> int:
    """Input channels of the pooling."""
    # Mean and deviation, of two queries in wespeaker's multi-query pooling.
    per_channel = 4 if pooling_of(weights) == "MQMHASTP" else 2
    return first_shape(weights, "seg_1.weight", "bottleneck.weight")[1] // per_channel


def _xvector(weights: Weights) -> NetworkDescription:
    channels, num_mels, _ = first_shape(weights, "frame_1.conv_1d.weight")
    options = {
        "channels": channels,
        "statistics_channels": first_shape(weights, "frame_5.conv_1d.weight")[0],
    }
    rules = _XVECTOR + POOLING + TWO_LAYERS
    return NetworkDescription(
        "XVector", rules, embedding_dim_of(weights, "seg_2"), num_mels, pooling_of(weights), options
    )


def _ecapa(model: str, pooling: str, weights: Weights) -> NetworkDescription:
    file_pooling = pooling_of(weights)
    # The two names differ in the attention's context; both may be configured with a different
    # pooling.
    if file_pooling != pooling and file_pooling in ("ASTP", "GlobalASTP"):
        raise ValueError(
            f"its pooling is {file_pooling}; expected {pooling} in a model of this name"
        )
    ends, options = ends_of(weights)
    dim = embedding_dim_of(weights, "linear")
    num_mels = first_shape(weights, "layer1.conv.weight")[1]
    return NetworkDescription(model, _ECAPA + ends, dim, num_mels, file_pooling, options)


def _residual(
    model: str,
    rules: Rules,
    weights: Weights,
    last: str = "layer4.0.shortcut.0.weight",
    mels_to_one: int = 8,
) -> NetworkDescription:
    """A residual network whose last stage widens in the layer `last` and has one row per
    `mels_to_one` mel bands.
    """
    ends, options = ends_of(weights)
    # The pooling sees channels x rows; the channels are those of the last stage.
    num_mels = mels_to_one * pooled_width(weights) // first_shape(weights, last)[0]
    dim = embedding_dim_of(weights, "seg_1")
    return NetworkDescription(model, rules + ends, dim, num_mels, pooling_of(weights), options)


def _gemini(model: str, weights: Weights) -> NetworkDescription:
    return _residual(model, _GEMINI, weights, "downsample_layers.4.0.weight", mels_to_one=16)


def _simam(model: str, weights: Weights) -> NetworkDescription:
    options = {"channels": first_shape(weights, "front.conv1.weight")[0]}
    last = first_shape(weights, "front.layer4.0.downsample.0.weight")[0]
    num_mels = 8 * pooled_width(weights) // last
    return NetworkDescription(
        model, SIMAM, embedding_dim_of(weights, "bottleneck"), num_mels, "ASP", options
    )


def campplus(weights: Weights) -> NetworkDescription:
    """CAM++; 3D-Speaker's definition differs only in the variance floor."""
    dim = embedding_dim_of(weights, "xvector.dense.linear")
    head = first_shape(weights, "head.conv1.weight")[0]
    num_mels = 8 * first_shape(weights, "xvector.tdnn.linear.weight")[1] // head
    return NetworkDescription("CAMPPlus", CAMPPLUS + POOLING, dim, num_mels, pooling_of(weights))


def _redimnet(model: str, weights: Weights) -> NetworkDescription:
    ends, options = ends_of(weights)
    # One sum of maps for each stage and a last one for the head, in a single list; ours are with
    # the stages that use them.
    last = 0
    while f"backbone.inputs_weights.{last + 1}" in weights:
        last += 1
    rules = (
        (rf"^backbone\.inputs_weights\.{last}$", "trunk.aggregate.weight"),
        (r"^backbone\.inputs_weights\.(\d+)$", r"trunk.stages.\1.aggregate.weight"),
        *stage_rules(parts_before_blocks=1),
        *ends,
    )
    # A weight for each of channels x mels values of a folded map: (1, maps, channels x mels, 1).
    channels = first_shape(weights, "backbone.stem.0.weight")[0]
    num_mels = first_shape(weights, "backbone.inputs_weights.1")[2] // channels
    options["pooled_norm"] = False
    dim = embedding_dim_of(weights, "seg_1")
    return NetworkDescription(model, rules, dim, num_mels, pooling_of(weights), options)


def _redimnet2(model: str, weights: Weights) -> NetworkDescription:
    ends, options = ends_of(weights)
    channels = first_shape(weights, "backbone.stem.0.weight")[0]
    num_mels = first_shape(weights, "backbone.stage0.0.w")[2] // channels
    dim = embedding_dim_of(weights, "linear")
    pooling = pooling_of(weights)
    return NetworkDescription(
        model, REDIMNET2_RULES + ends, dim, num_mels, pooling, options, front_end=TF_FRONT_END
    )


def _w2vbert_adapter_mfa(weights: Weights) -> NetworkDescription:
    """w2v-BERT 2.0 with `AdapterMFA`, after the stage that merges its LoRA adapters."""
    if any(".lora_A." in name for name in weights):
        raise ValueError(
            "the scale of its adapters is not in the file; merge them with wespeaker's "
            "merge_lora.py"
        )
    layer = _W2VBERT + "encoder.layers.0."
    hidden, inputs = first_shape(weights, _W2VBERT + "feature_projection.projection.weight")
    positions, of_head = first_shape(weights, layer + "self_attn.distance_embedding.weight")
    config = {
        "model_type": "wav2vec2-bert",
        "hidden_size": hidden,
        "num_hidden_layers": sum(name.endswith(".depthwise_conv.weight") for name in weights),
        "num_attention_heads": hidden // of_head,
        "intermediate_size": first_shape(weights, layer + "ffn1.intermediate_dense.weight")[0],
        "feature_projection_input_dim": inputs,
        "conv_depthwise_kernel_size": first_shape(
            weights, layer + "conv_module.depthwise_conv.weight"
        )[2],
        "left_max_position_embeddings": positions - 1 - W2VBERT_RIGHT,
        "right_max_position_embeddings": W2VBERT_RIGHT,
    }
    return NetworkDescription(
        "Pretrained",
        _W2VBERT_ADAPTER_MFA,
        embedding_dim_of(weights, "bottleneck"),
        0,
        "AdapterMFA",
        options={"config": config},
        pooling_options={"dim": first_shape(weights, "adapter_layers.0.0.weight")[0]},
        front_end={"name": "raw"},
    )


MODELS: dict[str, Describe] = {
    "XVEC": _xvector,
    "ECAPA_TDNN_c512": partial(_ecapa, "ECAPA_TDNN", "ASTP"),
    "ECAPA_TDNN_c1024": partial(_ecapa, "ECAPA_TDNN_1024", "ASTP"),
    "ECAPA_TDNN_GLOB_c512": partial(_ecapa, "ECAPA_TDNN", "GlobalASTP"),
    "ECAPA_TDNN_GLOB_c1024": partial(_ecapa, "ECAPA_TDNN_1024", "GlobalASTP"),
    "SimAM_ResNet34_ASP": partial(_simam, "SimAM_ResNet34"),
    "SimAM_ResNet100_ASP": partial(_simam, "SimAM_ResNet100"),
    "Gemini_DF_ResNet60": partial(_gemini, "Gemini_DF_ResNet60"),
    "Gemini_DF_ResNet114": partial(_gemini, "Gemini_DF_ResNet114"),
    "Res2Net34_Base": partial(_residual, "Res2Net34", RES2),
    "CAMPPlus": campplus,
    "W2VBert_Adapter_MFA": _w2vbert_adapter_mfa,
    "ERes2Net34_Base": partial(_residual, "ERes2NetBase", _ERES2),
    "ERes2Net34_Large": partial(_residual, "ERes2NetLarge", _ERES2),
}
# The names of these are also ours.
for _name in RESNETS:
    MODELS[_name] = partial(_residual, _name, RESIDUAL)
for _name in REDIMNETS:
    MODELS[_name] = partial(_redimnet, _name)
for _name in REDIMNET2S:
    MODELS[_name] = partial(_redimnet2, _name)


def models(contents: Mapping[str, Any]) -> dict[str, Describe]:
    """The models of wespeaker by the names of its classes and functions."""
    if "model_config" in contents:
        raise ValueError("the file has a model_config, like those of the ReDimNet authors")
    return MODELS
