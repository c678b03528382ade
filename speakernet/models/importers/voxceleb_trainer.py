"""Checkpoints of voxceleb_trainer (github clovaai/voxceleb_trainer, commit f51bab8) and its forks.

This module reads the 2026 format (`model_state_dict`, keys `__S__.*` and `__L__.*`, optimizer,
schedule and epoch), plain state dictionaries, both also with the prefix `module.`, and `{"model":
…}` (RawNet3, network only). Constant buffers (mel filterbank, windows, sinc axes) are compared with
ours, never loaded.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speakernet.checkpoint import CheckpointError
from speakernet.models.importers.weights import (
    NetworkDescription,
    Rules,
    TranslatedWeights,
    first_shape,
    rename,
    rules_of,
    strip_wrappers,
)
from speakernet.models.rawnet3 import PREEMPHASIS
from speakernet.models.speaker_net import SpeakerNet

SOURCE = "voxceleb_trainer"
# Filterbanks of different torchaudio releases differ by rounding; other windows or mel counts
# differ far more.
CONSTANT_TOLERANCE = 1e-4

# Their names and ours, as `rules_of` reads them.
_RESIDUAL = rules_of(r"""
    conv1. trunk.conv1.
    bn1.   trunk.norm1.
    fc.    embedding.
    in layer(\d+).(\d+). trunk.stages.<\1-1>.blocks.\2.
        bn(\d).     norm\3.
        conv(\d).   conv\3.
        se.fc.0.    gate.squeeze.
        se.fc.2.    gate.excite.
        downsample. shortcut.
""")
_SELF_ATTENTION = rules_of("""
    sap_linear. pooling.hidden.
    attention$  pooling.attention
""")
_CHANNEL_ATTENTION = rules_of("""
    attention.0. pooling.squeeze.
    attention.2. pooling.norm.
    attention.3. pooling.expand.
""")
# Its layers are a single sequence: convolution, norm, ReLU and, in the first two, a pooling.
_VGG = rules_of("""
    fc. embedding.
    in netcnn. trunk.layers.
        0.  0.conv.
        1.  0.norm.
        4.  1.conv.
        5.  1.norm.
        8.  2.conv.
        9.  2.norm.
        11. 3.conv.
        12. 3.norm.
        14. 4.conv.
        15. 4.norm.
        18. 5.conv.
        19. 5.norm.
""")
_RAW = rules_of(r"""
    preprocess.1.weight$       trunk.input_weight
    preprocess.1.bias$         trunk.input_bias
    conv1.filterbank.low_hz_$  trunk.filterbank.low_hz
    conv1.filterbank.band_hz_$ trunk.filterbank.band_hz
    bn1.                       trunk.idle_norms.0.
    bn6.                       trunk.idle_norms.1.
    bn5.                       norm.
    fc6.                       embedding.
    layer4.                    trunk.aggregate.
    in layer(\d). trunk.block\1.
        conv1.      conv_in.
        bn1.        norm_in.
        convs.      convs.
        bns.        norms.
        conv3.      conv_out.
        bn3.        norm_out.
        residual.0. shortcut.
        afms.alpha$ scaling.shift
        afms.fc.    scaling.gate.
""")
RULES: dict[str, Rules] = {
    "ResNetSE34L": _RESIDUAL + _SELF_ATTENTION,
    "ResNetSE34V2": _RESIDUAL + _CHANNEL_ATTENTION,
    "VGGVox": _VGG + _SELF_ATTENTION,
    "RawNet3": _RAW + _CHANNEL_ATTENTION,
}
# Suffix of a foreign constant's name -> our value.
CONSTANTS: dict[str, Callable[[Any], Tensor]] = {
    ".spectrogram.window": lambda net: net.front_end.window,
    ".mel_scale.fb": lambda net: net.front_end.mel_bank,
    "torchfb.0.flipped_filter": lambda net: torch.tensor(
        [[[-net.front_end.options.preemphasis, 1.0]]]
    ),
    "preprocess.0.flipped_filter": lambda net: torch.tensor([[[-PREEMPHASIS, 1.0]]]),
    "filterbank.window_": lambda net: net.trunk.filterbank.window,
    "filterbank.n_": lambda net: net.trunk.filterbank.axis,
}
# Names of the loss's weights under `__L__.` -> our names.
HEAD_NAMES = {
    "W": "weight",
    "weight": "weight",
    "fc.weight": "weight",
    "fc.bias": "bias",
    "w": "scale",
    "b": "bias",
    "softmax.fc.weight": "softmax.weight",
    "softmax.fc.bias": "softmax.bias",
    "angleproto.w": "angular.scale",
    "angleproto.b": "angular.bias",
}
# A tensor that identifies the architecture, tried in order; ResNets of other toolkits share most
# names.
_MARKS = {
    "RawNet3": "layer1.afms.alpha",
    "VGGVox": "netcnn.0.weight",
    "ResNetSE34L": "sap_linear.weight",
    "ResNetSE34V2": "layer1.0.se.fc.0.weight",
}


def is_ours_to_read(contents: Any) -> bool:
    """Whether a checkpoint looks like one of voxceleb_trainer's."""
    return isinstance(contents, dict) and recognize(split_parts(contents)[0]) is not None


def recognize(network: Mapping[str, Any]) -> str | None:
    """The architecture of voxceleb_trainer that a state dictionary belongs to, or None."""
    return next((model for model, tensor in _MARKS.items() if tensor in network), None)


def split_parts(
    contents: Mapping[str, Any],
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Network and loss state dictionaries without their prefixes, and the other entries of the
    file.
    """
    # Older files hold only weights, newer ones also optimizer and schedule.
    others: list[str] = []
    for key in ("model_state_dict", "model"):
        if isinstance(contents.get(key), Mapping):
            others = [f"{name} (only weights are taken)" for name in contents if name != key]
            contents = contents[key]
            break
    network: dict[str, Tensor] = {}
    head: dict[str, Tensor] = {}
    for name, value in contents.items():
        plain = strip_wrappers(str(name))
        if not isinstance(value, Tensor):
            others.append(f"{name} (not a tensor)")
        elif plain.startswith("__L__."):
            head[plain.removeprefix("__L__.")] = value
        else:
            network[plain.removeprefix("__S__.")] = value
    return network, head, others


def describe(contents: Mapping[str, Any]) -> NetworkDescription:
    """The network of a checkpoint that `is_ours_to_read`, as far as its tensors determine it.

    The pooling is empty if they do not (VGGVox without attention); the mel bands are 0 without a
    filterbank.
    """
    network, _, _ = split_parts(contents)
    model = recognize(network)
    assert model is not None, "the checkpoint is from voxceleb_trainer"
    embedding_dim, pooled = first_shape(network, "fc6.weight", "fc.weight")
    num_mels = 0
    for name, value in network.items():
        if name.endswith(".mel_scale.fb"):
            num_mels = value.shape[1]
    if model == "VGGVox":
        pooling = "SAP" if "sap_linear.weight" in network else ""
        # The network is not defined for other numbers.
        num_mels = 40
    elif model == "RawNet3":
        pooling = "ASP" if first_shape(network, "attention.3.weight")[0] == 1 else "ECA"
    else:
        # The file does not name its pooling, but the width of the next layer shows it: ASP doubles
        # the channels with deviations.
        channels = first_shape(network, "sap_linear.weight", "attention.3.weight")[0]
        pooling = "ASP" if pooled == 2 * channels else "SAP"
    return NetworkDescription(model, RULES[model], embedding_dim, num_mels, pooling)


def translate(contents: Mapping[str, Any], net: SpeakerNet, path: str | Path) -> TranslatedWeights:
    """The checkpoint's weights in the names of `net`."""
    network, head, others = split_parts(contents)
    model = recognize(network)
    if model != net.model_name:
        raise CheckpointError(
            f"{path} has the network {model} of {SOURCE}, but the configuration has "
            f"{net.model_name}; set model.name: {model}"
        )
    # Constants are compared instead of loaded: a filterbank that differs from ours means that the
    # features differ, which would spoil all scores without an error.
    weights: dict[str, Tensor] = {}
    for name, value in network.items():
        suffix = next(filter(name.endswith, CONSTANTS), None)
        renamed = rename(name, RULES[model])
        if suffix is not None:
            _check_constant(name, value, CONSTANTS[suffix](net), path)
        elif renamed is None:
            others.append(f"{name} {tuple(value.shape)} (no such parameter in {model})")
        else:
            weights[renamed] = value
    if "W" in head:
        # Their AM-softmax stores its head as (dim, classes).
        head["W"] = head["W"].T.contiguous()
    head = {HEAD_NAMES.get(name, name): value for name, value in head.items()}
    return TranslatedWeights(SOURCE, weights, head, others)


def _check_constant(name: str, theirs: Tensor, ours: Tensor, path: str | Path) -> None:
    if (
        theirs.shape != ours.shape
        or float((theirs.float() - ours.cpu().float()).abs().max()) > CONSTANT_TOLERANCE
    ):
        raise ValueError(
            f"{path}: the constant {name} of shape {tuple(theirs.shape)} differs from this front "
            f"end's of shape {tuple(ours.shape)}; set n_mels, window, pre-emphasis and sample rate "
            "as in its training"
        )
