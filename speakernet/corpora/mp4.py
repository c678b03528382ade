"""How long an MPEG-4 file (m4a, mp4) lasts, from its header: two small reads, no decoder."""

import struct
from pathlib import Path
from typing import BinaryIO

MAX_BOXES = 10_000


def mp4_seconds(path: str | Path) -> float | None:
    """Duration in seconds from the movie header (`moov`/`mvhd`), or None where there is no whole header.

    Source: ISO/IEC 14496-12, 8.2.2.
    """
    with Path(path).open("rb") as file:
        num_bytes = file.seek(0, 2)
        movie = _find(file, b"moov", 0, num_bytes)
        header = _find(file, b"mvhd", *movie) if movie is not None else None
        if header is None:
            return None
        file.seek(header[0])
        content = file.read(32)
        if len(content) < 32:
            return None
        # Version 1 has 64-bit times; after the two times come the clock rate and the duration.
        timescale, duration = struct.unpack(">IQ", content[20:32]) if content[0] == 1 else _short(content)
        return duration / timescale if timescale else None


def _short(content: bytes) -> tuple[int, int]:
    timescale, duration = struct.unpack(">II", content[12:20])
    return timescale, duration


def _find(file: BinaryIO, kind: bytes, start: int, end: int) -> tuple[int, int] | None:
    """Where the content of the first box of that kind begins and ends, among the boxes between `start` and `end`."""
    position = start
    for _ in range(MAX_BOXES):
        file.seek(position)
        header = file.read(16)
        if len(header) < 8 or position >= end:
            return None
        size, name = struct.unpack(">I4s", header[:8])
        content = position + 8
        if size == 1 and len(header) == 16:
            (size,) = struct.unpack(">Q", header[8:])
            content = position + 16
        elif size == 0:
            size = end - position
        if size < content - position or position + size > end:
            return None
        if name == kind:
            return content, position + size
        position += size
    return None
