"""What a resumed run must have in common with the one that wrote its checkpoint, and what it is told otherwise.

What one of the two does not know is not compared.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from speakernet.checkpoint import CheckpointError
from speakernet.files import error_line

logger = logging.getLogger(__name__)

TENSOR_SECTIONS = ("model", "frontend", "loss", "optimizer")
"""Sections whose options decide which tensors there are, and of which shape."""


def check_speakers(saved: Mapping[str, Any], now: Mapping[str, Any], source: object) -> None:
    """Refuse other speakers.

    Args:
        saved: the checkpoint's `speakers`, a checksum.
        now: the same of this run.
        source: the checkpoint's path, for messages.

    Raises:
        CheckpointError: the classes of the head stand for other speakers.
    """
    # Checksums of the names in their order: another list of as many speakers would fit the head, and mean others.
    if _differs("speakers", saved, now):
        raise CheckpointError(
            f"{source} was trained with other speakers, or other names of them, by which its classes are numbered: "
            "every class would stand for somebody else; take its training list, or choose another --save_path "
            "(with --initial_model to begin with these weights)"
        )


def say_changes(saved: Mapping[str, Any], now: Mapping[str, Any], source: object) -> None:
    """Name what is not as it was: what the user asks for now holds (see OptimizerState too), so it is not refused.

    Args:
        saved: the checkpoint's `config` (nested options) and `training_list` (a checksum).
        now: the same of this run.
        source: the checkpoint's path, for messages.
    """
    changes = _changed_options(saved.get("config", {}), now.get("config", {}))
    if _differs("training_list", saved, now):
        changes.append("the training list holds other utterances, or the same in another order")
    if changes:
        logger.warning("going on otherwise than %s was trained: %s", source, "; ".join(changes))


def misfit(saved: Mapping[str, Any], now: Mapping[str, Any], modules: Mapping[str, nn.Module], error: Exception) -> str:
    """Why a checkpoint's tensors do not fit this run, in the words of the options, else of the tensors.

    Args:
        saved: the checkpoint's `config`, and the tensors of the modules by their names.
        now: this run's `config`.
        modules: what is trained, by its name in the checkpoint.
        error: what loading it came to, for where neither says why.
    """
    configs = (saved.get("config", {}), now.get("config", {}))
    before, after = ({name: config.get(name, {}) for name in TENSOR_SECTIONS} for config in configs)
    changes = _changed_options(before, after)
    if not changes:
        found = {name: saved.get(name) for name in modules}
        # A damaged file may hold anything in their place.
        kept = {name: value if isinstance(value, Mapping) else {} for name, value in found.items()}
        changes = [line for name, module in modules.items() for line in _other_tensors(kept[name], module)]
    return "; ".join(changes) or error_line(error)


def _other_tensors(saved: Mapping[str, Any], module: nn.Module) -> list[str]:
    own = module.state_dict()
    return [
        *_counted("not in it", [name for name in own if name not in saved]),
        *_counted("only in it", [name for name in saved if name not in own]),
        *_counted(
            "of another shape",
            [
                f"{name} {tuple(saved[name].shape)}, expected {tuple(tensor.shape)}"
                for name, tensor in own.items()
                if name in saved and getattr(tensor, "shape", None) != getattr(saved[name], "shape", None)
            ],
        ),
    ]


def _counted(what: str, names: Sequence[str]) -> list[str]:
    return [f"{len(names)} tensors are {what} (first: {names[0]})"] if names else []


def _differs(name: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return name in saved and name in now and saved[name] != now[name]


def _changed_options(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{section}.{name} {value!r} (was {saved[section][name]!r})"
        for section, options in now.items()
        for name, value in options.items()
        if name in saved.get(section, {}) and not _is_same(saved[section][name], value)
    ]


def _is_same(before: Any, now: Any) -> bool:
    """Whether an option means what it meant: a path may be written from here or in full."""
    if isinstance(before, list | tuple) and isinstance(now, list | tuple):
        return len(before) == len(now) and all(map(_is_same, before, now))
    if isinstance(before, str) and isinstance(now, str) and before and now:
        return Path(before).absolute() == Path(now).absolute()
    return bool(before == now)
