"""State dictionaries of other programs in our names, and the check that weights are those of a network."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from speakernet.checkpoint import CheckpointError
from speakernet.models.speaker_net import strip_wrappers

# Pattern of a foreign name and its replacement; tried in order.
Rule = tuple[str, str]
Weights = Mapping[str, Tensor]


@dataclass
class Translated:
    """A foreign checkpoint in our names."""

    source: str
    weights: dict[str, Tensor]
    head_weights: dict[str, Tensor] = field(default_factory=dict)
    not_loaded: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Described:
    """Everything of our network that the names and shapes of a checkpoint determine."""

    model: str
    rules: tuple[Rule, ...]
    embedding_dim: int
    num_mels: int
    """0 if it takes samples."""
    pooling: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    pooling_options: Mapping[str, Any] = field(default_factory=dict)
    front_end: Mapping[str, Any] | None = None
    """Name and options; None for those of its toolkit."""


Describe = Callable[[Weights], Described]
"""Describes a state dictionary; raises an error for one of another architecture."""


def rename(name: str, rules: Iterable[Rule]) -> str | None:
    r"""Our name of a foreign parameter, None if no rule matches.

    >>> rename("layer2.bn.weight", [(r"^layer(\d)\.bn\.", r"trunk.stages.<\1-1>.norm.")])
    'trunk.stages.1.norm.weight'
    """
    for pattern, replacement in rules:
        renamed, count = re.subn(pattern, replacement, name)
        if count:
            # Many count their layers from one, or count more of them; our lists start from zero.
            return re.sub(r"<(\d+)-(\d+)>", lambda match: str(int(match.group(1)) - int(match.group(2))), renamed)
    return None


def rename_all(
    weights: Weights, rules: Sequence[Rule], unused: Mapping[str, str], shapes: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    """Weights in our names (the others under their own), and those that `unused` names, each with the reason.

    `shapes` are our own tensors: a foreign 1 x 1 convolution may be a linear layer here, or the other way round.
    """
    renamed: dict[str, Tensor] = {}
    left: list[str] = []
    for name, value in weights.items():
        reason = next((reason for pattern, reason in unused.items() if re.search(pattern, name)), None)
        if reason is not None:
            left.append(f"{name} ({reason})")
            continue
        ours = rename(name, rules) or name
        if ours in renamed:
            raise ValueError(f"{name} and another tensor are both {ours} here")
        own = tuple(shapes[ours].shape) if ours in shapes else None
        if own is not None and ((*own, 1) == tuple(value.shape) or own == (*value.shape, 1)):
            value = value.view(own)
        renamed[ours] = value
    return renamed, left


def first_shape(weights: Weights, *names: str) -> tuple[int, ...]:
    """The shape of the first of these tensors that exists."""
    for name in names:
        if name in weights:
            return tuple(weights[name].shape)
    raise ValueError(f"the checkpoint has none of the tensors {', '.join(names)}")


def last_dim(weights: Weights, *names: str) -> int:
    """The embedding's size: rows of the first of these layers that exists."""
    return first_shape(weights, *(f"{name}.weight" for name in names))[0]


def bare(contents: Mapping[str, Any], path: str | Path) -> dict[str, Tensor]:
    """The state dictionary of a checkpoint, without wrapper prefixes."""
    for key in ("state_dict", "model_state_dict", "model", "embedding_model"):
        if isinstance(contents.get(key), Mapping):
            contents = contents[key]
    found = {strip_wrappers(str(name)): value for name, value in contents.items() if isinstance(value, Tensor)}
    if not found:
        raise CheckpointError(f"{path} holds no tensors by name; give a state dictionary")
    return found
