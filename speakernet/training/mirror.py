"""Copies of a run elsewhere, made beside the training: a run whose machine is gone goes on from them on another.

A thread looks every few seconds which files of the run folder have changed, and copies those (`speakernet.remote`). The
training neither waits for it nor ends with it: a folder that fails or does not answer is told once and tried again.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speakernet.files import error_line, human_bytes
from speakernet.remote import LocalFolder, RemoteError, RemoteFolder, open_remote
from speakernet.run_folder import (
    AVERAGE,
    BEST,
    CHECKPOINTS,
    CONFIG,
    EVALUATION_FILES,
    LAST,
    LOG,
    METRICS,
    SECOND_STAGE,
    epoch_paths,
)

logger = logging.getLogger(__name__)

LOOK_SECONDS = 10.0
SILENT_SECONDS = 120.0
"""Without a byte moved for so long a copy counts as hanging."""
RETRY_SECONDS = 60.0
"""Until it is tried again after a failure; twice as long after each further one."""
LONGEST_RETRY_SECONDS = 3600.0
LAST_TRY_SECONDS = 10.0

GROWING = (METRICS, LOG)
"""Files that change at every moment: copied together with a checkpoint, and at the end."""


class _GivenUp(Exception):
    """Nobody waits for this copy any more."""


class Mirror:
    """Copies of what a run folder holds; use it as a context manager around the run.

    Args:
        folder: the run folder.
        remote: where the copies go.
        with_epochs: copy the models of epochs too, which the end of the run will average.
        look_seconds: between two looks at the run folder.
        silent_seconds: see `SILENT_SECONDS`.
        retry_seconds: see `RETRY_SECONDS`.
    """

    def __init__(
        self,
        folder: str | Path,
        remote: RemoteFolder,
        *,
        with_epochs: bool = False,
        look_seconds: float = LOOK_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self.folder, self.remote, self.with_epochs = Path(folder), remote, with_epochs
        self._look_seconds, self._silent_seconds = look_seconds, silent_seconds
        self._retry_seconds = retry_seconds
        self._copied: dict[str, tuple[int, int]] = {}
        self._is_told = False
        self._is_over = threading.Event()
        # Daemons: a folder that hangs must not keep the interpreter from ending.
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def __enter__(self) -> "Mirror":
        self._thread.start()
        return self

    def __exit__(self, *_error: Any) -> None:
        """Copy what is new, for as long as bytes move; a warning names what was not copied."""
        self._is_over.set()
        self._thread.join()
        if missing := self._changed(is_end=True):
            logger.warning("training.mirror: %s lacks the last of %s", self.remote.address, ", ".join(missing))

    def _run(self) -> None:
        delay, is_end = self._look_seconds, False
        while not is_end:
            is_end = self._is_over.wait(delay)
            problem = self._copy_all(is_end)
            if problem is None:
                if self._is_told:
                    logger.info("training.mirror: %s is written again", self.remote.address)
                self._is_told, delay = False, self._look_seconds
                continue
            if not self._is_told:
                logger.warning(
                    "training.mirror: %s cannot be written (%s); the run goes on without, and tries it again later",
                    self.remote.address,
                    problem,
                )
            delay = min(2 * delay, LONGEST_RETRY_SECONDS) if self._is_told else self._retry_seconds
            self._is_told = True

    def _copy_all(self, is_end: bool) -> str | None:
        """Copy what has changed; what went wrong, None where nothing did."""
        names = self._changed(is_end)
        if not names and not self._gone():
            return None
        # At the end of the run one that has hung before is waited for no longer than a moment.
        patience = min(self._silent_seconds, LAST_TRY_SECONDS) if is_end and self._is_told else self._silent_seconds
        copy = _Copy(self, names)
        copy.start()
        while copy.is_alive():
            copy.join(timeout=min(1.0, patience))
            if copy.is_alive() and copy.silent_seconds > patience:
                copy.is_given_up = True
                return f"nothing was copied for {patience:g} seconds"
        return copy.problem

    def _changed(self, is_end: bool) -> list[str]:
        """Files that are not there as they are here, models first: what is there is then never behind what it needs."""
        found = {name: state for name in self._names() if (state := _state_of(self.folder / name)) is not None}
        changed = [name for name, state in found.items() if self._copied.get(name) != state]
        if is_end or any(name.endswith(".pt") for name in changed):
            return changed
        return [name for name in changed if not name.endswith(GROWING)]

    def _names(self) -> Iterator[str]:
        for prefix in ("", f"{SECOND_STAGE}/"):
            if self.with_epochs:
                yield from self._epochs(prefix)
            for name in (BEST, LAST, CONFIG, *EVALUATION_FILES, *GROWING):
                yield prefix + name

    def _epochs(self, prefix: str) -> list[str]:
        paths = [*epoch_paths(self.folder / prefix), self.folder / prefix / CHECKPOINTS / AVERAGE]
        return [path.relative_to(self.folder).as_posix() for path in paths]

    def _gone(self) -> list[str]:
        """Copies of files that the run has removed."""
        return [name for name in self._copied if not (self.folder / name).exists()]


class _Copy(threading.Thread):
    """One round of copies, which whoever waits for it may give up."""

    def __init__(self, mirror: Mirror, names: list[str]) -> None:
        super().__init__(name="mirror-copy", daemon=True)
        self._mirror, self._names = mirror, names
        self._moved_at = time.monotonic()
        self.is_given_up = False
        self.problem: str | None = None

    @property
    def silent_seconds(self) -> float:
        """Since the last byte moved."""
        return time.monotonic() - self._moved_at

    def run(self) -> None:
        """Copy them in order."""
        mirror = self._mirror
        try:
            for name in self._names:
                path = mirror.folder / name
                state = _state_of(path)
                if state is None:
                    continue
                mirror.remote.put(path, name, self._moved)
                self._moved(0)
                mirror._copied[name] = state
            for name in mirror._gone():
                mirror.remote.drop(name)
                mirror._copied.pop(name, None)
        except _GivenUp:
            logger.debug("a copy to %s that hung has ended", mirror.remote.address)
        except Exception as error:
            # Every file system has errors of its own, and none of them is a reason to end a run.
            self.problem = error_line(error)

    def _moved(self, _num_bytes: int) -> None:
        self._moved_at = time.monotonic()
        if self.is_given_up:
            raise _GivenUp


def fetch_run(address: str, folder: str | Path, silent_seconds: float = SILENT_SECONDS) -> bool:
    """Fill an empty run folder with what its mirror holds; returns whether there was anything.

    A run folder with a last.pt of its own goes on from that one, and nothing is asked.

    Raises:
        RemoteError: the mirror cannot be read, so that the run would begin anew over its own copies.
    """
    folder = Path(folder)
    if (folder / LAST).exists():
        return False
    remote = _open_beside(address, folder)
    names: list[str] = []
    fetched: list[str] = []
    failures: list[BaseException] = []
    moved_at = [time.monotonic()]

    def moved(_num_bytes: int) -> None:
        moved_at[0] = time.monotonic()

    def fetch() -> None:
        try:
            # Last of all what says that there is a run: a fetch that was cut off is begun again.
            names.extend(sorted(remote.names(), key=lambda name: (name == LAST, name)))
            for name in names:
                moved(0)
                if remote.get(name, folder / name, moved) is not None:
                    fetched.append(name)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=fetch, name="mirror-fetch", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(timeout=min(1.0, silent_seconds))
        if thread.is_alive() and time.monotonic() - moved_at[0] > silent_seconds:
            failures.append(TimeoutError(f"no answer for {silent_seconds:g} seconds"))
            break
    if failures:
        raise RemoteError(
            f"training.mirror: {address} cannot be read ({error_line(failures[0])}), so it is not known whether there "
            "is a run to go on from; mend it, or give --training.mirror '' to begin without"
        ) from failures[0]
    if LAST in names and LAST not in fetched:
        raise RemoteError(
            f"training.mirror: {address} holds a {LAST}, but neither it nor the one before is whole; remove it "
            "there to begin anew, or take another address"
        )
    if fetched:
        num_bytes = sum((folder / name).stat().st_size for name in fetched)
        logger.info("%s: %d files (%s) were fetched from %s", folder, len(fetched), human_bytes(num_bytes), address)
    return LAST in fetched


@contextlib.contextmanager
def mirrored(address: str, folder: str | Path, *, with_epochs: bool) -> Iterator[None]:
    """Keep copies of a run folder at an address while the block runs; an empty one keeps none.

    Raises:
        RemoteError: an address that nothing here can use.
    """
    if not address:
        yield
        return
    with Mirror(folder, _open_beside(address, folder), with_epochs=with_epochs):
        yield


def _open_beside(address: str, folder: str | Path) -> RemoteFolder:
    remote = open_remote(address)
    if isinstance(remote, LocalFolder) and remote.root.resolve() == Path(folder).resolve():
        raise RemoteError(f"training.mirror: {address} is the run folder itself; expected another folder")
    return remote


def _state_of(path: Path) -> tuple[int, int] | None:
    """By which a changed file is known; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
