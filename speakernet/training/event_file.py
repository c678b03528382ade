"""An event file for TensorBoard, written without a thread.

TensorBoard's own writer hands records to a thread, which ends with a traceback where the disk is full, and holds them
for two minutes, which a killed run would lose. The format is TensorBoard's, so are the classes that encode it.
Importing this file imports TensorBoard, which takes a second: whoever needs it imports it late.
"""

import os
import socket
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

from speakernet.files import GrowingFile

FILE_VERSION = "brain.Event:2"


class EventFile:
    """One event file of a run folder.

    Args:
        folder: the run folder.
        step: optimizer steps done; what an earlier file has of later ones is hidden.
    """

    def __init__(self, folder: Path, step: int) -> None:
        # The name that TensorBoard looks for; host, process and number keep two starts within a second apart.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        number = sum(1 for _ in folder.glob(f"{name}.*")) if folder.is_dir() else 0
        self._file = GrowingFile(folder / f"{name}.{number}")
        self._first_step = step + 1
        self._is_begun = self._begin()

    def add(self, summary: Summary, step: int, moment: float | None = None) -> None:
        """Append a summary of a step; `moment` is when it was taken, now by default."""
        self._is_begun = self._is_begun or self._begin()
        if self._is_begun:
            self._append({"step": step, "summary": summary, "wall_time": moment or time.time()})

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _begin(self) -> bool:
        """What every event file begins with, and from which step on it replaces earlier ones."""
        start = SessionLog(status=SessionLog.START)
        return self._append({"file_version": FILE_VERSION}, {"step": self._first_step, "session_log": start})

    def _append(self, *events: dict[str, Any]) -> bool:
        pieces = _Pieces()
        encoder = RecordWriter(pieces)
        for event in events:
            encoder.write(Event(**{"wall_time": time.time(), **event}).SerializeToString())
        return self._file.append(b"".join(pieces))


class _Pieces(list[bytes]):
    """What TensorBoard's encoder takes for a file."""

    def write(self, content: bytes) -> None:
        self.append(content)
