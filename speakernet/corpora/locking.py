"""One preparation at a time in one folder, and tidying up after one that was killed."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

from speakernet.corpora.safe_paths import remove_leftovers

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)

LOCK_NAME = ".preparing.lock"
KILLED_MARK = b"running"


@contextlib.contextmanager
def exclusive(folder: str | Path) -> Iterator[None]:
    """Hold the folder's lock while the block runs; the system drops it when the process dies.

    The lock file says `running` until the block ends: one that still says so was left by a killed run, and its
    half-written files are removed first. On Windows nothing is locked: there the user must not start two at once.

    Raises:
        ValueError: another process prepares data in the same folder now.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_NAME).open("a+b") as file:
        if sys.platform != "win32":
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(
                    f"another process is preparing data in {folder}; wait for it or end it, then run this again"
                ) from error
        file.seek(0)
        if file.read() == KILLED_MARK:
            logger.info("the last run was killed; removed %d half-written files", remove_leftovers(folder))
        else:
            file.write(KILLED_MARK)
            file.flush()
        try:
            yield
        finally:
            file.truncate(0)
