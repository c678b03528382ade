"""Which trials choose something of a training run, and what its model file says of them."""

from typing import Any

from speakernet.assembly.inputs import Inputs
from speakernet.config.schema import Config
from speakernet.evaluation.calibrating import known_by


def chosen_by_validation(config: Config) -> bool:
    """Whether anything of a training run is decided by its validation trials."""
    return config.training.final_model == "best" or config.schedule.name == "plateau"


def chooser_of(config: Config, inputs: Inputs) -> dict[str, Any] | None:
    """Name and checksum of the list that chooses the model, as its file keeps them; None where nothing is chosen."""
    trials = inputs.validation.trials
    return known_by(trials) if chosen_by_validation(config) else None


def validates_on_test_list(config: Config) -> bool:
    """Whether the validation trials are those that are reported."""
    return config.data.validation_list == config.data.test_list
