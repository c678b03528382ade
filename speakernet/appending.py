"""Files that grow while a run lasts: its log, its metrics, its curves. A full disk costs their lines, never the run."""

import contextlib
import logging
import os
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)


class GrowingFile:
    """Bytes appended to a file, each piece whole or not at all; what cannot be written is dropped.

    The first failure is said; later pieces are tried all the same, since the disk may have room again. The file, with
    its folder, is made with the first piece. Every piece reaches the system before `append` returns, so that a killed
    run keeps it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: BinaryIO | None = None
        self._has_failed = False

    def append(self, content: bytes) -> bool:
        """Write a piece at the end; returns whether it is there now."""
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("ab", buffering=0)  # type: ignore[assignment]
            assert self._file is not None
            _write_whole(self._file, content)
        except OSError as error:
            self.close()
            if not self._has_failed:
                # Before it is said: what is said goes to the log, which may be this very file.
                self._has_failed = True
                reason = error.strerror or str(error)
                logger.warning(
                    "%s cannot be written (%s): what belongs there is dropped, the run goes on", self.path, reason
                )
            return False
        return True

    def close(self) -> None:
        """Let go of the file; another piece opens it again."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def _write_whole(file: BinaryIO, content: bytes) -> None:
    """Write all of it, or leave the file as it was.

    Raises:
        OSError: the disk is full or broken.
    """
    before = os.fstat(file.fileno()).st_size
    left = memoryview(content)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        # Half a line would spoil the next one, half a record all that follow.
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), before)
        raise
