"""The run folder: the names of a run's files, its lock, its log, and moving an earlier run aside.

The names are a contract, because users and scripts rely on them. A separate evaluation (`--eval`)
writes the same result files to a subfolder and takes no lock.
"""

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from speakernet.files import free_name, hold_lock, writing

logger = logging.getLogger(__name__)

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
"""Subfolder of the large-margin stage in runs of version 0.3.0 and earlier, without a number."""
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
    """The folder of a later stage, numbered from 0; the first stage uses the run folder."""
    # A run started by version 0.3.0 or earlier continues in its folder without a number.
    unnumbered = folder / LARGE_MARGIN_FOLDER
    if name == LARGE_MARGIN_FOLDER and unnumbered.is_dir():
        return unnumbered
    return folder / f"{number + 1}_{name}"


def later_stages(folder: Path) -> dict[str, Path]:
    """Stage name -> folder of all stages but the first, in order."""
    stages = {}
    for path in sorted(folder.glob("[2-9]_*")):
        # Folders that were moved aside have a dot (`2_large_margin.before-1`).
        if "." not in path.name:
            stages[path.name[2:]] = path
    unnumbered = folder / LARGE_MARGIN_FOLDER
    if unnumbered.is_dir():
        stages[LARGE_MARGIN_FOLDER] = unnumbered
    return stages


def is_reported(run_folder: Path, test_lists: Iterable[str]) -> bool:
    """Whether results, scores and reports exist and are newer than the last checkpoint and the best
    model.
    """
    models = [run_folder / BEST, run_folder / LAST]
    models += [folder / LAST for folder in later_stages(run_folder).values()]
    # By dates, because a report is written after the models. Copying a folder changes them, so
    # `assembly.runs` compares checksums before it relies on an earlier report.
    latest = max(model.stat().st_mtime_ns for model in models if model.exists())
    for folder in (run_folder, *(evaluation_folder(run_folder, name) for name in test_lists)):
        for name in EVALUATION_FILES:
            file = folder / name
            if not file.exists() or file.stat().st_mtime_ns < latest:
                return False
    return True


def move_aside(path: Path) -> Path:
    """Rename a file or folder to the first free name of `<name>.before-1`, `<name>.before-2` …, and
    return that.
    """
    return path.rename(free_name(path, "before"))


def refuse_unusable(folder: str | Path) -> None:
    """Refuse a run folder that cannot be created or written, without changing anything."""
    path = Path(folder)
    # Nothing is created to find out: a run that is refused for another reason must leave no folder.
    nearest = path
    while not os.path.lexists(nearest):
        nearest = nearest.absolute().parent
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return
    reason = "is read-only for you" if nearest.is_dir() else "is a file"
    raise ValueError(
        f"training.save_path: {path} cannot be written, because {nearest} {reason}; choose another "
        "--save_path"
    )


@contextlib.contextmanager
def lock_folder(folder: str | Path) -> Iterator[None]:
    """Lock a run folder for this process; the operating system releases the lock when the process
    dies.
    """
    folder = Path(folder)
    lock = folder / LOCK
    with writing(folder, "choose another --save_path"):
        folder.mkdir(parents=True, exist_ok=True)
        # Detects a read-only folder now instead of after the first epoch.
        lock.touch()
    holder = "an unknown process"
    # Windows refuses to read a locked file.
    with contextlib.suppress(OSError):
        holder = lock.read_text(encoding="utf-8").strip() or holder
    refusal = (
        f"{folder} is in use by another run ({holder}); wait for it, stop it, or choose another "
        "--save_path"
    )
    with hold_lock(lock, refusal):
        # Only needed for the message above, so a full disk does not matter.
        with contextlib.suppress(OSError):
            lock.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        yield


@dataclass(eq=False)
class GrowingFile:
    """A file to which pieces are appended, each completely or not at all; pieces that cannot be
    written are dropped.

    The first failure is logged; later pieces are still tried, because the disk may have space
    again. File and folder are created with the first piece. `append` hands each piece to the
    system, so a kill loses none.
    """

    path: Path
    _has_failed: bool = False

    def append(self, content: bytes) -> bool:
        """Append a piece; return whether it was written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: a piece is with the system when this returns, and the number of bytes
            # written shows whether the disk was full.
            with self.path.open("ab", buffering=0) as file:
                size_before = os.fstat(file.fileno()).st_size
                if file.write(content) < len(content):
                    # Half a line would corrupt the next one, and half a record everything after it.
                    os.ftruncate(file.fileno(), size_before)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._has_failed:
                # Set before logging, because the log may be this file.
                self._has_failed = True
                reason = error.strerror or str(error)
                logger.warning(
                    "%s cannot be written (%s): new lines are dropped; the run continues",
                    self.path,
                    reason,
                )
            return False
        return True


class LogFile(logging.Handler):
    """Writes log records to a file whose folder may be created later; a full disk drops lines."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = GrowingFile(path)
        self._waiting: list[bytes] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, after those that have waited for the folder."""
        # The first lines are logged before it is known whether the run may use its folder; they
        # wait in memory until the folder exists.
        self._waiting.append((self.format(record) + "\n").encode("utf-8", "backslashreplace"))
        if self._file.path.parent.is_dir():
            waited = self._waiting
            self._waiting = []
            self._file.append(b"".join(waited))
