"""Whether a file that is to be scored says itself whose defaults hold, for commands with a configuration."""

from pathlib import Path


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
