"""The run folder: the names of everything that a run leaves in it, its lock, and moving aside what an earlier run left.

These names are a contract: users and scripts look for them. An evaluation of its own (`--eval`) leaves the files of the
second group in a folder below, and takes no lock.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from speakernet.files import free_name, hold_lock, writing

LOCK = "run.lock"

LAST = "last.pt"
"""Everything needed to go on."""
PREVIOUS = "last.previous.pt"
"""last.pt as it was before the last write; there from the second write on."""
BEST = "best.pt"
"""The model by held-out EER."""
CHECKPOINTS = "checkpoints"
"""The models of the last epochs, and their average."""
AVERAGE = "average.pt"
"""In checkpoints/: the mean of the last epochs' models, with the mean of their heads."""
CONFIG = "config.yaml"
LOG = "log.txt"
METRICS = "metrics.jsonl"
PROFILE = "profile"
SECOND_STAGE = "large_margin"
"""The run folder of the large-margin stage, inside the run's own."""
EVALUATIONS = "eval"
"""Evaluations of their own, each in a folder named for its trial list."""
EMBEDDINGS = "embeddings"
PLOTS = "plots"
"""The pictures of the report, one by one."""

RESULTS = "results.json"
SCORES = "scores.txt"
REPORT = "report.html"
EVALUATION_FILES = (RESULTS, SCORES, REPORT)
"""What every evaluation leaves."""
DECISIONS = "decisions.csv"
"""What an evaluation without error rates leaves beside them, where there is a calibration or a threshold."""


def epoch_path(folder: Path, epoch: int) -> Path:
    """The model after so many epochs."""
    return folder / CHECKPOINTS / f"epoch_{epoch:04d}.pt"


def epoch_paths(folder: Path) -> list[Path]:
    """The models of epochs that are kept, oldest first."""
    return sorted((folder / CHECKPOINTS).glob("epoch_*.pt"))


def evaluation_folder(folder: Path, trial_list: str | Path) -> Path:
    """Where an evaluation of its own writes."""
    return folder / EVALUATIONS / Path(trial_list).stem


def move_aside(path: Path) -> Path:
    """Give a file or folder the first free name of `<name>.before-1`, `<name>.before-2` …; returns it."""
    return path.rename(free_name(path, "before"))


def refuse_unusable(folder: str | Path) -> None:
    """Refuse a run folder that cannot be made or written into, before anything is done for it. Changes nothing.

    Raises:
        ValueError: it is a file or lies below one, or the disk or the rights forbid writing there.
    """
    path = Path(folder)
    found = next(one for one in (path, *path.absolute().parents) if os.path.lexists(one))
    if not found.is_dir():
        below = "is a file" if found == path else f"lies below {found}, which is a file"
        raise ValueError(
            f"training.save_path: {path} {below}; expected a folder, or a name for one: choose another --save_path"
        )
    if not os.access(found, os.W_OK | os.X_OK):
        raise ValueError(
            f"training.save_path: {path} cannot be written: {found} is read-only for this user or lies on a disk that "
            "is; choose another --save_path"
        )


@contextlib.contextmanager
def held(folder: str | Path) -> Iterator[None]:
    """Hold a run folder for this process; the operating system lets go of it when the process dies, however it dies.

    Raises:
        ValueError: another process trains into this folder; says which. Or nothing can be written there.
    """
    path = Path(folder) / LOCK
    with writing(path.parent, "choose another --save_path"):
        path.parent.mkdir(parents=True, exist_ok=True)
        # A folder that may only be read is found out now, not after the first epoch.
        path.touch()
    refusal = (
        f"{path.parent} is in use by another run ({_holder(path)}); wait for it, stop it, or choose another --save_path"
    )
    with hold_lock(path, refusal):
        # For whoever is refused; on a full disk they are told less.
        with contextlib.suppress(OSError):
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        yield


def _holder(path: Path) -> str:
    """Who holds the folder, or was the last to do so."""
    try:
        return path.read_text(encoding="utf-8").strip() or "an unknown process"
    except OSError:
        # There is none yet, or it is Windows, which lets nobody read a file that is locked.
        return "an unknown process"
