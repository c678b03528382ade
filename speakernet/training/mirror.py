"""Copies a run elsewhere while it trains, so that another machine can resume it if its own is lost.

Every few seconds a thread checks which files of the run folder have changed, and copies them to a
folder or an fsspec address (`s3://…`, `gs://…`, `sftp://…`). Training does not wait for it, and its
errors do not end a run. Each file is copied under a temporary name and then renamed; the previous
last.pt is kept.
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

LOOK_SECONDS = 10.0
RETRY_SECONDS = 60.0
END_SECONDS = 600.0
"""How long the end of a run waits for the last copies."""
GROWING = (METRICS, LOG)
"""Files that change all the time: copied together with a checkpoint, and at the end."""
IGNORED_SUFFIXES = (".tmp", ".sha256")
"""Half-copied files, and the checksums that version 0.2 kept beside its copies."""


class RemoteError(FileError):
    """A mirror cannot be used; the message gives its address and the reason."""


@contextlib.contextmanager
def keep_mirror(address: str, folder: str | Path, *, with_epochs: bool) -> Iterator[None]:
    """Keep a copy of a run folder at an address while the block runs."""
    mirror = Mirror(Path(folder), address, with_epochs)
    # A daemon: a hanging file system must not keep the interpreter from exiting.
    thread = threading.Thread(target=mirror.run, name="mirror", daemon=True)
    thread.start()
    try:
        yield
    finally:
        mirror.is_over.set()
        thread.join(END_SECONDS)
        if missing := mirror.find_changed(is_end=True):
            logger.warning("training.mirror: not yet copied to %s: %s", address, ", ".join(missing))


# The order of copies is what makes a mirror resumable: models before the files that speak of them,
# each under a temporary name first, and the old last.pt is kept until the new one has its name. A
# copy that failed is tried again as long as the file differs from what was copied last, so nothing
# has to be remembered beyond the times and sizes of the copies.
class Mirror:
    """Copies the files of a run folder until `is_over` is set."""

    def __init__(self, folder: Path, address: str, with_epochs: bool) -> None:
        self.folder = folder
        self.address = address
        self.with_epochs = with_epochs
        self.system, self.root = open_remote(address, folder)
        self.is_over = threading.Event()
        self._copied: dict[str, tuple[int, int]] = {}

    def run(self) -> None:
        """Copy changed files every few seconds, and once more at the end."""
        delay = LOOK_SECONDS
        is_end = False
        while not is_end:
            is_end = self.is_over.wait(delay)
            try:
                self._copy_all(is_end)
                delay = LOOK_SECONDS
            except Exception as error:
                # Every file system raises its own errors, and none of them is a reason to end a
                # run.
                if delay == LOOK_SECONDS:
                    reason = error_line(error)
                    logger.warning(
                        "training.mirror: cannot write to %s, will retry (%s)", self.address, reason
                    )
                delay = RETRY_SECONDS

    def find_changed(self, *, is_end: bool) -> list[str]:
        """Files that differ from their copies, models first, so that no copy refers to a model not
        yet copied.
        """
        paths: list[Path] = []
        for folder in (self.folder, *later_stages(self.folder).values()):
            if self.with_epochs:
                paths += [*epoch_paths(folder), folder / CHECKPOINTS / AVERAGE]
            names = (BEST, LAST, CONFIG, *EVALUATION_FILES, *GROWING)
            paths += [folder / name for name in names]
        changed = []
        for path in paths:
            name = path.relative_to(self.folder).as_posix()
            if self._state_of(name) not in (None, self._copied.get(name)):
                changed.append(name)
        if is_end or any(name.endswith(".pt") for name in changed):
            return changed
        return [name for name in changed if not name.endswith(GROWING)]

    def _copy_all(self, is_end: bool) -> None:
        for name in self.find_changed(is_end=is_end):
            folder, base = posixpath.split(f"{self.root}/{name}")
            temporary = f"{folder}/.{base}.tmp"
            self.system.makedirs(folder, exist_ok=True)
            state = self._state_of(name)
            if state is None:
                continue
            self.system.put_file(str(self.folder / name), temporary)
            if base == LAST and self.system.exists(f"{folder}/{base}"):
                self.system.mv(f"{folder}/{base}", f"{folder}/{PREVIOUS}")
            self.system.mv(temporary, f"{folder}/{base}")
            self._copied[name] = state
        for name in list(self._copied):
            if self._state_of(name) is None:
                self.system.rm_file(f"{self.root}/{name}")
                del self._copied[name]

    def _state_of(self, name: str) -> tuple[int, int] | None:
        """Modification time and size, which show a change; None if there is no file."""
        try:
            status = (self.folder / name).stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size


def open_remote(address: str, folder: Path) -> tuple[Any, str]:
    """The fsspec file system of an address and the path in it; refuses the run folder itself."""
    try:
        system, root = url_to_fs(address, use_listings_cache=False)
    except Exception as error:
        # Every file system raises its own errors for a bad address or a missing key or package.
        raise RemoteError(
            f"training.mirror: {address}: {error_line(error)}; expected a folder or an address "
            "that fsspec supports"
        ) from error
    if isinstance(system, LocalFileSystem) and Path(root).resolve() == folder.resolve():
        raise RemoteError(
            f"training.mirror: {address} is the run folder itself; expected a different folder"
        )
    return system, root.rstrip("/")


def fetch_run(address: str, folder: str | Path) -> bool:
    """Copy a run from its mirror into a run folder without a last.pt; returns whether that gave it
    one.

    A run folder with a last.pt is left alone, because the run resumes from there.
    """
    folder = Path(folder)
    if (folder / LAST).exists():
        return False
    system, root = open_remote(address, folder)
    try:
        paths = system.find(root) if system.exists(root) else []
        begin = len(system._strip_protocol(root).rstrip("/")) + 1
        names = [path[begin:] for path in paths if not path.endswith(IGNORED_SUFFIXES)]
        for name in names:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise RemoteError(f"{name!r} is a path outside the run folder")
        # last.pt comes last, so that an interrupted fetch is repeated.
        for name in sorted(names, key=lambda name: (name == LAST, name)):
            with (
                system.open(f"{root}/{name}", "rb") as content,
                atomic_write(folder / name, "wb") as copy,
            ):
                shutil.copyfileobj(content, copy)
        if LAST not in names and PREVIOUS in names:
            # Mirroring was interrupted between the two renames of last.pt.
            (folder / PREVIOUS).rename(folder / LAST)
    except Exception as error:
        raise RemoteError(
            f"training.mirror: cannot read {address} ({error_line(error)}), so it is unknown "
            "whether there is a run to resume; correct the address, or use --training.mirror '' to "
            "start without a mirror"
        ) from error
    if names:
        logger.info("%s: fetched %s from %s", folder, counted(len(names), "file"), address)
    return (folder / LAST).exists()
