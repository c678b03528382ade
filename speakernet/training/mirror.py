"""Copies of a run elsewhere, made beside the training, so that another machine can resume a run whose machine is gone.

A thread looks every few seconds which files of the run folder have changed, and copies those to a folder or an address
of fsspec (`s3://…`, `gs://…`, `sftp://…`). The training neither waits for it nor ends with it. A file is copied under a
temporary name and only then takes its name; of last.pt the one before is kept.
"""

import contextlib
import logging
import posixpath
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from speakernet.files import FileError, atomic_write, error_line
from speakernet.run_folder import (
    AVERAGE,
    BEST,
    CHECKPOINTS,
    CONFIG,
    EVALUATION_FILES,
    LAST,
    LOG,
    METRICS,
    PREVIOUS,
    later_stages,
)
from speakernet.terminal import counted
from speakernet.training.checkpoints import epoch_paths

logger = logging.getLogger(__name__)

LOOK_SECONDS, RETRY_SECONDS = 10.0, 60.0
END_SECONDS = 600.0
"""At the end of a run: what is not copied by then is given up."""
GROWING = (METRICS, LOG)
"""Files that change at every moment: copied together with a checkpoint, and at the end."""
NOT_OURS = (".tmp", ".sha256")
"""Half-copied files, and the checksums that version 0.2 kept beside its copies."""


class RemoteError(FileError):
    """A mirror that cannot be used; the message names it and says why."""


@contextlib.contextmanager
def mirrored(address: str, folder: str | Path, *, with_epochs: bool) -> Iterator[None]:
    """Keep copies of a run folder at an address while the block runs."""
    mirror = Mirror(Path(folder), address, with_epochs)
    # A daemon: a folder that hangs must not keep the interpreter from ending.
    thread = threading.Thread(target=mirror.run, name="mirror", daemon=True)
    thread.start()
    try:
        yield
    finally:
        mirror.is_over.set()
        thread.join(END_SECONDS)
        if missing := mirror.changed(is_end=True):
            logger.warning("training.mirror: in %s these are out of date: %s", address, ", ".join(missing))


class Mirror:
    """Copies what a run folder holds, until `is_over`."""

    def __init__(self, folder: Path, address: str, with_epochs: bool) -> None:
        self.folder, self.address, self.with_epochs = folder, address, with_epochs
        self.system, self.root = open_remote(address, folder)
        self.is_over = threading.Event()
        self._copied: dict[str, tuple[int, int]] = {}

    def run(self) -> None:
        """Look every few seconds, and once more at the end."""
        delay, is_end = LOOK_SECONDS, False
        while not is_end:
            is_end = self.is_over.wait(delay)
            try:
                self._copy_all(is_end)
                delay = LOOK_SECONDS
            except Exception as error:
                # Every file system has errors of its own, and none of them is a reason to end a run.
                if delay == LOOK_SECONDS:
                    reason = error_line(error)
                    logger.warning("training.mirror: %s cannot be written, trying again (%s)", self.address, reason)
                delay = RETRY_SECONDS

    def changed(self, *, is_end: bool) -> list[str]:
        """Files that differ from their copies, models first: a copy is then never behind what it needs."""
        names = []
        for prefix in ("", *(f"{one.name}/" for one in later_stages(self.folder).values())):
            if self.with_epochs:
                paths = [*epoch_paths(self.folder / prefix), self.folder / prefix / CHECKPOINTS / AVERAGE]
                names += [path.relative_to(self.folder).as_posix() for path in paths]
            names += [prefix + name for name in (BEST, LAST, CONFIG, *EVALUATION_FILES, *GROWING)]
        changed = [name for name in names if self._state_of(name) not in (None, self._copied.get(name))]
        if is_end or any(name.endswith(".pt") for name in changed):
            return changed
        return [name for name in changed if not name.endswith(GROWING)]

    def _copy_all(self, is_end: bool) -> None:
        for name in self.changed(is_end=is_end):
            folder, base = posixpath.split(f"{self.root}/{name}")
            temporary = f"{folder}/.{base}.tmp"
            self.system.makedirs(folder, exist_ok=True)
            if (state := self._state_of(name)) is None:
                continue
            self.system.put_file(str(self.folder / name), temporary)
            if base == LAST and self.system.exists(f"{folder}/{base}"):
                self.system.mv(f"{folder}/{base}", f"{folder}/{PREVIOUS}")
            self.system.mv(temporary, f"{folder}/{base}")
            self._copied[name] = state
        for name in [one for one in self._copied if self._state_of(one) is None]:
            self.system.rm_file(f"{self.root}/{name}")
            del self._copied[name]

    def _state_of(self, name: str) -> tuple[int, int] | None:
        """By which a changed file is known; None if there is none."""
        try:
            status = (self.folder / name).stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size


def open_remote(address: str, folder: Path) -> tuple[Any, str]:
    """Fsspec's file system of an address, and the folder's path in it; refuses the run folder itself."""
    try:
        system, root = url_to_fs(address, use_listings_cache=False)
    except Exception as error:
        # Every system has errors of its own for an address, a key or a package that is missing.
        raise RemoteError(
            f"training.mirror: {address}: {error_line(error)}; expected a folder or an address that fsspec knows"
        ) from error
    if isinstance(system, LocalFileSystem) and Path(root).resolve() == folder.resolve():
        raise RemoteError(f"training.mirror: {address} is the run folder itself; expected another folder")
    return system, root.rstrip("/")


def fetch_run(address: str, folder: str | Path) -> bool:
    """Fill an empty run folder with what its mirror holds; returns whether there was anything.

    A run folder with a last.pt of its own resumes from that one, and the mirror is not read.
    """
    folder = Path(folder)
    if (folder / LAST).exists():
        return False
    system, root = open_remote(address, folder)
    try:
        found = system.find(root) if system.exists(root) else []
        begin = len(system._strip_protocol(root).rstrip("/")) + 1
        names = [one[begin:] for one in found if not one.endswith(NOT_OURS)]
        for name in names:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise RemoteError(f"{name!r} is a path outside the run folder")
        # Last of all the one that makes it a run: a fetch that was cut off is repeated.
        for name in sorted(names, key=lambda name: (name == LAST, name)):
            with system.open(f"{root}/{name}", "rb") as content, atomic_write(folder / name, "wb") as copy:
                shutil.copyfileobj(content, copy)
        if LAST not in names and PREVIOUS in names:
            # The copy of last.pt was cut off between its two names.
            (folder / PREVIOUS).rename(folder / LAST)
    except Exception as error:
        raise RemoteError(
            f"training.mirror: {address} cannot be read ({error_line(error)}), so it is not known whether there is a "
            "run to resume; correct it, or give --training.mirror '' to begin without"
        ) from error
    if names:
        logger.info("%s: %s fetched from %s", folder, counted(len(names), "file"), address)
    return (folder / LAST).exists()
