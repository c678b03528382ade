"""What a run keeps on disk: `last.pt`, `best.pt` and `checkpoints/`, written whole or not at all.

Knows nothing of models: it is handed dictionaries of tensors and plain values. A snapshot is copied to CPU memory at
once; a background thread writes it under a temporary name, flushes it and renames it, so that a kill, a full disk or an
interrupt at any moment leaves the old file whole.
"""

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from speakernet.checkpoint import CheckpointError, DamagedError, read_own_checkpoint, write_checkpoint
from speakernet.files import error_line, free_name, naming, place
from speakernet.run_folder import (
    AVERAGE,
    BEST,
    CHECKPOINTS,
    DECISIONS,
    EMBEDDINGS,
    EVALUATION_FILES,
    LAST,
    PLOTS,
    PREVIOUS,
    epoch_path,
    epoch_paths,
    move_aside,
)
from speakernet.training.options import CheckpointOptions

logger = logging.getLogger(__name__)


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


def find_checkpoint(folder: Path) -> Found | None:
    """What there is to go on from: last.pt, the one before where it is damaged, then the newest model.

    Returns:
        None where nothing was saved here, or last.pt was removed to begin anew. Nothing is changed.

    Raises:
        CheckpointError: a file cannot be opened (no permission, say).
    """
    if not (folder / LAST).exists():
        return None
    damaged: dict[Path, DamagedError] = {}
    models = [*reversed(epoch_paths(folder)), folder / BEST]
    for path in (folder / LAST, folder / PREVIOUS, *models):
        if not path.exists():
            continue
        try:
            contents = read_own_checkpoint(path)
        except DamagedError as error:
            damaged[path] = error
            continue
        if path in models:
            check_model(contents, path)
        return Found(path, contents, path in models, damaged)
    return Found(None, {}, False, damaged)


def check_model(contents: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The `training_summary` of a model that a run keeps.

    Raises:
        CheckpointError: the file is a checkpoint, but none that a run wrote.
    """
    summary = contents.get("training_summary")
    has_all = isinstance(summary, Mapping) and all(
        isinstance(summary.get(name), int | float) for name in ("epoch", "step", "best_eer_percent")
    )
    if not has_all or not isinstance(contents.get("weights"), Mapping):
        raise CheckpointError(
            f"{path} is not the model of a run (it says nothing of its training); it was put there by hand: move it "
            "away, or choose another --save_path"
        )
    return cast(Mapping[str, Any], summary)


@dataclasses.dataclass(frozen=True)
class _Write:
    """A snapshot on its way to the disk, and what to do when it is there."""

    contents: dict[str, Any]
    afterwards: Callable[[], None]


class CheckpointStore:
    """Writes and reads the checkpoints of one run folder, which is made when missing."""

    def __init__(self, folder: str | Path, options: CheckpointOptions) -> None:
        self.folder = Path(folder)
        self.last_path = self.folder / LAST
        self.previous_path = self.folder / PREVIOUS
        self.best_path = self.folder / BEST
        self.average_path = self.folder / CHECKPOINTS / AVERAGE
        # What is averaged at the end has to be there then.
        self.keep = max(options.keep_checkpoints, options.average_checkpoints)
        self.compress = options.compress_checkpoints
        self._thread: threading.Thread | None = None
        # What could not be written, by its name: a better best.pt may never come, so this one is tried again.
        self._owed: dict[Path, _Write] = {}
        self._failure: OSError | None = None
        self._told: set[str] = set()

    def epoch_paths(self) -> list[Path]:
        """The kept models, oldest first."""
        return epoch_paths(self.folder)

    def save_last(self, contents: dict[str, Any]) -> None:
        """Write last.pt; `contents` are copied before this returns."""
        self._save(self.last_path, contents)

    def save_best(self, contents: dict[str, Any]) -> None:
        """Write best.pt."""
        self._save(self.best_path, contents)

    def save_average(self, contents: dict[str, Any]) -> None:
        """Write checkpoints/average.pt."""
        self._save(self.average_path, contents)

    def save_epoch(self, epoch: int, contents: dict[str, Any]) -> None:
        """Write the model of an epoch into checkpoints/ and remove those too many."""
        if self.keep > 0:
            self._save(epoch_path(self.folder, epoch), contents, self._prune)

    def find(self) -> Found | None:
        """As `find_checkpoint`, once everything handed over has reached the disk."""
        self.wait()
        return find_checkpoint(self.folder)

    def heal(self, found: Found) -> list[str]:
        """Rename the damaged files, and let the one before be last.pt where it was found; only with the run's lock.

        Returns:
            A sentence for each file that was renamed.
        """
        sentences = []
        for path, error in found.damaged.items():
            aside = free_name(path, "damaged")
            # Under both names for a moment: without a last.pt the next start would begin anew.
            place(path, aside)
            if path != self.last_path:
                path.unlink()
            reason = error_line(error.__cause__ or error)
            sentences.append(f"{path} is damaged ({reason}) and was renamed {aside.name}")
        if found.path == self.previous_path:
            place(self.previous_path, self.last_path)
        return sentences

    def load_best(self) -> dict[str, Any] | None:
        """The contents of best.pt; None without one, or where it is damaged or no model of a run, which renames it.

        Raises:
            CheckpointError: it cannot be opened.
        """
        self.wait()
        if not self.best_path.exists():
            return None
        try:
            contents = read_own_checkpoint(self.best_path)
        except DamagedError as error:
            logger.warning("%s", *self.heal(Found(None, {}, False, {self.best_path: error})))
            return None
        try:
            check_model(contents, self.best_path)
            return contents
        except CheckpointError:
            # Somebody's file, so it is kept; the run does not need it while last.pt is there.
            moved = move_aside(self.best_path)
            logger.warning("%s is not the model of a run, it was put there by hand: moved to %s", self.best_path, moved)
            return None

    def restore_best(self, epoch: int, eer_percent: float) -> Path | None:
        """Make best.pt again from the model of `epoch` , where it is kept, whole, and the one with this EER."""
        path = epoch_path(self.folder, epoch)
        if not path.exists():
            return None
        try:
            summary = check_model(read_own_checkpoint(path), path)
        except DamagedError as error:
            logger.warning("%s", error)
            return None
        if summary["best_eer_percent"] != eer_percent:
            return None
        place(path, self.best_path)
        return path

    def remove_leftovers(self) -> None:
        """Delete temporary files that a killed run left behind; call it only while holding the run's lock."""
        # Not below eval/, where a model may be scored at this moment: all else is written by who holds the lock.
        for folder in (self.folder, self.folder / CHECKPOINTS, self.folder / PLOTS, self.folder / EMBEDDINGS):
            for leftover in folder.glob(".*.tmp"):
                logger.info("removing %s, left by an interrupted write", leftover.name)
                leftover.unlink(missing_ok=True)

    def set_aside_earlier_run(self) -> None:
        """Rename what an earlier run left: one that begins anew must not average, remove, resume from or replace it."""
        names = [CHECKPOINTS] if self.epoch_paths() else []
        names += [one for one in (PREVIOUS, BEST, *EVALUATION_FILES, DECISIONS) if (self.folder / one).exists()]
        if names:
            moved = ", ".join(move_aside(self.folder / one).name for one in names)
            logger.warning(
                "%s has files of an earlier run and no last.pt to go on from: moved to %s", self.folder, moved
            )

    def wait(self) -> None:
        """Return when everything handed over has reached the disk (or has failed, which was logged)."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait for the last write, and try once more what could not be written.

        Raises:
            OSError: it still cannot, so what is on disk is older than the run.
        """
        self.wait()
        self._write_all()
        if self._owed and self._failure is not None:
            lost = ", ".join(path.name for path in self._owed)
            logger.error("%s: never written: %s; the same command goes on from what is on the disk", self.folder, lost)
            raise self._failure

    def _save(self, path: Path, contents: dict[str, Any], afterwards: Callable[[], None] = lambda: None) -> None:
        snapshot = to_cpu(contents)
        self.wait()  # one write at a time, in order
        # What was owed under this name is older; the others are written first, in their order.
        self._owed.pop(path, None)
        self._owed[path] = _Write(snapshot, afterwards)
        # Not a daemon: the interpreter waits for it at exit, so that a finished run is a written run.
        self._thread = threading.Thread(target=self._write_all, name="checkpoint-writer")
        self._thread.start()

    def _write_all(self) -> None:
        """Write everything that is owed; what fails stays so."""
        failed: list[str] = []
        written: list[str] = []
        for path, one in list(self._owed.items()):
            try:
                if path == self.last_path and path.exists():
                    self._replace_last(one.contents)
                else:
                    write_checkpoint(path, one.contents, compress=self.compress)
                one.afterwards()
            except OSError as error:
                # A full disk must not end a run of days: what is on disk is whole, and there is a next save.
                self._failure = error
                failed.append(path.name)
            else:
                del self._owed[path]
                written.append(path.name)
        self._forget_old_epochs()
        self._tell(failed, written)

    def _tell(self, failed: list[str], written: list[str]) -> None:
        """Say what cannot be written when there is more of it than before, and what was written after all."""
        if self._failure is not None and set(failed) - self._told:
            logger.error(
                "could not write %s: %s. Free some space: training goes on and tries again at each save, and what was "
                "there before is whole",
                *(", ".join(failed), self._failure.strerror or self._failure),
            )
        if at_last := [name for name in written if name in self._told]:
            logger.warning("written now: %s", ", ".join(at_last))
        self._told = set(failed)

    def _forget_old_epochs(self) -> None:
        """Of models of epochs that are owed only those are held that would be kept: they fill the memory."""
        epochs = sorted(path for path in self._owed if path.match(f"{CHECKPOINTS}/epoch_*"))
        for path in epochs[: -self.keep or None]:
            del self._owed[path]

    def _replace_last(self, contents: dict[str, Any]) -> None:
        # Whole beside the old one first: a kill between any two of these lines leaves last.pt, and one before it.
        new = self.last_path.with_name(f".{self.last_path.name}.new.tmp")
        with naming(self.last_path, new):
            write_checkpoint(new, contents, compress=self.compress)
        place(self.last_path, self.previous_path)
        new.replace(self.last_path)

    def _prune(self) -> None:
        for path in self.epoch_paths()[: -self.keep]:
            path.unlink(missing_ok=True)


def to_cpu(value: Any) -> Any:
    """A copy that later training steps cannot change: tensors cloned to CPU, containers rebuilt, plain values kept.

    Tensors that are not contiguous keep their memory layout; views are cut loose from what they look into.
    """
    if isinstance(value, torch.Tensor):
        # `copy`: on a CPU `to` alone would give the live tensor, which the next step changes while it is written.
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: to_cpu(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_cpu(entry) for entry in value)
    return value
