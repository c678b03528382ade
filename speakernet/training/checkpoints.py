"""The files a run keeps on disk: `last.pt`, `best.pt` and `checkpoints/`, each written atomically.

This module handles dictionaries of tensors and plain values, independent of any model. A snapshot
is copied to CPU memory immediately; a background thread writes it to a temporary file, flushes it
and renames it, so a kill, a full disk or an interrupt at any moment leaves the old file intact.
"""

import logging
import random
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speakernet import distributed
from speakernet.checkpoint import (
    CheckpointError,
    DamagedError,
    read_own_checkpoint,
    write_checkpoint,
)
from speakernet.files import error_line, free_name, place
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
    move_aside,
)
from speakernet.training.options import TrainingOptions

logger = logging.getLogger(__name__)

TENSOR_SECTIONS = ("model", "frontend", "loss", "optimizer")
"""Sections whose options determine the tensors of a checkpoint and their shapes."""


def find_checkpoint(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Path and contents of last.pt, or of its predecessor if it is damaged; None without a last.pt.
    Only reads.
    """
    if not (folder / LAST).exists():
        return None
    try:
        return folder / LAST, read_own_checkpoint(folder / LAST)
    except DamagedError as error:
        if not (folder / PREVIOUS).exists():
            raise
        logger.warning("%s; using the previous checkpoint %s", error, folder / PREVIOUS)
        return folder / PREVIOUS, read_own_checkpoint(folder / PREVIOUS)


class CheckpointStore:
    """Writes and reads the checkpoints of one run folder, which is created if missing."""

    def __init__(self, folder: str | Path, options: TrainingOptions) -> None:
        self.folder = Path(folder)
        self.last_path = self.folder / LAST
        self.previous_path = self.folder / PREVIOUS
        self.best_path = self.folder / BEST
        self.average_path = self.folder / CHECKPOINTS / AVERAGE
        # The checkpoints to average at the end must still exist by then.
        self.keep = max(options.keep_checkpoints, options.average_checkpoints)
        self.compress = options.compress_checkpoints
        self._thread: threading.Thread | None = None
        self._failures: dict[str, OSError] = {}

    def save(self, path: Path, contents: dict[str, Any]) -> None:
        """Write a file of the run in the background, on rank 0; `contents` are copied before this
        returns.
        """
        if not distributed.is_main():
            return
        # Copied before waiting for the previous write, so that `contents` are those of this step.
        # The copy takes one pass over memory; the write takes as long as the disk does, so training
        # goes on meanwhile. While two saves overlap, both copies are in memory.
        snapshot = to_cpu(contents)
        self.wait()  # one write at a time, in order
        # Not a daemon: the interpreter waits for the thread at exit, so a finished run is always on
        # disk.
        self._thread = threading.Thread(
            target=self._write, args=(path, snapshot), name="checkpoint-writer"
        )
        self._thread.start()

    def replace_damaged(self) -> None:
        """Rename a damaged last.pt and put its predecessor in its place."""
        place(self.last_path, free_name(self.last_path, "damaged"))
        place(self.previous_path, self.last_path)

    def best_summary(self) -> dict[str, Any] | None:
        """The `training_summary` of best.pt; None if the file is missing, damaged or not a model of
        a run.
        """
        if not self.best_path.exists():
            return None
        try:
            summary = read_own_checkpoint(self.best_path)["training_summary"]
            return summary if {"epoch", "best_eer_percent"} <= set(summary) else None
        except (DamagedError, KeyError) as error:
            logger.warning(
                "%s: %s; the next evaluation replaces it", self.best_path, error_line(error)
            )
            return None

    def remove_leftovers(self) -> None:
        """Delete the temporary files of a killed run; call it only while holding the run's lock."""
        # Not below eval/: another process may be scoring a model there. Only the lock's holder
        # writes the rest.
        for name in (".", CHECKPOINTS, PLOTS, EMBEDDINGS):
            for leftover in (self.folder / name).glob(".*.tmp"):
                logger.info("removing %s, left over from an interrupted write", leftover.name)
                leftover.unlink(missing_ok=True)

    def set_aside_earlier_run(self) -> None:
        """Rename the files of an earlier run: a new run must not average, remove, resume from or
        replace them.
        """
        moved = []
        if epoch_paths(self.folder):
            moved.append(move_aside(self.folder / CHECKPOINTS).name)
        for name in (PREVIOUS, BEST, *EVALUATION_FILES, DECISIONS):
            if (self.folder / name).exists():
                moved.append(move_aside(self.folder / name).name)
        if moved:
            logger.warning(
                "%s has files of an earlier run but no last.pt to resume: renamed to %s",
                self.folder,
                ", ".join(moved),
            )

    def wait(self) -> None:
        """Wait until the pending write has reached the disk, or has failed and been logged."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait for the last write; OSError if the latest write of any file failed."""
        self.wait()
        # A file that failed once and was written later is complete.
        for error in self._failures.values():
            raise error

    def _write(self, path: Path, contents: dict[str, Any]) -> None:
        try:
            # last.pt keeps its predecessor, because a disk may lose a write that it has reported.
            # Of a model file there is one: the next evaluation writes another.
            if path == self.last_path and path.exists():
                # Written in full before any rename: a kill at any line leaves last.pt or its
                # predecessor.
                new = path.with_name(f".{path.name}.new.tmp")
                write_checkpoint(new, contents, compress=self.compress)
                place(path, self.previous_path)
                new.replace(path)
            else:
                write_checkpoint(path, contents, compress=self.compress)
            # None if `keep` is 0.
            for old in epoch_paths(self.folder)[: -self.keep]:
                old.unlink(missing_ok=True)
            self._failures.pop(path.name, None)
        except OSError as error:
            # A full disk must not end a long run: the files on disk are intact, and the next save
            # may succeed.
            if path.name not in self._failures:
                reason = error.strerror or error
                logger.error(
                    "could not write %s: %s. Training continues and the previous file is intact; "
                    "free some space",
                    path,
                    reason,
                )
            self._failures[path.name] = error


def epoch_paths(folder: Path) -> list[Path]:
    """The kept models of single epochs, oldest first."""
    return sorted((folder / CHECKPOINTS).glob("epoch_*.pt"))


def to_cpu(value: Any) -> Any:
    """A copy that later training steps cannot change: tensors cloned to CPU, containers rebuilt,
    plain values kept.

    Non-contiguous tensors keep their memory layout; views no longer share storage with their base.
    """
    if isinstance(value, torch.Tensor):
        # Without `copy`, `to` returns a CPU tensor itself, which the next step would change during
        # the write.
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: to_cpu(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_cpu(entry) for entry in value)
    return value


def capture_random_state() -> dict[str, Any]:
    """All global random state as tensors and plain values, loadable with `weights_only=True`."""
    # The generators' own objects could only be pickled, and a pickle can run code when it is
    # loaded.
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    return {
        "python": {
            "version": version,
            "internal": torch.tensor(internal, dtype=torch.int64),
            "gauss": gauss,
        },
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore the result of `capture_random_state`; CUDA states only if the device count is the
    same.
    """
    python = state["python"]
    random.setstate((python["version"], tuple(python["internal"].tolist()), python["gauss"]))
    saved = state["numpy"]
    keys = saved["keys"].numpy().astype(np.uint32)
    np.random.set_state(
        (saved["name"], keys, saved["position"], saved["has_gauss"], saved["cached"])
    )
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def average_checkpoints(
    paths: Sequence[Path], count: int
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The mean weights and the mean head of the last `count` of `paths`; no head if any of them
    lacks one.
    """
    paths = paths[-count:]
    if len(paths) < count:
        names = ", ".join(path.name for path in paths)
        logger.warning("expected %d checkpoints to average, found %d: %s", count, len(paths), names)
    # One file at a time: all of them at once would need memory for as many networks.
    weights = average_weights(read_own_checkpoint(path)["weights"] for path in paths)
    if not all("head" in read_own_checkpoint(path) for path in paths):
        return weights, None
    return weights, average_weights(read_own_checkpoint(path)["head"] for path in paths)


def average_weights(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The mean of several state dictionaries, entry by entry; integer tensors come from the last
    one.
    """
    total: dict[str, torch.Tensor] = {}
    latest: dict[str, Any] = {}
    count = 0
    for latest in states:
        # float64: a sum of many float32 values would lose bits.
        floats = {key: value.double() for key, value in latest.items() if value.is_floating_point()}
        # A sum over some of the checkpoints only would be divided by the number of all.
        if count and floats.keys() != total.keys():
            raise ValueError(
                "the checkpoints to average belong to different models (their weight names differ)"
            )
        count += 1
        for key, value in floats.items():
            total[key] = total[key] + value if key in total else value
    if not count:
        raise ValueError("no checkpoint to average: checkpoints/ is empty")
    means = {key: (value / count).to(latest[key].dtype) for key, value in total.items()}
    return {**latest, **means}


def refuse_other_speakers(saved: Mapping[str, Any], now: Mapping[str, Any], source: object) -> None:
    """Refuse a checkpoint of other speakers: a list with as many speakers would fit the head but
    mix up the classes.
    """
    # Checksums of the speaker names in order. Older checkpoints have none, and only the number of
    # speakers is checked, by the shape of the head.
    if saved.get("speakers", now.get("speakers")) != now.get("speakers"):
        raise CheckpointError(
            f"{source} was trained with other speakers, or other names for them: class indices "
            "would map to the wrong speakers. Use its training list, or a new --save_path (with "
            "--initial_model to start from these weights)"
        )


def log_changes(saved: Mapping[str, Any], now: Mapping[str, Any], source: object) -> None:
    """Log the options that differ from those of the checkpoint; the current values apply."""
    changes = changed_options(
        saved.get("config", {}), now.get("config", {}), folder=saved.get("working_folder", "")
    )
    if saved.get("training_list", now.get("training_list")) != now.get("training_list"):
        changes.append("the training list has different utterances or a different order")
    if changes:
        changed = "; ".join(changes)
        logger.warning("these options have changed since %s was written: %s", source, changed)


def changed_options(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    sections: Iterable[str] | None = None,
    folder: str = "",
) -> list[str]:
    """The options whose values differ, with both values; options that only one side has are not
    compared.

    Saved paths may be relative to `folder`; empty: the working directory.
    """
    changes = []
    for section in now if sections is None else sections:
        options = now.get(section, {})
        before = saved.get(section, {})
        for name, value in options.items():
            if name in before:
                changes += _changes(f"{section}.{name}", before[name], value, folder)
    return changes


def _changes(key: str, before: Any, now: Any, folder: str) -> list[str]:
    if isinstance(now, Mapping) and isinstance(before, Mapping) and now.keys() == before.keys():
        return changed_options({key: before}, {key: now}, folder=folder)
    if before == now:
        return []
    # Relative and absolute forms of a path count as equal.
    is_text = isinstance(before, str) and isinstance(now, str) and before and now
    if is_text and Path(folder, before).absolute() == Path(now).absolute():
        return []
    return [f"{key} {now!r} (was {before!r})"]


def set_aside_older(folder: Path, steps: int) -> None:
    """Move the folder of a stage aside if it was trained after another number of earlier steps."""
    checkpoint = find_checkpoint(folder)
    if checkpoint is None:
        return
    before = checkpoint[1].get("training", {}).get("first_stage_steps")
    if before not in (None, steps):
        aside = move_aside(folder)
        logger.warning(
            "%s was trained after step %d of the earlier stages, but they have since reached step "
            "%d, so this stage starts over; its old folder is moved to %s",
            folder,
            before,
            steps,
            aside.name,
        )


def adopt_better(best: Path, candidate: Path, stage: str, *, is_wanted: bool) -> None:
    """Replace the model file `best` with a stage's `candidate` if its EER is lower or `is_wanted`;
    log which.
    """
    before, after = (read_own_checkpoint(path)["training_summary"] for path in (best, candidate))
    eer_before = before["best_eer_percent"]
    eer_after = after["best_eer_percent"]
    if before == after:
        logger.info("%s: EER %.2f %%; best.pt is already this model", stage, eer_after)
        return
    # A tie keeps the earlier model, since nothing was gained.
    is_better = is_wanted or eer_after < eer_before
    verdict = "replaced" if is_better else "kept"
    logger.info(
        "%s: EER %.2f %%; best.pt with %.2f %% is %s", stage, eer_after, eer_before, verdict
    )
    if is_better:
        place(candidate, best)
