"""Checkpoints of BUT's MHFA recipes (github BUTSpeechFIT/wespeaker_ssl_public, commit 34e1343):
WavLM with MHFA.

They use Microsoft's definition of WavLM; its sizes follow from the shapes. Values that shapes do
not show are those of the published WavLMs: strides of the convolutions, and the distance from which
positions share a bias. The recipes do not normalise waveforms, whatever the backbone's own files
say.
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

SOURCE = "but"
FRONT_END = {"name": "raw"}
UNUSED = {r"^projection\.": "the training head", r"\.mask_emb$": "masks in pretraining"}
FIRST_STRIDE = 5
OTHER_STRIDES = 2
FARTHEST_POSITION = 800

# Microsoft's names of WavLM -> those of transformers, then the pooling. Some files have all names
# below `speaker_extractor`.
RULES = rules_of(
    r"""
    in model.feature_extractor.conv_layers.(\d+). trunk.backbone.feature_extractor.conv_layers.\1.
        0.        conv.
        2.(?:1.)? layer_norm.
    in model. trunk.backbone.
        post_extract_proj. feature_projection.projection.
        layer_norm.        feature_projection.layer_norm.
    in model.encoder.pos_conv.0. trunk.backbone.encoder.pos_conv_embed.conv.
        weight_g parametrizations.weight.original0
        weight_v parametrizations.weight.original1
        bias     bias
    in model.encoder.layers.(\d+). trunk.backbone.encoder.layers.\1.
        self_attn.grep_linear.             attention.gru_rel_pos_linear.
        self_attn.grep_a$                  attention.gru_rel_pos_const
        self_attn.relative_attention_bias. attention.rel_attn_embed.
        self_attn.                         attention.
        self_attn_layer_norm.              layer_norm.
        fc1.                               feed_forward.intermediate_dense.
        fc2.                               feed_forward.output_dense.
    in back_end. pooling.
        weights_k$    key_weights.logits
        weights_v$    value_weights.logits
        cmp_linear_k. keys.
        cmp_linear_v. values.
        att_head.     attention.
    """,
    "(?:speaker_extractor.)?",
) + rules_of(
    """
    model.               trunk.backbone.
    back_end.pooling_fc. embedding.
    """,
    "(?:speaker_extractor.)?",
)


def _wavlm_mhfa(weights: Weights) -> NetworkDescription:
    weights = {name.removeprefix("speaker_extractor."): value for name, value in weights.items()}
    extractor = "model.feature_extractor.conv_layers."
    channels_out: list[int] = []
    kernels: list[int] = []
    while f"{extractor}{len(kernels)}.0.weight" in weights:
        # (channels, channels of the layer before, kernel)
        shape = first_shape(weights, f"{extractor}{len(kernels)}.0.weight")
        channels_out.append(shape[0])
        kernels.append(shape[2])
    # (buckets, heads): the bias of the attention depends on the bucket of the distance.
    buckets, heads = first_shape(
        weights, "model.encoder.layers.0.self_attn.relative_attention_bias.weight"
    )
    channels, of_group, positions = first_shape(weights, "model.encoder.pos_conv.0.weight_v")
    # WavLM Large has a norm after each convolution, and norms before its layers.
    is_large = f"{extractor}1.2.1.weight" in weights
    config = {
        "model_type": "wavlm",
        "hidden_size": channels,
        "num_hidden_layers": sum(name.endswith(".fc1.weight") for name in weights),
        "num_attention_heads": heads,
        "intermediate_size": first_shape(weights, "model.encoder.layers.0.fc1.weight")[0],
        "conv_dim": channels_out,
        "conv_kernel": kernels,
        "conv_stride": [FIRST_STRIDE] + [OTHER_STRIDES] * (len(kernels) - 1),
        "conv_bias": f"{extractor}0.0.bias" in weights,
        "num_feat_extract_layers": len(kernels),
        "num_conv_pos_embeddings": positions,
        "num_conv_pos_embedding_groups": channels // of_group,
        "num_buckets": buckets,
        "max_bucket_distance": FARTHEST_POSITION,
        "feat_extract_norm": "layer" if is_large else "group",
        "do_stable_layer_norm": is_large,
    }
    pooling = {
        "heads": first_shape(weights, "back_end.att_head.weight")[0],
        "compression": first_shape(weights, "back_end.cmp_linear_k.weight")[0],
    }
    return NetworkDescription(
        "Pretrained",
        RULES,
        embedding_dim_of(weights, "back_end.pooling_fc"),
        0,
        "MHFA",
        {"config": config, "normalize": "off"},
        pooling,
    )


def models(contents: Mapping[str, Any]) -> dict[str, Describe]:
    """The only model of these recipes, by the name of its class."""
    return {"WavLM_MHFA": _wavlm_mhfa}
