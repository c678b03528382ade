"""What a resumed run must have in common with the one that wrote its checkpoint, and what it is told otherwise."""

import logging
from collections.abc import Mapping
from typing import Any

from speakernet.checkpoint import CheckpointError

logger = logging.getLogger(__name__)


def check_continuity(saved: Mapping[str, Any], now: Mapping[str, Any], source: object) -> None:
    """Refuse other speakers; name everything else that is not as it was. What one side does not know is not compared.

    Args:
        saved: the checkpoint's `config` (nested options), `speakers` and `training_list` (checksums).
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
    # What the user asks for now holds (see OptimizerState too), so a change is told and not refused.
    changes = _changed_options(saved.get("config", {}), now.get("config", {}))
    if _differs("training_list", saved, now):
        changes.append("the training list holds other utterances, or the same in another order")
    if changes:
        logger.warning("going on otherwise than %s was trained: %s", source, "; ".join(changes))


def _differs(name: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return name in saved and name in now and saved[name] != now[name]


def _changed_options(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{section}.{name} {value!r} (was {saved[section][name]!r})"
        for section, options in now.items()
        for name, value in options.items()
        if name in saved.get(section, {}) and saved[section][name] != value
    ]
