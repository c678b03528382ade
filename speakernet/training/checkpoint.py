"""The run folder on disk: its lock, `last.pt`, `best.pt` and `checkpoints/`, written whole or not at all.

Knows nothing of models: it is handed dictionaries of tensors and plain values. A snapshot is copied to CPU memory at
once; a background thread writes it under a temporary name, flushes it and renames it, so that a kill, a full disk or an
interrupt at any moment leaves the old file whole. Loading never runs code (`weights_only=True`).
"""

import dataclasses
import logging
import os
import shutil
import socket
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from speakernet.files import atomic_write, free_name, human_bytes, place

try:
    import fcntl
except ImportError:  # not on Windows: the lock is then left out, and said
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOCK_NAME = "run.lock"


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or does not fit this run."""


class DamagedError(CheckpointError):
    """A checkpoint whose content is not one: cut off, overwritten, or made by another program."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What a run folder holds to go on from."""

    path: Path | None
    """The newest file that can be read: last.pt, the one before it, or a model; None where there is none."""
    contents: dict[str, Any]
    is_model: bool
    """Whether it holds weights only."""
    damaged: dict[Path, DamagedError]
    """Files that should have come first, and what is wrong with them."""


def describe(error: BaseException) -> str:
    """An error in one line: its type and the beginning of its message, which may be empty."""
    line = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


class RunLock:
    """Holds a run folder for one process; the operating system lets go of it when the process dies, however it dies."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / LOCK_NAME
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Take the folder.

        Raises:
            ValueError: another process trains into this folder; says which.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+", encoding="utf-8")
        if fcntl is None:
            logger.warning("this platform has no file locks: make sure that only one run uses %s", self.path.parent)
        else:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                holder = file.read().strip() or "an unknown process"
                file.close()
                raise ValueError(
                    f"{self.path.parent} is in use by another run ({holder}); "
                    "wait for it, stop it, or choose another --save_path"
                ) from error
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self._file = file

    def release(self) -> None:
        """Let go of the folder; does nothing when it is not held."""
        if self._file is not None:
            self._file.close()
            self._file = None


def to_cpu(value: Any) -> Any:
    """A copy that later training steps cannot change: tensors cloned to CPU, containers rebuilt, plain values kept.

    Tensors that are not contiguous keep their memory layout; views are cut loose from what they look into.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: to_cpu(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_cpu(entry) for entry in value)
    return value


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """The dictionary in a checkpoint file, on the CPU.

    Raises:
        DamagedError: the file is truncated, foreign, or needs code to load.
        CheckpointError: it cannot be opened, or holds something else.
    """
    path = Path(path)
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except (OSError, MemoryError) as error:
        # Of this machine and this moment: the file may well be whole.
        raise CheckpointError(f"{path} cannot be read now ({describe(error)}); see to that and try again") from error
    except Exception as error:
        # torch raises RuntimeError, UnpicklingError, EOFError, KeyError … for a broken file, as chance has it.
        raise DamagedError(
            f"{path} is not a readable checkpoint ({describe(error)}); "
            "it may be cut off or made by another program: remove it to start anew; "
            "--initial_model with best.pt or a file of checkpoints/ then begins with those weights"
        ) from error
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path} holds a {type(contents).__name__}; expected a checkpoint of this program")
    return contents


class CheckpointStore:
    """Writes and reads the checkpoints of one run folder.

    Args:
        folder: the run folder; made when missing.
        keep: models kept in `checkpoints/`, newest first.
        compress: deflate the files (`torch.save` stores them plainly).
        background: write in a thread; off, every save has reached the disk when it returns.
    """

    def __init__(self, folder: str | Path, *, keep: int = 3, compress: bool = False, background: bool = True) -> None:
        self.folder = Path(folder)
        self.keep = keep
        self.compress = compress
        self.background = background
        self._thread: threading.Thread | None = None
        self._failure: OSError | None = None

    @property
    def last_path(self) -> Path:
        """Everything needed to go on."""
        return self.folder / "last.pt"

    @property
    def previous_path(self) -> Path:
        """last.pt as it was before the last write; there from the second write on."""
        return self.folder / "last.previous.pt"

    @property
    def best_path(self) -> Path:
        """The model by held-out EER."""
        return self.folder / "best.pt"

    def epoch_path(self, epoch: int) -> Path:
        """The model after so many epochs."""
        return self.folder / "checkpoints" / f"epoch_{epoch:04d}.pt"

    @property
    def average_path(self) -> Path:
        """The mean of the last epochs' models, with the mean of their heads: what a following stage begins with."""
        return self.folder / "checkpoints" / "average.pt"

    def epoch_paths(self) -> list[Path]:
        """The kept models, oldest first."""
        return sorted((self.folder / "checkpoints").glob("epoch_*.pt"))

    def save_last(self, contents: dict[str, Any]) -> None:
        """Write last.pt; `contents` are copied before this returns."""
        self._save({self.last_path: contents})

    def save_best(self, contents: dict[str, Any]) -> None:
        """Write best.pt."""
        self._save({self.best_path: contents})

    def save_average(self, contents: dict[str, Any]) -> None:
        """Write checkpoints/average.pt."""
        self._save({self.average_path: contents})

    def save_epoch(self, epoch: int, contents: dict[str, Any]) -> None:
        """Write the model of an epoch into checkpoints/ and remove those too many."""
        if self.keep > 0:
            self._save({self.epoch_path(epoch): contents}, self._prune)

    def find(self) -> Found | None:
        """What there is to go on from: last.pt, the one before where it is damaged, then the newest model.

        Returns:
            None where nothing was saved here, or last.pt was removed to begin anew. Nothing is changed.

        Raises:
            CheckpointError: a file cannot be opened (no permission, say).
        """
        self.wait()
        if not self.last_path.exists():
            return None
        damaged: dict[Path, DamagedError] = {}
        models = [*reversed(self.epoch_paths()), self.best_path]
        for path in (self.last_path, self.previous_path, *models):
            try:
                return Found(path, load_checkpoint(path), path in models, damaged)
            except FileNotFoundError:
                continue
            except DamagedError as error:
                damaged[path] = error
        return Found(None, {}, False, damaged)

    def heal(self, found: Found) -> list[str]:
        """Rename the damaged files, and let the one before be last.pt where it was found; only with the run's lock.

        last.pt is there at every moment: without it the next start would begin anew.

        Returns:
            A sentence for each file that was renamed.
        """
        sentences = []
        for path, error in found.damaged.items():
            aside = free_name(path, "damaged")
            place(path, aside)
            if path != self.last_path:
                path.unlink()
            sentences.append(f"{path} is damaged ({describe(error.__cause__ or error)}) and was renamed {aside.name}")
        if found.path == self.previous_path:
            place(self.previous_path, self.last_path)
        return sentences

    def load_best(self) -> dict[str, Any] | None:
        """The contents of best.pt; None where there is none or it is damaged, which renames it."""
        self.wait()
        try:
            return load_checkpoint(self.best_path)
        except FileNotFoundError:
            return None
        except DamagedError as error:
            logger.warning("%s", *self.heal(Found(None, {}, False, {self.best_path: error})))
            return None

    def restore_best(self, epoch: int, eer_percent: float) -> Path | None:
        """Make best.pt again from the model of `epoch` in checkpoints/, where that is the one with this EER."""
        path = self.epoch_path(epoch)
        if not path.exists() or load_checkpoint(path)["training_summary"]["best_eer_percent"] != eer_percent:
            return None
        place(path, self.best_path)
        return path

    def remove_leftovers(self) -> None:
        """Delete temporary files that a killed run left behind; call it only while holding the run's lock."""
        for folder in (self.folder, self.folder / "checkpoints"):
            for leftover in folder.glob(".*.pt.*.tmp"):
                logger.info("removing %s, left by an interrupted write", leftover.name)
                leftover.unlink(missing_ok=True)

    def set_aside_earlier_run(self) -> None:
        """Move what an earlier run left away: one that begins anew must not average, remove or resume from it."""
        if self.previous_path.exists():
            logger.warning("%s is of an earlier run: moved to %s", self.previous_path, move_aside(self.previous_path))
        if not self.epoch_paths():
            return
        folder = self.folder / "checkpoints"
        logger.warning("%s holds models of an earlier run: moved to %s", folder, move_aside(folder).name)

    def wait(self) -> None:
        """Return when everything handed over has reached the disk (or has failed, which was logged)."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait for the last write.

        Raises:
            OSError: the last write failed, so what is on disk is older than the run.
        """
        self.wait()
        if self._failure is not None:
            raise self._failure

    def _save(self, files: dict[Path, dict[str, Any]], afterwards: Callable[[], None] | None = None) -> None:
        snapshot = {path: to_cpu(contents) for path, contents in files.items()}
        self.wait()  # one write at a time, in order
        if not self.background:
            self._write(snapshot, afterwards)
            return
        # Not a daemon: the interpreter waits for it at exit, so that a finished run is a written run.
        self._thread = threading.Thread(target=self._write, args=(snapshot, afterwards), name="checkpoint-writer")
        self._thread.start()

    def _write(self, files: dict[Path, dict[str, Any]], afterwards: Callable[[], None] | None) -> None:
        for path, contents in files.items():
            try:
                self._write_one(path, contents)
                self._failure = None
            except OSError as error:
                self._failure = error
                logger.error("could not write %s: %s; the old file is untouched. Free some space: training goes on "
                             "and will try again at the next save", path, error)  # fmt: skip
                return
        if afterwards is not None:
            afterwards()

    def _write_one(self, path: Path, contents: dict[str, Any]) -> None:
        if path != self.last_path or not path.exists():
            write_checkpoint(path, contents, compress=self.compress)
            return
        # Whole beside the old one first: a kill between any two of these lines leaves last.pt, and one before it.
        new = path.with_name(f".{path.name}.new.tmp")
        write_checkpoint(new, contents, compress=self.compress)
        place(path, self.previous_path)
        new.replace(path)

    def _prune(self) -> None:
        for path in self.epoch_paths()[: -self.keep]:
            path.unlink(missing_ok=True)


def move_aside(folder: Path) -> Path:
    """Give a file or folder the first free name of `<name>.before-1`, `<name>.before-2` …; returns it."""
    return folder.rename(free_name(folder, "before"))


def write_checkpoint(path: str | Path, contents: dict[str, Any], *, compress: bool = False) -> None:
    """Write a dictionary of tensors and plain values, atomically.

    Raises:
        OSError: the disk is full or not writable; the old file stays as it was.
    """
    with atomic_write(path, "wb") as file:
        try:
            torch.save(contents, file)
        except RuntimeError as error:
            # torch's zip writer reports a failed write (a full disk, say) as a RuntimeError of its own.
            free = human_bytes(shutil.disk_usage(Path(path).parent).free)
            raise OSError(
                f"writing {path} failed with {free} free on its disk ({error}); the old file is whole"
            ) from error
    if compress:
        _deflate(Path(path))


def _deflate(path: Path) -> None:
    """Rewrite torch's (stored) zip archive deflated; torch reads both."""
    with (
        zipfile.ZipFile(path) as stored,
        atomic_write(path, "wb") as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as packed,
    ):
        for entry in stored.infolist():
            packed.writestr(entry.filename, stored.read(entry))
