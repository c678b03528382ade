"""Rename the weights of other toolkits, and read the sizes of their networks from them."""

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
class TranslatedWeights:
    """The weights of a foreign checkpoint under our names."""

    source: str
    weights: dict[str, Tensor]
    head_weights: dict[str, Tensor]
    not_loaded: list[str]


@dataclass(frozen=True)
class NetworkDescription:
    """What the names and shapes of a checkpoint determine about our network."""

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


Describe = Callable[[Weights], NetworkDescription]
"""Describes the network of a state dictionary; raises an error for a different architecture."""


def rules_of(lines: str, prefix: str = "") -> Rules:
    r'''Rules from lines of a foreign name and ours; foreign names are regular expressions in which
    only a dot has no special meaning.

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
        *first_word, pattern, replacement = line.split()
        if first_word == ["in"]:
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
    weights: Weights, rules: Rules, unused: Mapping[str, str], ours: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    """Rename weights; returns them, and a list of those whose name matches a pattern in `unused`,
    each with the reason.

    Weights get the shapes of our network's tensors, `ours`: a foreign 1 x 1 convolution may be a
    linear layer here, or vice versa.
    """
    renamed: dict[str, Tensor] = {}
    not_loaded: list[str] = []
    for name, value in weights.items():
        reasons = [reason for pattern, reason in unused.items() if re.search(pattern, name)]
        if reasons:
            not_loaded.append(f"{name} ({reasons[0]})")
            continue
        # A tensor without a rule keeps its name, so that the comparison with the network can name
        # it as unknown.
        new_name = rename(name, rules) or name
        if new_name in renamed:
            raise ValueError(f"{name} and another tensor both become {new_name}")
        if new_name in ours:
            shape = tuple(ours[new_name].shape)
            if (*shape, 1) == tuple(value.shape) or shape == (*value.shape, 1):
                value = value.view(shape)  # (outputs, inputs) or (outputs, inputs, 1)
        renamed[new_name] = value
    return renamed, not_loaded


def first_shape(weights: Weights, *names: str) -> tuple[int, ...]:
    """The shape of the first of these tensors that exists."""
    for name in names:
        if name in weights:
            return tuple(weights[name].shape)
    raise ValueError(f"the checkpoint has none of the tensors {', '.join(names)}")


def embedding_dim_of(weights: Weights, layer: str) -> int:
    """The number of outputs of a layer, the network's last."""
    return first_shape(weights, f"{layer}.weight")[0]


def find_state_dict(contents: Mapping[str, Any], path: str | Path) -> dict[str, Tensor]:
    """The state dictionary in a checkpoint, without wrapper prefixes."""
    # Trainers keep the weights in an entry of one of these names, next to optimizer and schedule.
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
