"""What last.pt holds, declared in one place: the state of every part of a run, to a dictionary and back."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

from speakernet.seeding import capture_random_state, restore_random_state
from speakernet.training.checkpoint import CheckpointError, describe
from speakernet.training.state import TrainingState


class HasState(Protocol):
    """A part with state of its own."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Take up where `state_dict` was taken."""


def training_contents(
    state: TrainingState, modules: Mapping[str, nn.Module], parts: Mapping[str, HasState], loader: HasState
) -> dict[str, Any]:
    """The `training` entry of last.pt: tensors and plain values only."""
    return {
        "state": state.to_dict(),
        **{name: module.state_dict() for name, module in modules.items()},
        **{name: part.state_dict() for name, part in parts.items()},
        "loader": loader.state_dict(),
        "random": capture_random_state(),
    }


def restore_training(
    contents: Mapping[str, Any],
    state: TrainingState,
    modules: Mapping[str, nn.Module],
    parts: Mapping[str, HasState],
    source: object,
) -> Mapping[str, Any]:
    """Give every part the state that `training_contents` took, all but the loader's; returns the saved entry.

    Raises:
        CheckpointError: no training state, or that of another model, loss, optimizer or number of speakers.
    """
    saved = contents.get("training")
    if not isinstance(saved, dict) or "state" not in saved:
        raise CheckpointError(f"{source} holds a model but no training state; use it as --initial_model instead")
    try:
        for name, module in modules.items():
            module.load_state_dict(saved[name])
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{source} is of another model, loss, optimizer or number of speakers ({describe(error)}); "
            "choose another --save_path, or remove the folder to start anew"
        ) from error
    state.load_dict(saved["state"])
    restore_random_state(saved["random"])
    return saved
