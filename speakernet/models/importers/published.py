"""Networks out of other toolkits' checkpoints: what the file says of itself decides, its name is checked against it."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from speakernet.checkpoint import CheckpointError
from speakernet.files import error_line
from speakernet.models.importers import PUBLISHED, voxceleb_trainer
from speakernet.models.importers.renaming import Describe, Described, Weights, bare, rename_all
from speakernet.models.model_file import check_finite, check_fits
from speakernet.models.options import MODELS
from speakernet.models.speaker_net import SpeakerNet
from speakernet.options import UnknownNameError, suggestion


class Format(Protocol):
    """What a module of this room says of its toolkit."""

    SOURCE: str
    FRONT_END: dict[str, Any]
    """Name and options of the front end that its models hear through, where a file does not say another."""
    UNUSED: dict[str, str]
    """Patterns of tensors that are not of the network, each with the reason."""

    def models(self, contents: Mapping[str, Any]) -> dict[str, Describe]:
        """How each of the toolkit's models is read out of a file, by the toolkit's name.

        Raises:
            ValueError: the file lacks what the toolkit's files hold beside their tensors.
        """


@dataclass(frozen=True)
class Imported:
    """A network with a checkpoint's weights, and what of the checkpoint was not needed."""

    net: SpeakerNet
    not_loaded: list[str]


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
    try:
        with _as_value_errors():
            described = _described(format, format.models(contents), name, weights)
            renamed, left = _fitted(format, described, weights, path)
            net = _network(format, described)
    except UnknownNameError:
        raise
    except ValueError as error:
        # A file of another toolkit is told here too: the names of its tensors say whose it is.
        raise CheckpointError(f"{path} is no {name} of {format.SOURCE}{likeness(contents, format)}: {error}") from error
    # The front end's own state (how often it has drawn noise) is no weight and in no foreign file.
    net.load_state_dict(net.state_dict() | renamed)
    return Imported(net.eval(), left)


def likeness(contents: Mapping[str, Any], asked: Format | None = None) -> str:
    """The published models that a checkpoint fits, in words that go on a sentence; nothing where it fits none.

    Args:
        contents: what the file holds.
        asked: the toolkit that was named; its models are looked for first, and alone where one fits.
    """
    found = (list(_fitting(asked, contents)) if asked else []) or fits_of_others(contents, asked)
    if found:
        return f" but looks like {' or '.join(found)}"
    found_here = voxceleb_trainer.is_ours_to_read(contents)
    return f" but looks like a checkpoint of {voxceleb_trainer.SOURCE}" if found_here else ""


def fits_of_others(contents: Mapping[str, Any], asked: Format | None) -> list[str]:
    """The models of other toolkits than the one asked for that a checkpoint fits, each with its option."""
    others = [one for one in PUBLISHED.values() if one is not asked]
    return [f"{name} (--from {format.SOURCE})" for format in others for name in _fitting(format, contents)]


def _described(format: Format, models: Mapping[str, Describe], name: str, weights: Weights) -> Described:
    """What the file is, taken to be the model of that name.

    Raises:
        UnknownNameError: neither the toolkit nor this program has a model of that name.
        ValueError: the file is another one.
    """
    if name in models:
        return models[name](weights)
    if name not in MODELS:
        raise UnknownNameError(f"unknown {format.SOURCE} model {name!r}; {suggestion(name, {**models, **MODELS})}")
    for describe in models.values():
        with contextlib.suppress(ValueError):
            described = describe(weights)
            if described.model == name:
                return described
    raise ValueError(f"no model of {format.SOURCE} with these tensors is a {name}")


def _network(format: Format, described: Described) -> SpeakerNet:
    options = dict(format.FRONT_END if described.front_end is None else described.front_end)
    front_end = options.pop("name")
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
    format: Format, described: Described, weights: Weights, path: str | Path
) -> tuple[dict[str, Any], list[str]]:
    """The weights in our names, and what was not needed; compared without taking memory for a network.

    Raises:
        CheckpointError: they are not exactly those of the network.
    """
    # Any front end does for a comparison of tensors; this one can be made without memory.
    blueprint = dataclasses.replace(described, front_end={"name": "fbank"})
    with torch.device("meta"):
        net = _network(format, blueprint)
    ours = {name: value for name, value in net.state_dict().items() if not name.startswith("front_end.")}
    renamed, left = rename_all(weights, described.rules, format.UNUSED, ours)
    check_fits(renamed, ours, path)
    return renamed, left


def _fitting(format: Format, contents: Mapping[str, Any]) -> list[str]:
    """The models of the format whose tensors are those of the file."""
    found = []
    with contextlib.suppress(ValueError), _as_value_errors():
        weights = bare(contents, "")
        for name, describe in format.models(contents).items():
            with contextlib.suppress(ValueError), _as_value_errors():
                _fitted(format, describe(weights), weights, "")
                found.append(name)
    return found


@contextlib.contextmanager
def _as_value_errors() -> Iterator[None]:
    """What reading sizes out of a file raises where it is laid out otherwise than its names promise.

    Raises:
        ValueError: saying that it is.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"its sizes or options are not laid out as those of this model ({error_line(error)})"
        ) from error
