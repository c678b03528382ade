"""What the importers share: names by rules, what a checkpoint shows of itself, and the check that it fits."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

# Pattern of a foreign name and what it is here; tried in order.
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
    """What a checkpoint is here: everything of our network that its names and shapes say."""

    model: str
    rules: tuple[Rule, ...]
    embedding_dim: int
    num_mels: int
    pooling: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    pooling_options: Mapping[str, Any] = field(default_factory=dict)
    front_end: Mapping[str, Any] | None = None
    """Name and options of what it hears through; None for its toolkit's."""


Describe = Callable[[Weights], Described]
"""From a state dictionary to what it is; raises ValueError where it is of another architecture."""


def rename(name: str, rules: Iterable[Rule]) -> str | None:
    r"""Our name of a foreign parameter, None where no rule knows it.

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
    weights: Weights, rules: Iterable[Rule], unused: Mapping[str, str], shapes: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    """A state dictionary in our names, and what is known not to be needed of it.

    Args:
        weights: foreign names to tensors.
        rules: how they become ours.
        unused: pattern of a name that is known not to be needed, to the reason.
        shapes: our own tensors; a foreign 1 x 1 convolution may be a linear layer here.

    Returns:
        Weights in our names (those no rule knows under their own), and the unused ones with their reasons.

    Raises:
        ValueError: two of them have one name here.
    """
    rules = tuple(rules)
    renamed: dict[str, Tensor] = {}
    left: list[str] = []
    for name, value in weights.items():
        reason = next((reason for pattern, reason in unused.items() if re.search(pattern, name)), None)
        if reason is not None:
            left.append(f"{name} ({reason})")
            continue
        ours = rename(name, rules) or name
        if ours in renamed:
            raise ValueError(f"two tensors are {ours} here, {name} among them")
        if ours in shapes and (*shapes[ours].shape, 1) == tuple(value.shape):
            value = value.squeeze(-1)
        renamed[ours] = value
    return renamed, left


def first_shape(weights: Weights, *names: str) -> tuple[int, ...]:
    """The shape of the first of these tensors that is there.

    Raises:
        ValueError: none of them is.
    """
    for name in names:
        if name in weights:
            return tuple(weights[name].shape)
    raise ValueError(f"the checkpoint has none of the tensors {', '.join(names)}")


def last_dim(weights: Weights, *names: str) -> int:
    """The embedding's size: rows of the first of these layers that is there."""
    return first_shape(weights, *(f"{name}.weight" for name in names))[0]


def bare(contents: Mapping[str, Any], path: str | Path) -> dict[str, Tensor]:
    """A state dictionary without wrapper prefixes.

    Raises:
        ValueError: something else than tensors by name.
    """
    for key in ("state_dict", "model_state_dict", "model", "embedding_model"):
        if isinstance(contents.get(key), Mapping):
            contents = contents[key]
    found = {str(name): value for name, value in contents.items() if isinstance(value, Tensor)}
    if not found:
        raise ValueError(f"{path} holds no tensors by name; give a state dictionary")
    return {name.removeprefix("module.").replace("_orig_mod.", ""): value for name, value in found.items()}
