"""Renames state dictionaries of other toolkits and reads sizes from them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from speakernet.checkpoint import CheckpointError
from speakernet.models.speaker_net import strip_wrappers

# Patterns of foreign names and their replacements. The first rule that matches wins, so a special
# case stands before the general one. `<\1-1>` in a replacement is computed.
Rules = tuple[tuple[str, str], ...]
Weights = Mapping[str, Tensor]


@dataclass
class Translated:
    """A foreign checkpoint under our names."""

    source: str
    weights: dict[str, Tensor]
    head_weights: dict[str, Tensor] = field(default_factory=dict)
    not_loaded: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Described:
    """Everything that the names and shapes of a checkpoint determine about our network."""

    model: str
    rules: Rules
    embedding_dim: int
    num_mels: int
    """0 if the input is samples."""
    pooling: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    pooling_options: Mapping[str, Any] = field(default_factory=dict)
    front_end: Mapping[str, Any] | None = None
    """Name and options; None for the toolkit's default."""


Describe = Callable[[Weights], Described]
"""Describes a state dictionary; raises an error if it has a different architecture."""


def rules_of(lines: str, prefix: str = "") -> Rules:
    r'''Rules from lines of a foreign name and ours; foreign names are patterns in which a dot is a
    dot.

    A line that starts with `in` has the beginning of both names in the lines after it. `prefix` is
    the beginning of all foreign names.

    >>> rules_of(r"""
    ...     in layer(\d). layers.<\1-1>.
    ...     bn. norm.
    ... """, "head.")
    (('^head\\.layer(\\d)\\.bn\\.', 'layers.<\\1-1>.norm.'),)
    '''
    rules = []
    theirs = ours = ""
    for line in lines.strip().splitlines():
        *heading, pattern, replacement = line.split()
        if heading:
            theirs, ours = pattern, replacement
        else:
            pattern = (prefix + theirs + pattern).replace(".", r"\.")
            rules.append((f"^{pattern}", ours + replacement))
    return tuple(rules)


def rename(name: str, rules: Rules) -> str | None:
    r"""Our name of a foreign parameter; None if no rule matches.

    >>> rename("layer2.bn.weight", ((r"^layer(\d)\.bn\.", r"trunk.stages.<\1-1>.norm."),))
    'trunk.stages.1.norm.weight'
    """
    for pattern, replacement in rules:
        renamed, count = re.subn(pattern, replacement, name)
        if count:
            # Many toolkits count layers from one, or count additional ones; our lists start at
            # zero.
            return re.sub(r"<(\d+)([+-]\d+)>", _add, renamed)
    return None


def _add(match: re.Match[str]) -> str:
    return str(int(match[1]) + int(match[2]))


def rename_all(
    weights: Weights, rules: Rules, unused: Mapping[str, str], shapes: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    """Weights under our names (under their own if no rule matches), and those matching `unused`,
    with the reason.

    `shapes` has our tensors: a foreign 1 x 1 convolution may be a linear layer here, or vice versa.
    """
    renamed: dict[str, Tensor] = {}
    left: list[str] = []
    for name, value in weights.items():
        reason = next(
            (reason for pattern, reason in unused.items() if re.search(pattern, name)), None
        )
        if reason is not None:
            left.append(f"{name} ({reason})")
            continue
        # A tensor without a rule keeps its name, so that the comparison with the network can name
        # it as unknown.
        ours = rename(name, rules) or name
        if ours in renamed:
            raise ValueError(f"{name} and another tensor both become {ours}")
        if ours in shapes:
            shape = tuple(shapes[ours].shape)
            if (*shape, 1) == tuple(value.shape) or shape == (*value.shape, 1):
                value = value.view(shape)  # (outputs, inputs) or (outputs, inputs, 1)
        renamed[ours] = value
    return renamed, left


def first_shape(weights: Weights, *names: str) -> tuple[int, ...]:
    """The shape of the first of these tensors that exists."""
    for name in names:
        if name in weights:
            return tuple(weights[name].shape)
    raise ValueError(f"the checkpoint has none of the tensors {', '.join(names)}")


def last_dim(weights: Weights, *names: str) -> int:
    """The embedding size: the rows of the first of these layers that exists."""
    return first_shape(weights, *(f"{name}.weight" for name in names))[0]


def bare(contents: Mapping[str, Any], path: str | Path) -> dict[str, Tensor]:
    """The state dictionary of a checkpoint, without wrapper prefixes."""
    # Trainers wrap the weights in entries of these names, next to optimizer and schedule.
    for key in ("state_dict", "model_state_dict", "model", "embedding_model"):
        if isinstance(contents.get(key), Mapping):
            contents = contents[key]
    weights = {}
    for name, value in contents.items():
        if isinstance(value, Tensor):
            weights[strip_wrappers(str(name))] = value
    if not weights:
        raise CheckpointError(f"{path} has no named tensors; expected a state dictionary")
    return weights
