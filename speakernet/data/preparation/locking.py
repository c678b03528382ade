"""One preparation at a time in one folder: a lock that the system itself drops when the process dies."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl

LOCK_NAME = ".preparing.lock"


@contextlib.contextmanager
def exclusive(folder: str | Path) -> Iterator[None]:
    """Hold the folder's lock while the block runs. A killed process leaves no lock behind.

    On Windows nothing is locked: there the scripts rely on the user not starting two at once.

    Raises:
        ValueError: another process prepares data in the same folder now.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_NAME).open("a") as file:
        if sys.platform != "win32":
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(
                    f"another process is preparing data in {folder}; wait for it or end it, then run this again"
                ) from error
        yield
