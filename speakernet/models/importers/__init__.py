"""Imports checkpoints of other toolkits; one file per toolkit describes their contents and renames
their weights.
"""

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from speakernet.checkpoint import CheckpointError
from speakernet.models.importers import (
    but,
    redimnet,
    speechbrain,
    three_d_speaker,
    voxceleb_trainer,
    wespeaker,
)
from speakernet.models.importers.weights import (
    Describe,
    NetworkDescription,
    TranslatedWeights,
    Weights,
    find_state_dict,
    rename_all,
)
from speakernet.models.options import MODELS
from speakernet.models.speaker_net import SpeakerNet, check_finite, check_fits
from speakernet.options import suggestion

PUBLISHED: dict[str, ModuleType] = {
    format.SOURCE: format for format in (wespeaker, three_d_speaker, speechbrain, redimnet, but)
}
"""The modules of the toolkits by `SOURCE`.

Each has FRONT_END, the name and options of its models' front end unless a file determines it;
UNUSED, patterns of tensors that do not belong to the network, each with the reason; and
`models(contents)`, a function for each of the toolkit's models, by its name there, that describes
the network in a file.
"""
TOOLKITS = (voxceleb_trainer.SOURCE, *PUBLISHED)
# Errors from reading sizes from a file whose tensors or options are not those of the model.
MISFITS = (ValueError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError)


def translate(contents: Any, net: SpeakerNet, path: str | Path) -> TranslatedWeights:
    """A checkpoint's weights under the names of `net`; only voxceleb_trainer's can be used without
    importing them.
    """
    if voxceleb_trainer.is_ours_to_read(contents):
        return voxceleb_trainer.translate(contents, net, path)
    raise unknown_file(contents, path)


def unknown_file(contents: Any, path: str | Path) -> CheckpointError:
    """The error for a file that is neither ours nor voxceleb_trainer's; it says how to import the
    file, if possible.
    """
    message = (
        f"{path} is neither a speakernet model file nor a checkpoint of {voxceleb_trainer.SOURCE}"
    )
    commands = []
    if isinstance(contents, Mapping):
        file = shlex.quote(str(path))
        for options in find_fitting(contents, path):
            commands.append(f"`speakernet import-weights {file} {options} --out model.pt`")
    if not commands:
        return CheckpointError(
            f"{message}; import files of {', '.join(PUBLISHED)} with `speakernet import-weights`"
        )
    message += f"; convert it with {' or '.join(commands)}"
    if len(commands) > 1:
        message += (
            ". Give the toolkit that trained it: their front ends differ, and the wrong one "
            "silently spoils all scores"
        )
    return CheckpointError(message)


def import_network(
    format: ModuleType, name: str, contents: Mapping[str, Any], path: str | Path
) -> tuple[SpeakerNet, list[str]]:
    """The network of a published checkpoint, in evaluation mode, and the unused tensors of the
    checkpoint.

    The file determines the network; `name`, the toolkit's or ours, must match it.
    """
    # A foreign file says nothing about its network, but the shapes of its tensors do: `_describe`
    # reads sizes from them, `_fit` renames all tensors and compares them with a network of these
    # sizes that takes no memory, and only then the network is built. So a wrong guess is noticed
    # before anything is loaded, and no part of a file is dropped in silence.
    weights = find_state_dict(contents, path)
    check_finite(weights, path)
    try:
        description = _describe(format, format.models(contents), name, weights)
        renamed, unused = _fit(format, description, weights, path)
        net = _build(format, description)
    except CheckpointError:
        raise
    except MISFITS as error:
        reason = "its tensors do not have the sizes of this model"
        if isinstance(error, ValueError):
            reason = str(error)
        raise CheckpointError(f"{path} is not {name} of {format.SOURCE}: {reason}") from error
    # Foreign files do not contain our front end's state.
    net.load_state_dict(net.state_dict() | renamed)
    return net.eval(), unused


def _describe(
    format: ModuleType, models: Mapping[str, Describe], name: str, weights: Weights
) -> NetworkDescription:
    if name in models:
        return models[name](weights)
    if name not in MODELS:
        raise CheckpointError(
            f"unknown {format.SOURCE} model {name!r}; {suggestion(name, {**models, **MODELS})}"
        )
    # One of our names: several of the toolkit's models may become it, so the shapes decide.
    for describe in models.values():
        try:
            description = describe(weights)
        except MISFITS:
            continue
        if description.model == name:
            return description
    raise ValueError(f"no model of {format.SOURCE} with these tensors is {name}")


def _build(format: ModuleType, description: NetworkDescription) -> SpeakerNet:
    options = dict(format.FRONT_END if description.front_end is None else description.front_end)
    front_end = options.pop("name")
    if description.num_mels:
        options["num_mels"] = description.num_mels
    return SpeakerNet.named(
        description.model,
        description.pooling,
        description.embedding_dim,
        description.options,
        front_end,
        options,
        pooling_options=description.pooling_options,
    )


def _fit(
    format: ModuleType, description: NetworkDescription, weights: Weights, path: str | Path
) -> tuple[dict[str, Any], list[str]]:
    """The weights under our names, and the unused ones; the comparison allocates no memory for a
    network.
    """
    # Any front end works for comparing tensors; this one can be built without memory.
    front_end = {"name": "fbank" if description.num_mels else "raw"}
    with torch.device("meta"):
        net = _build(format, dataclasses.replace(description, front_end=front_end))
    ours = net.state_dict()
    for name in list(ours):
        # Foreign files contain no state of the front end, nor of a backbone's filterbank.
        if name.startswith(("front_end.", "trunk.fbank.")):
            del ours[name]
    renamed, unused = rename_all(weights, description.rules, format.UNUSED, ours)
    check_fits(renamed, ours, path)
    return renamed, unused


def find_fitting(contents: Mapping[str, Any], path: str | Path) -> Iterator[str]:
    """Options of `import-weights` for each toolkit's first model whose tensors match the file."""
    for source, format in PUBLISHED.items():
        try:
            weights = find_state_dict(contents, path)
            models = format.models(contents)
        except MISFITS:
            continue
        # Trying is cheap: nothing is allocated, and most models are refused at their first shape.
        for name, describe in models.items():
            try:
                _fit(format, describe(weights), weights, path)
            except MISFITS:
                continue
            yield f"--from {source} --model {name}"
            break


__all__ = [
    "PUBLISHED",
    "TOOLKITS",
    "TranslatedWeights",
    "find_fitting",
    "import_network",
    "translate",
    "unknown_file",
]
