"""Files of the ReDimNet authors (github IDRnD/redimnet dd9f519, PalabraAI/redimnet2 ffe8f27).

They contain `model_config`, which determines the network, and `state_dict`, whose names and shapes
must match it. The rules also apply to wespeaker's copies of the two architectures.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from speakernet.models.importers.weights import (
    Describe,
    Described,
    Rules,
    Weights,
    last_dim,
    rules_of,
)
from speakernet.models.options.redimnet import REDIMNET2S, REDIMNETS
from speakernet.options import default_of, suggestion

SOURCE = "redimnet"
# Defaults of `MelBanks`.
FRONT_END: dict[str, Any] = {
    "name": "log_mel",
    "preemphasis": 0.97,
    "low_hz": 20.0,
    "high_hz": 7600.0,
    "normalize": "mean",
    "normalize_waveform": False,
}
# The front end for each value of `feat_type`.
FEATURES = {"pt": "log_mel", "pt_mel": "log_mel", "tf": "tf_mel", "tf_mel": "tf_mel"}
UNUSED = {r"^spec\.": "constants of its front end", r"^cls_head\.": "the training head"}

# Components before the blocks of a stage: sum, unfolding and strided convolution.
PARTS_BEFORE_BLOCKS = 3
# Supported values by option; the published networks use no others.
KNOWN_VALUES: dict[str, tuple[Any, ...]] = {
    "causal": ("none",),
    "spec_in_channels": (1,),
    "use_freq_pos_enc": (False,),
    "fm_weigthing_type": ("NC",),
    "pad_right_samples": (None, 0),
    "before_pool_offset": (None, 0),
    "pooling_func": ("ASTP",),
    "tf_optimized_arch": (False,),
    "hop_length": (160,),
    "return_all_outputs": (False,),
    "feat_type": tuple(FEATURES),
}
# Options for training only.
FOR_TRAINING = {"embed_dim", "num_classes", "class_dropout", "feat_agg_dropout", "head_activation"}
KNOWN_FEATURES: dict[str, tuple[Any, ...]] = {
    "sample_rate": (16_000,),
    "n_fft": (512,),
    "win_length": (400,),
    "spec_norm": ("mn",),
    "eps": (1e-8,),
}
FEATURES_FOR_TRAINING = {
    "do_spec_aug",
    "freq_start_bin",
    "num_apply_spec_aug",
    "freq_mask_width",
    "time_mask_width",
}
# Their feature options -> (our option, conversion of the value).
_SIGNAL: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "f_min": ("low_hz", float),
    "f_max": ("high_hz", float),
    "do_preemph": ("preemphasis", lambda is_on: FRONT_END["preemphasis"] if is_on else 0.0),
    "norm_signal": ("normalize_waveform", bool),
}
# Defaults in the authors' code.
_FIRST = {
    "F": 72,
    "C": 16,
    "block_1d_type": "att",
    "block_2d_type": "convnext_like",
    "group_divisor": 4,
    "out_channels": None,
    "global_context_att": False,
    "emb_bn": False,
    "stages_setup": [
        (*sizes[:3], None, sizes[3]) for sizes in default_of(REDIMNETS["ReDimNetB2"], "stages")
    ],
}
_SECOND = {
    "F": 72,
    "C": 24,
    "block_1d_type": "conv+att",
    "block_2d_type": "basic_resnet",
    "group_divisor": 1,
    "out_channels": None,
    "global_context_att": True,
    "emb_bn": False,
    "compress_tconvs": True,
    "return_2d_output": False,
    "dual_agg": False,
    "agg_gnorm": False,
    "stages_setup": [
        ((sizes[0], sizes[1]), sizes[2], sizes[3], [(sizes[4], sizes[5])], sizes[6])
        for sizes in default_of(REDIMNET2S["ReDimNet2B4"], "stages")
    ],
}


def stage_rules(parts_before_blocks: int) -> Rules:
    """Renaming rules for stem, stages and head."""
    # A stage is a numbered sequence of parts: sum and strided convolution, the blocks over mels and
    # frames, the narrowing, folding, and the time context (`tcm`).
    return rules_of(
        rf"""
        stem.          trunk.stem.
        stem_gnorm.    trunk.stem_norm.
        (?:mfa|head).  trunk.head.
        fin_wght1d.w$  trunk.aggregate.weight
        in stage(\d+)(?:_pre)?. trunk.stages.\1.
        0.w$ aggregate.weight
        in stage(\d+)(?:_pre)?.(\d+).conv_block. trunk.stages.\1.blocks.<\2-{parts_before_blocks}>.
        conv(\d).     conv\3.
        conv(\d)pw.   point\3.
        bn(\d).       norm\3.
        se.squeeze.   gate.squeeze.
        se.exitation. gate.excite.
        dwconvs.      convs.
        norm.         norm.
        pwconv1.      point.
        in stage(\d+)(?:_1d|.\d+). trunk.stages.\1.context.
        red_dim_conv.0. conv_in.
        red_dim_conv.1. norm_in.
        exp_dim_conv.   conv_out.
        in stage(\d+)(?:_1d|.\d+).tcm.(\d). trunk.stages.\1.context.layers.\2.
        dwconvs.                         convs.
        pwconv1.                         point.
        conv.                            conv.
        norm.                            norm.
        attention.q_proj.                query.
        attention.k_proj.                key.
        attention.v_proj.                value.
        attention.out_proj.              out.
        layer_norm.                      norm1.
        feed_forward.intermediate_dense. widen.
        feed_forward.output_dense.       narrow.
        final_layer_norm.                norm2.
        in stage(\d+)(?:_pre)?. trunk.stages.\1.
        \d+.(\d).                  narrow.\2.
        {parts_before_blocks - 1}. conv.
        \d+.                       norms.0.
        in stage(\d+)_up_ trunk.stages.\1.norms.
        2d.1. 0.
        1d.1. 1.
        """,
        "backbone.",
    )


RULES = stage_rules(PARTS_BEFORE_BLOCKS) + rules_of("""
    pool.linear1. pooling.squeeze.
    pool.linear2. pooling.expand.
    bn.           norm.
""")
ONE_LAYER = rules_of("linear. embedding.")
NORMED_LAYER = rules_of("""
    linear. embedding.0.
    bn2.    embedding.1.
""")


def models(contents: Mapping[str, Any]) -> dict[str, Describe]:
    """The authors' models by name, determined by the file's configuration."""
    config = contents.get("model_config")
    if not isinstance(config, Mapping):
        raise ValueError(
            "the file has no model_config next to its state_dict, unlike ReDimNet's files"
        )
    return {
        name: partial(_describe, name, config)
        for name in ("ReDimNet", *REDIMNETS, "ReDimNet2", *REDIMNET2S)
    }


def _describe(name: str, config: Mapping[str, Any], weights: Weights) -> Described:
    # The first number of a stage is a stride along mels, or a pair of strides in ReDimNet2.
    first_stage = (config.get("stages_setup") or [[1]])[0]
    is_second = "compress_tconvs" in config or isinstance(first_stage[0], list | tuple)
    if is_second != name.startswith("ReDimNet2"):
        raise ValueError(f"its model_config describes a ReDimNet{2 if is_second else ''}")
    defaults = _SECOND if is_second else _FIRST
    # Options missing in a file have the defaults of the authors' code, not ours.
    _check_known(config, {*KNOWN_VALUES, *FOR_TRAINING, *defaults, "spec_params"})
    values = {**defaults, **config}
    if is_second:
        options = _read_second(values)
        size = _find_size(name, REDIMNET2S, options)
    else:
        options = _read_first(values)
        size = _find_size(name, REDIMNETS, options)
    return Described(
        size,
        RULES + (NORMED_LAYER if values["emb_bn"] else ONE_LAYER),
        last_dim(weights, "linear"),
        values["F"],
        "GlobalASTP" if values["global_context_att"] else "ASTP",
        options,
        front_end=_front_end(config),
    )


def _check_known(config: Mapping[str, Any], options: set[str]) -> None:
    """Refuse unsupported options that would change the network or its features."""
    features = config.get("spec_params") or {}
    if not isinstance(features, Mapping):
        raise ValueError(
            f"its model_config has spec_params: {features!r}; expected a mapping of options"
        )
    feature_options = {*KNOWN_FEATURES, *FEATURES_FOR_TRAINING, *_SIGNAL}
    _check_section(config, options, KNOWN_VALUES)
    _check_section(features, feature_options, KNOWN_FEATURES)


def _check_section(
    section: Mapping[str, Any], options: set[str], known_values: Mapping[str, tuple[Any, ...]]
) -> None:
    for option, value in section.items():
        if option not in options:
            raise ValueError(
                f"its model_config has the unknown option {option}; {suggestion(option, options)}"
            )
        if option in known_values and value not in known_values[option]:
            expected = " or ".join(map(str, known_values[option]))
            raise ValueError(
                f"its model_config has {option}: {value}; only {expected} is supported"
            )


def _front_end(config: Mapping[str, Any]) -> dict[str, Any]:
    """The front end, without the number of bands, which follows from the network."""
    features = config.get("spec_params") or {}
    front_end = {**FRONT_END, "name": FEATURES[config.get("feat_type", "pt")]}
    for theirs, (ours, convert) in _SIGNAL.items():
        if theirs in features:
            front_end[ours] = convert(features[theirs])
    return front_end


def _read_first(values: Mapping[str, Any]) -> dict[str, Any]:
    options = _read_common(values)
    options["stages"] = []
    # The fourth is the kernels, which the blocks of these networks do not use.
    for stride, blocks, width, _, divisor in values["stages_setup"]:
        options["stages"].append([stride, blocks, width, divisor or 0])
    return options


def _read_second(values: Mapping[str, Any]) -> dict[str, Any]:
    options = _read_common(values)
    options["stages"] = []
    for strides, blocks, width, kernels, divisor in values["stages_setup"]:
        kernel = kernels[0] if kernels else (3, 3)
        options["stages"].append([*strides, blocks, width, *kernel, divisor or 0])
    options["grouped_strides"] = values["compress_tconvs"]
    options["keeps_mels"] = values["return_2d_output"]
    options["joins_both"] = values["dual_agg"]
    options["map_norm"] = values["agg_gnorm"]
    return options


def _read_common(values: Mapping[str, Any]) -> dict[str, Any]:
    if not values["group_divisor"]:
        raise ValueError("its model_config has no group_divisor; expected a number of channels")
    return {
        "channels": values["C"],
        "block": values["block_2d_type"],
        "context": values["block_1d_type"],
        "group_channels": values["group_divisor"],
        "embedding_norm": values["emb_bn"],
        "aggregate_channels": values["out_channels"] or 0,
    }


def _find_size(name: str, sizes: Mapping[str, type], options: Mapping[str, Any]) -> str:
    """The name of the published size with these options, or the requested name if there is none."""
    matches = []
    for size, kind in sizes.items():
        has_stages = default_of(kind, "stages") == options["stages"]
        if has_stages and default_of(kind, "channels") == options["channels"]:
            matches.append(size)
    if name not in sizes:
        # A bare "ReDimNet" or "ReDimNet2".
        return next(iter(matches or sizes))
    if matches and name not in matches:
        raise ValueError(f"its model_config describes {matches[0]}")
    return name
