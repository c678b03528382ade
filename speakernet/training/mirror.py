"""Copies of a run elsewhere, made beside the training, so that another machine can resume a run whose machine is gone.

A thread looks every few seconds which files of the run folder have changed, and copies those to a folder or an address
of fsspec (`s3://…`, `gs://…`, `sftp://…`). The training neither waits for it nor ends with it. A file is copied under a
temporary name and only then takes its name; of last.pt the one before is kept.
"""

import contextlib
import logging
import posixpath
import threading
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from speakernet.files import BLOCK_BYTES, FileError, atomic_write, error_line, human_bytes, open_regular
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
    SECOND_STAGE,
    epoch_paths,
)
from speakernet.terminal import counted

logger = logging.getLogger(__name__)

LOOK_SECONDS = 10.0
SILENT_SECONDS = 120.0
"""At the end of a run: a copy of which no byte has moved for so long is given up."""
RETRY_SECONDS = 60.0
GROWING = (METRICS, LOG)
"""Files that change at every moment: copied together with a checkpoint, and at the end."""
NOT_OURS = (".tmp", ".sha256")
"""Half-copied files, and the checksums that version 0.2 kept beside its copies."""


class RemoteError(FileError):
    """A mirror that cannot be used; the message names it and says why."""


class Mirror:
    """Copies of what a run folder holds; use it as a context manager around the run."""

    def __init__(self, folder: str | Path, address: str, *, with_epochs: bool = False) -> None:
        self.folder, self.address, self.with_epochs = Path(folder), address, with_epochs
        self.system, self.root = open_remote(address, self.folder)
        self._copied: dict[str, tuple[int, int]] = {}
        self._has_failed = False
        self._moved_at = time.monotonic()
        self._is_over = threading.Event()
        # A daemon: a folder that hangs must not keep the interpreter from ending.
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def __enter__(self) -> "Mirror":
        self._thread.start()
        return self

    def __exit__(self, *_error: Any) -> None:
        """Copy what is new, for as long as bytes move; a warning names what was not copied."""
        self._is_over.set()
        self._moved_at = time.monotonic()
        while self._thread.is_alive() and time.monotonic() - self._moved_at < SILENT_SECONDS:
            self._thread.join(timeout=0.1)
        if missing := self._changed(is_end=True):
            logger.warning("training.mirror: in %s these are out of date: %s", self.address, ", ".join(missing))

    def _run(self) -> None:
        delay, is_end = LOOK_SECONDS, False
        while not is_end:
            is_end = self._is_over.wait(delay)
            try:
                self._copy_all(is_end)
            except Exception as error:
                # Every file system has errors of its own, and none of them is a reason to end a run.
                if not self._has_failed:
                    logger.warning(
                        "training.mirror: %s cannot be written (%s); the run continues, and tries again later",
                        *(self.address, error_line(error)),
                    )
                self._has_failed, delay = True, RETRY_SECONDS
                continue
            if self._has_failed:
                logger.info("training.mirror: %s can be written to again", self.address)
            self._has_failed, delay = False, LOOK_SECONDS

    def _copy_all(self, is_end: bool) -> None:
        for name in self._changed(is_end):
            state = _state_of(self.folder / name)
            if state is not None:
                self._put(name)
                self._copied[name] = state
        for name in [one for one in self._copied if not (self.folder / one).exists()]:
            self.system.rm_file(f"{self.root}/{name}")
            del self._copied[name]

    def _put(self, name: str) -> None:
        """Copy a file: as it is now, also if it is replaced meanwhile."""
        target = f"{self.root}/{name}"
        folder, base = posixpath.split(target)
        temporary = f"{folder}/.{base}.tmp"
        self.system.makedirs(folder, exist_ok=True)
        num_bytes = 0
        with open_regular(self.folder / name) as content, self.system.open(temporary, "wb") as copy:
            while block := content.read(BLOCK_BYTES):
                copy.write(block)
                num_bytes += len(block)
                self._moved_at = time.monotonic()
        if (arrived := self.system.info(temporary)["size"]) != num_bytes:
            raise RemoteError(f"{target}: {arrived} of {num_bytes} bytes arrived")
        if base == LAST and self.system.exists(target):
            self.system.mv(target, f"{folder}/{PREVIOUS}")
        self.system.mv(temporary, target)

    def _changed(self, is_end: bool) -> list[str]:
        """Files that differ from their copies, models first: a copy is then never behind what it needs."""
        names = []
        for prefix in ("", f"{SECOND_STAGE}/"):
            if self.with_epochs:
                paths = [*epoch_paths(self.folder / prefix), self.folder / prefix / CHECKPOINTS / AVERAGE]
                names += [path.relative_to(self.folder).as_posix() for path in paths]
            names += [prefix + name for name in (BEST, LAST, CONFIG, *EVALUATION_FILES, *GROWING)]
        states = {name: _state_of(self.folder / name) for name in names}
        changed = [name for name, state in states.items() if state is not None and self._copied.get(name) != state]
        if is_end or any(name.endswith(".pt") for name in changed):
            return changed
        return [name for name in changed if not name.endswith(GROWING)]


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
                raise RemoteError(f"a file is named {name!r}, which is outside the run folder")
        # Last of all the one that makes it a run: a fetch that was cut off is repeated.
        for name in sorted(names, key=lambda name: (name == LAST, name)):
            _fetch(system, f"{root}/{name}", folder / name)
        if LAST not in names and PREVIOUS in names:
            # The copy of last.pt was cut off between its two names.
            (folder / PREVIOUS).rename(folder / LAST)
    except Exception as error:
        raise RemoteError(
            f"training.mirror: {address} cannot be read ({error_line(error)}), so it is not known whether there is a "
            "run to resume; correct it, or give --training.mirror '' to begin without"
        ) from error
    if names:
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        size = f"{counted(len(names), 'file')} ({human_bytes(num_bytes)})"
        logger.info("%s: %s fetched from %s", folder, size, address)
    return (folder / LAST).exists()


def _fetch(system: Any, source: str, target: Path) -> None:
    with system.open(source, "rb") as content, atomic_write(target, "wb") as copy:
        while block := content.read(BLOCK_BYTES):
            copy.write(block)


@contextlib.contextmanager
def mirrored(address: str, folder: str | Path, *, with_epochs: bool) -> Iterator[None]:
    """Keep copies of a run folder at an address while the block runs; an empty one keeps none."""
    with Mirror(folder, address, with_epochs=with_epochs) if address else contextlib.nullcontext():
        yield


def _state_of(path: Path) -> tuple[int, int] | None:
    """By which a changed file is known; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
