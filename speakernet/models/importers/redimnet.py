"""Files of the ReDimNet authors (github IDRnD/redimnet dd9f519, PalabraAI/redimnet2 ffe8f27).

They contain `model_config`, which determines the network, and `state_dict`, whose names and shapes
must match it. The rules also apply to wespeaker's copies of the two architectures.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from speakernet.files import read_yaml_file
from speakernet.models.importers.weights import (
    Describe,
    NetworkDescription,
    Rules,
    Weights,
    embedding_dim_of,
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
CONFIG = read_yaml_file(Path(__file__).with_suffix(".yaml"), "the options of the authors' files")
"""Supported and default values of their options."""
# Their feature options -> (our option, conversion of the value).
_SIGNAL: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "f_min": ("low_hz", float),
    "f_max": ("high_hz", float),
    "do_preemph": ("preemphasis", lambda is_on: FRONT_END["preemphasis"] if is_on else 0.0),
    "norm_signal": ("normalize_waveform", bool),
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


def _describe(name: str, config: Mapping[str, Any], weights: Weights) -> NetworkDescription:
    # The file does not name its architecture. The first entry of a stage is a stride along mels, or
    # in ReDimNet2 a pair of strides.
    first_stage = (config.get("stages_setup") or [[1]])[0]
    is_second = "compress_tconvs" in config or isinstance(first_stage[0], list | tuple)
    if is_second != name.startswith("ReDimNet2"):
        raise ValueError(f"its model_config describes a ReDimNet{2 if is_second else ''}")
    defaults = CONFIG["second" if is_second else "first"]
    _check_known(config, defaults)
    # Options missing in a file have the defaults of the authors' code, not ours.
    values = {**defaults, **config}
    options = _read_options(values, is_second)
    size = _find_size(name, REDIMNET2S if is_second else REDIMNETS, options)
    return NetworkDescription(
        size,
        RULES + (NORMED_LAYER if values["emb_bn"] else ONE_LAYER),
        embedding_dim_of(weights, "linear"),
        values["F"],
        "GlobalASTP" if values["global_context_att"] else "ASTP",
        options,
        front_end=_front_end(config),
    )


def _check_known(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse unsupported options that would change the network or its features."""
    features = config.get("spec_params") or {}
    if not isinstance(features, Mapping):
        raise ValueError(
            f"its model_config has spec_params: {features!r}; expected a mapping of options"
        )
    others = {*CONFIG["for_training"], *defaults, "spec_params"}
    _check_section(config, others, CONFIG["known_values"])
    others = {*CONFIG["features_for_training"], *_SIGNAL}
    _check_section(features, others, CONFIG["known_features"])


def _check_section(
    section: Mapping[str, Any], others: set[str], known_values: Mapping[str, list[Any]]
) -> None:
    for option, value in section.items():
        # An unknown option may change the network without changing any shape, and the imported
        # network would give wrong scores.
        if option in known_values:
            if value not in known_values[option]:
                expected = " or ".join(map(str, known_values[option]))
                raise ValueError(
                    f"its model_config has {option}: {value}; only {expected} is supported"
                )
        elif option not in others:
            raise ValueError(
                f"its model_config has the unknown option {option}; "
                f"{suggestion(option, {*known_values, *others})}"
            )


def _front_end(config: Mapping[str, Any]) -> dict[str, Any]:
    """The front end, without the number of bands, which follows from the network."""
    features = config.get("spec_params") or {}
    front_end = {**FRONT_END, "name": FEATURES[config.get("feat_type", "pt")]}
    for theirs, (ours, convert) in _SIGNAL.items():
        if theirs in features:
            front_end[ours] = convert(features[theirs])
    return front_end


def _read_options(values: Mapping[str, Any], is_second: bool) -> dict[str, Any]:
    if not values["group_divisor"]:
        raise ValueError("its model_config has no group_divisor; expected a number of channels")
    stages = []
    for stride, blocks, width, kernels, divisor in values["stages_setup"]:
        if is_second:
            kernel = kernels[0] if kernels else (3, 3)
            stages.append([*stride, blocks, width, *kernel, divisor or 0])
        else:
            # The blocks of the first networks do not use the kernels.
            stages.append([stride, blocks, width, divisor or 0])
    options = {
        "channels": values["C"],
        "block": values["block_2d_type"],
        "context": values["block_1d_type"],
        "group_channels": values["group_divisor"],
        "embedding_norm": values["emb_bn"],
        "aggregate_channels": values["out_channels"] or 0,
        "stages": stages,
    }
    if is_second:
        options["grouped_strides"] = values["compress_tconvs"]
        options["keeps_mels"] = values["return_2d_output"]
        options["joins_both"] = values["dual_agg"]
        options["map_norm"] = values["agg_gnorm"]
    return options


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
