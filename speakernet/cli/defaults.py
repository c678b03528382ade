"""The configuration of a command, with what model files say themselves: whose defaults hold, which network it is."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speakernet.config import LoadedConfig, load_config


def load_configuration(arguments: Sequence[str]) -> LoadedConfig:
    """The configuration that files and command line mean; model files that they name are asked what they are.

    Raises:
        ConfigError: see `load_config`.
        ValueError: a model file that is damaged or unsafe.
    """
    return load_config(arguments, is_classic_checkpoint, settings_of_model)


def is_classic_checkpoint(path: Path) -> bool:
    """Whether a file that is there is a checkpoint of voxceleb_trainer; reading it runs no code from it.

    Raises:
        ValueError: damaged or unsafe.
    """
    if not path.is_file():
        return False
    # Late: only a command that scores a model without a configuration has to import torch before its options are read.
    from speakernet.checkpoint import read_checkpoint
    from speakernet.models.importers import voxceleb_trainer

    return voxceleb_trainer.is_ours_to_read(read_checkpoint(path))


def settings_of_model(path: Path) -> Mapping[str, Any]:
    """What a model file that is there says of its network, as dotted keys of the configuration and values.

    Raises:
        ValueError: damaged or unsafe.
    """
    if not path.is_file():
        return {}
    # Late: only a run that starts from a model has to import torch before its options are read.
    from speakernet.assembly.initial_model import settings_of_file

    return settings_of_file(path)
