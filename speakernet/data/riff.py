"""Where the samples of a WAV file lie: the RIFF header, read without decoding anything.

Takes every layout that plain PCM and float WAV files come in: chunks before and after the samples, the extensible form,
RF64 and BW64 with 64-bit sizes, sizes left at 0 or 0xFFFFFFFF by a recorder that wrote to a pipe. What it does not know
(A-law, ADPCM, big-endian RIFX, not a WAV) it answers with None and leaves to soundfile.
"""

import struct
from dataclasses import dataclass
from typing import BinaryIO

PCM, IEEE_FLOAT, EXTENSIBLE = 0x0001, 0x0003, 0xFFFE
HEADER_BYTES = 4096  # Read at once; nearly every header fits, so that a file costs one read.
MAX_CHUNKS = 1024
MOST_CHANNELS = 1024  # as soundfile has it
# The last 14 bytes of the format GUIDs that stand for the plain format codes.
GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")
FORMATS = {
    (PCM, 8): "pcm_u8",
    (PCM, 16): "pcm_s16",
    (PCM, 24): "pcm_s24",
    (PCM, 32): "pcm_s32",
    (IEEE_FLOAT, 32): "float32",
    (IEEE_FLOAT, 64): "float64",
}


class RiffError(ValueError):
    """A file that says it is a WAV and is broken."""


@dataclass(frozen=True)
class RiffInfo:
    """Layout of the samples: `num_samples` a channel from byte `data_offset` on, interleaved."""

    format: str
    num_channels: int
    sample_rate: int
    num_samples: int
    data_offset: int
    is_truncated: bool


def parse_riff(file: BinaryIO, file_bytes: int) -> RiffInfo | None:
    """Find the samples of an open WAV file of `file_bytes` bytes; None when it is not a WAV of plain samples.

    A data chunk that promises more than the file holds is cut to what is there (`is_truncated`).

    Raises:
        RiffError: no format or no data chunk, or a format that contradicts itself.
    """
    head = file.read(HEADER_BYTES)
    if len(head) < 12 or head[:4] not in (b"RIFF", b"RF64", b"BW64") or head[8:12] != b"WAVE":
        return None
    long_data_bytes: int | None = None
    layout: tuple[str, int, int, int] | None = None
    position = 12
    for _ in range(MAX_CHUNKS):
        chunk = _bytes_at(file, head, position, 8)
        if len(chunk) < 8:
            break
        name, size = chunk[:4], struct.unpack("<I", chunk[4:])[0]
        body = position + 8
        if name == b"ds64":
            sizes = _bytes_at(file, head, body, 24)
            if len(sizes) == 24:
                long_data_bytes = struct.unpack("<Q", sizes[8:16])[0]
        elif name == b"fmt ":
            found = _parse_format(_bytes_at(file, head, body, min(size, 40)))
            if found is None:
                return None
            layout = found
        elif name == b"data":
            if layout is None:
                raise RiffError("the samples come before the 'fmt ' chunk")
            return _locate(layout, body, size, long_data_bytes, file_bytes)
        # Chunks are padded to an even length.
        position = body + size + (size & 1)
    raise RiffError("no 'fmt ' chunk" if layout is None else "no 'data' chunk: the file ends after its header")


def _bytes_at(file: BinaryIO, head: bytes, position: int, count: int) -> bytes:
    """`count` bytes from `position`, out of the header already read where they lie in it; short at the file's end."""
    if position + count <= len(head):
        return head[position : position + count]
    if len(head) < HEADER_BYTES:
        return head[position : position + count]
    file.seek(position)
    return file.read(count)


def _parse_format(body: bytes) -> tuple[str, int, int, int] | None:
    """(format, channels, rate, bytes a frame) of a 'fmt ' chunk; None for codings that soundfile must decode."""
    if len(body) < 16:
        raise RiffError(f"a 'fmt ' chunk of {len(body)} bytes; expected at least 16")
    code, channels, rate, _, frame_bytes, bits = struct.unpack("<HHIIHH", body[:16])
    if code == EXTENSIBLE:
        if len(body) < 40 or body[26:40] != GUID_TAIL:
            return None
        code = struct.unpack("<H", body[24:26])[0]
    name = FORMATS.get((code, bits))
    if name is None:
        return None
    if channels > MOST_CHANNELS:
        raise RiffError(f"{channels} channels; expected {MOST_CHANNELS} at most")
    if channels == 0 or rate == 0 or frame_bytes != channels * bits // 8:
        raise RiffError(
            f"{channels} channels of {bits} bits at {rate} Hz in frames of {frame_bytes} bytes: contradictory"
        )
    return name, channels, rate, frame_bytes


def _locate(
    layout: tuple[str, int, int, int], offset: int, size: int, long_size: int | None, file_bytes: int
) -> RiffInfo:
    name, channels, rate, frame_bytes = layout
    available = max(0, file_bytes - offset)
    if size == 0xFFFFFFFF and long_size is not None:
        size = long_size
    # 0 and 0xFFFFFFFF are what a recorder leaves that never came back to fill the size in: all the rest is samples.
    is_unfinished = size == 0xFFFFFFFF or (size == 0 and available > 0)
    usable = available if is_unfinished else min(size, available)
    is_truncated = not is_unfinished and size > available
    return RiffInfo(name, channels, rate, usable // frame_bytes, offset, is_truncated)
