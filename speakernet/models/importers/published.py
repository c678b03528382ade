"""Networks out of other toolkits' checkpoints: what the file says of itself decides, its name is checked against it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from speakernet.checkpoint import CheckpointError
from speakernet.models.importers.renaming import Describe, Described, Weights, bare, rename_all
from speakernet.models.model_file import check_finite, check_fits
from speakernet.models.speaker_net import SpeakerNet
from speakernet.registry import lookup


class Format(Protocol):
    """What a module of this room says of its toolkit."""

    SOURCE: str
    FRONT_END: dict[str, Any]
    """Name and options of the front end that its models hear through; empty where this version has none like it."""
    UNUSED: dict[str, str]
    """Patterns of tensors that are not of the network, each with the reason."""

    def models(self, contents: Mapping[str, Any]) -> dict[str, Describe]:
        """How each of the toolkit's models is read out of a file, by the toolkit's name."""


@dataclass(frozen=True)
class Imported:
    """A network with a checkpoint's weights, and what of the checkpoint was not needed."""

    net: SpeakerNet
    not_loaded: list[str]
    has_front_end: bool
    """Whether the network hears as it was trained; else it is for features alone."""


def import_network(format: Format, name: str, contents: Mapping[str, Any], path: str | Path) -> Imported:
    """The network of another toolkit's checkpoint, in evaluation mode.

    Args:
        format: the importer of the toolkit.
        name: the toolkit's name of the model, or ours.
        contents: what the file holds.
        path: the file, for messages.

    Raises:
        ValueError: an unknown name, or weights of another model; the message says which one they look like.
    """
    weights = bare(contents, path)
    check_finite(weights, path)
    models = format.models(contents)
    known = {**_by_our_names(models, weights), **models}
    lookup(known, name, f"{format.SOURCE} model")
    try:
        described = known[name](weights)
        net = _network(format, described)
        renamed, left = _fitted(format, described, weights, net, path)
    except ValueError as error:
        raise CheckpointError(
            f"{path} is no {name} of {format.SOURCE}{_likeness(format, models, weights, path)}: {error}"
        ) from error
    net.load_state_dict(renamed)
    return Imported(net.eval(), left, bool(_front_end(format, described)))


def _front_end(format: Format, described: Described) -> dict[str, Any]:
    return dict(format.FRONT_END if described.front_end is None else described.front_end)


def _network(format: Format, described: Described) -> SpeakerNet:
    options = _front_end(format, described)
    front_end = options.pop("name", "auto")
    return SpeakerNet.named(
        described.model,
        described.pooling,
        described.embedding_dim,
        described.options,
        front_end,
        {**options, "num_mels": described.num_mels},
        pooling_options=described.pooling_options,
    )


def _fitted(
    format: Format, described: Described, weights: Weights, net: SpeakerNet, path: str | Path
) -> tuple[dict[str, Any], list[str]]:
    """The weights in our names, and what was not needed.

    Raises:
        CheckpointError: they are not exactly those of the network.
    """
    ours = net.state_dict()
    renamed, left = rename_all(weights, described.rules, format.UNUSED, ours)
    # The front end's own state (how often it has drawn noise) is no weight and in no foreign file.
    complete = {name: value for name, value in ours.items() if name.startswith("front_end.")} | renamed
    check_fits(complete, ours, path)
    return complete, left


def _by_our_names(models: Mapping[str, Describe], weights: Weights) -> dict[str, Describe]:
    """The format's models under the names they have here, as far as the file can be one."""
    found: dict[str, Describe] = {}
    for describe in models.values():
        try:
            found.setdefault(describe(weights).model, describe)
        except ValueError:
            continue
    return found


def _likeness(format: Format, models: Mapping[str, Describe], weights: Weights, path: str | Path) -> str:
    """The models of the format that the weights fit, in words; nothing where they fit none."""
    fitting = []
    for name, describe in models.items():
        try:
            described = describe(weights)
            with torch.device("meta"):
                net = _network(format, described)
            _fitted(format, described, weights, net, path)
        except (ValueError, ZeroDivisionError):
            continue
        fitting.append(name)
    return f" but looks like {' or '.join(fitting)}" if fitting else ""
