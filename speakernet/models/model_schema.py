"""What a model file may say, checked before anything is built from it.

A file is data from outside. Its entries are compared with their types here; the network that it describes is laid out
without memory and its parameters counted against the weights in the file, so that a claim costs nothing.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from speakernet.checkpoint import CheckpointError

LOWEST_RATE, HIGHEST_RATE = 1_000, 768_000
"""Hz, as the option `data.sample_rate` has them."""
MOST_VALUES = 1_000_000
"""Plain values in all entries beside the weights; a file has some hundred."""
LAID_OUT_AT_MOST = 2
"""Times the numbers in the file, and as many parameters: some are registered once more under another name."""


def check_entries(contents: Mapping[str, Any], path: str | Path) -> None:
    """Refuse entries that are missing or of another kind than the format has.

    Raises:
        CheckpointError: naming the entry, what it is and what is expected.
    """
    for name, (is_right, expected, is_needed) in ENTRIES.items():
        value = contents.get(name)
        if (value is None and is_needed) or (value is not None and not is_right(value)):
            found = "missing" if name not in contents else _in_short(value)
            raise CheckpointError(f"{path}: {name} is {found}; expected {expected}: {ADVICE}")


def check_mean(mean: Tensor | None, embedding_dim: int, path: str | Path) -> None:
    """Refuse a mean embedding that is none of this network.

    Raises:
        CheckpointError: another length, or NaN.
    """
    if mean is not None and (tuple(mean.shape) != (embedding_dim,) or not bool(torch.isfinite(mean).all())):
        found = f"of shape {tuple(mean.shape)}" if tuple(mean.shape) != (embedding_dim,) else "with NaN or infinity"
        raise CheckpointError(f"{path}: embedding_mean is {found}; expected {embedding_dim} finite numbers: {ADVICE}")


@contextlib.contextmanager
def laid_out(weights: Mapping[str, Tensor], path: str | Path) -> Iterator[None]:
    """Inside the block networks are made without memory, and no larger than the weights of a file.

    Raises:
        CheckpointError: as soon as more parameters were registered than the file can fill.
    """
    most_parameters = LAID_OUT_AT_MOST * len(weights)
    most_numbers = LAID_OUT_AT_MOST * sum(value.numel() for value in weights.values())
    parameters = numbers = 0

    def count(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        nonlocal parameters, numbers
        parameters += parameter is not None
        numbers += 0 if parameter is None else parameter.numel()
        if parameters > most_parameters or numbers > most_numbers:
            raise CheckpointError(
                f"{path} describes a network of more than {numbers:,} numbers in {parameters:,} parameters, but holds "
                f"{most_numbers // LAID_OUT_AT_MOST:,} in {len(weights):,}: {ADVICE}"
            )

    hook = register_module_parameter_registration_hook(count)
    try:
        with torch.device("meta"):
            yield
    finally:
        hook.remove()


ADVICE = (
    "the file is damaged or another program wrote it; copy or download it again, or take an earlier one from the "
    "checkpoints/ of its run"
)


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and _is_plain_dict(value.get("options"))


def _is_model(value: Any) -> bool:
    return _is_part(value) and {"pooling", "embedding_dim"} <= value["options"].keys()


def _is_rate(value: Any) -> bool:
    return type(value) is int and LOWEST_RATE <= value <= HIGHEST_RATE


def _is_weights(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(one, Tensor) and not one.is_complex() for name, one in value.items()
    )


def _is_mean(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 1


def _is_plain_dict(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value) and _is_plain(value)


def _is_plain(value: Any) -> bool:
    """Whether there are only plain values below, and not so many that to look at them takes for ever."""
    waiting, left = [value], MOST_VALUES
    while waiting and left:
        one, left = waiting.pop(), left - 1
        if isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            waiting += one
        elif one is not None and not isinstance(one, bool | int | float | str):
            return False
    return not waiting


def _is_summary(value: Any) -> bool:
    return _is_plain_dict(value) and isinstance(value.get("chosen_by") or {}, dict)


def _is_calibration(value: Any) -> bool:
    return (
        _is_plain_dict(value) and isinstance(value.get("fits", []), list) and all(map(_is_fit, value.get("fits", [])))
    )


def _is_fit(value: Any) -> bool:
    if not isinstance(value, dict) or not {"inputs", "weights", "offset", "prior", "backend"} <= value.keys():
        return False
    inputs, weights = value["inputs"], value["weights"]
    if not isinstance(inputs, list | tuple) or not isinstance(weights, list | tuple):
        return False
    numbers = [*weights, value["offset"], value["prior"]]
    # Files of before do not say on how many pairs a fit rests.
    if not all(_is_count(value.get(name, 0)) for name in ("num_targets", "num_nontargets")):
        return False
    return len(inputs) == len(weights) > 0 and all(map(_is_finite, numbers)) and isinstance(value["backend"], dict)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_thresholds(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        _is_plain_dict(one)
        and isinstance(one.get("name"), str)
        and _is_number(one.get("threshold"))
        and isinstance(one.get("backend"), dict)
        for one in value
    )


def _is_finite(value: Any) -> bool:
    return _is_number(value) and abs(value) < math.inf


def _is_number(value: Any) -> bool:
    # A threshold that nothing reaches is infinite; NaN is none.
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _in_short(value: Any) -> str:
    # Not what it holds: that may be as large as the file.
    plain = isinstance(value, bool | int | float | str) or value is None
    return repr(value)[:60] if plain else f"a {type(value).__name__} of another content"


ENTRIES: dict[str, tuple[Callable[[Any], bool], str, bool]] = {
    "model": (_is_model, "name and options of a network, with pooling and embedding_dim", True),
    "front_end": (_is_part, "name and options of a front end", True),
    "sample_rate": (_is_rate, f"a whole number from {LOWEST_RATE} to {HIGHEST_RATE}", True),
    "weights": (_is_weights, "tensors by their names", True),
    "loss_normalizes": (lambda value: isinstance(value, bool), "true or false", True),
    "embedding_mean": (_is_mean, "a vector or nothing", False),
    "embedding_mean_of": (_is_plain_dict, "plain values by their names or nothing", False),
    "calibration": (
        _is_calibration,
        "fits of inputs, as many finite weights, offset, prior and backend, or nothing",
        False,
    ),
    "thresholds": (_are_thresholds, "a list of names with thresholds and their backends", False),
    "training_summary": (_is_summary, "plain values by their names or nothing", False),
}
"""Entry -> whether a value is right, what is expected in words, whether it has to be there."""
