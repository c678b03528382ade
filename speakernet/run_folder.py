"""The run folder: the names of a run's files, its lock, and moving an earlier run aside.

The names are a contract, because users and scripts rely on them. A separate evaluation (`--eval`)
writes the same result files to a subfolder and takes no lock.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from speakernet.files import free_name, hold_lock, writing

LOCK = "run.lock"

LAST = "last.pt"
"""Everything needed to resume."""
PREVIOUS = "last.previous.pt"
"""The previous last.pt; exists from the second write on."""
BEST = "best.pt"
"""The model that was chosen: the one with the lowest held-out EER, or the last
(training.final_model)."""
CHECKPOINTS = "checkpoints"
"""The models of the last epochs and their average."""
AVERAGE = "average.pt"
"""In checkpoints/: the average of the last epochs' models and heads."""
CONFIG = "config.yaml"
LOG = "log.txt"
METRICS = "metrics.jsonl"
PROFILE = "profile"
LARGE_MARGIN_FOLDER = "large_margin"
"""Subfolder of the stage that training.large_margin_epochs adds."""
EVALUATIONS = "eval"
"""Separate evaluations, each in a folder named after its trial list."""
EMBEDDINGS = "embeddings"
PLOTS = "plots"
"""The plots of the report as separate files."""

RESULTS = "results.json"
SCORES = "scores.txt"
REPORT = "report.html"
EVALUATION_FILES = (RESULTS, SCORES, REPORT)
"""Written by every evaluation."""
DECISIONS = "decisions.csv"
"""Written by an evaluation without error rates, if there is a calibration or a threshold."""


def evaluation_folder(folder: Path, trial_list: str | Path) -> Path:
    """The folder of a separate evaluation."""
    return folder / EVALUATIONS / Path(trial_list).stem


def stage_folder(folder: Path, number: int, name: str) -> Path:
    """The folder of a later stage, numbered from 0; the first stage uses the run folder.

    A hyphen marks the large-margin stage, whose folder has no number.
    """
    return folder / (name.replace("-", "_") if "-" in name else f"{number + 1}_{name}")


def later_stages(folder: Path) -> dict[str, Path]:
    """Stage name -> folder of all stages but the first, in order."""
    # Folders that were moved aside have a dot.
    numbered = {
        path.name[2:]: path for path in sorted(folder.glob("[2-9]_*")) if "." not in path.name
    }
    last = folder / LARGE_MARGIN_FOLDER
    return {**numbered, LARGE_MARGIN_FOLDER.replace("_", "-"): last} if last.is_dir() else numbered


def move_aside(path: Path) -> Path:
    """Rename a file or folder to the first free name of `<name>.before-1`, `<name>.before-2` …, and
    return that.
    """
    return path.rename(free_name(path, "before"))


def refuse_unusable(folder: str | Path) -> None:
    """Refuse a run folder that cannot be created or written, without changing anything."""
    path = Path(folder)
    found = next(one for one in (path, *path.absolute().parents) if os.path.lexists(one))
    if found.is_dir() and os.access(found, os.W_OK | os.X_OK):
        return
    reason = f"cannot be written: {found} is read-only for you"
    if not found.is_dir():
        reason = "is a file" if found == path else f"is below {found}, which is a file"
    raise ValueError(f"training.save_path: {path} {reason}; choose another --save_path")


@contextlib.contextmanager
def held(folder: str | Path) -> Iterator[None]:
    """Lock a run folder for this process; the operating system releases the lock when the process
    dies.
    """
    path = Path(folder) / LOCK
    with writing(path.parent, "choose another --save_path"):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Detects a read-only folder now instead of after the first epoch.
        path.touch()
    holder = "an unknown process"
    # Windows refuses to read a locked file.
    with contextlib.suppress(OSError):
        holder = path.read_text(encoding="utf-8").strip() or holder
    refusal = (
        f"{path.parent} is in use by another run ({holder}); wait for it, stop it, or "
        "choose another --save_path"
    )
    with hold_lock(path, refusal):
        # Only needed for the message above, so a full disk does not matter.
        with contextlib.suppress(OSError):
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        yield
