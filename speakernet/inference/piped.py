"""Audio that comes through a pipe: a WAV of plain samples, as recorders write it while they record, piece by piece."""

import io
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from speakernet.data.audio import SAMPLE_BYTES, AudioError, decode_pcm
from speakernet.data.riff import RiffError, RiffInfo, parse_riff

HEADER_BYTES = 4096
"""In which the samples of a piped WAV have to begin; recorders write some dozen bytes before them."""
NO_END = 1 << 62
CHUNK_SECONDS = 0.1
NAME = "standard input"


def open_piped(file: BinaryIO) -> tuple[RiffInfo, bytes]:
    """Read the header of a WAV that is still being written; gives its layout and the samples that were read with it.

    Raises:
        AudioError: nothing came, or something else than a WAV of plain samples.
    """
    head = b""
    # Read to a full header: a pipe gives what is there, which may be less.
    while len(head) < HEADER_BYTES and (part := file.read(HEADER_BYTES - len(head))):
        head += part
    if not head:
        raise AudioError(f"{NAME} is empty; pipe a WAV into it, such as `arecord -f S16_LE -r 16000 -t wav |`")
    try:
        info = parse_riff(io.BytesIO(head), NO_END)
    except RiffError as error:
        raise AudioError(f"{NAME}: broken WAV: {error}") from error
    if info is None or info.data_offset > len(head):
        raise AudioError(f"{NAME}: no WAV of plain samples; convert it on the way, such as `ffmpeg -i FILE -f wav - |`")
    return info, head[info.data_offset :]


def chunks_of(file: BinaryIO, info: RiffInfo, begun: bytes) -> Iterator[np.ndarray]:
    """The samples as they come, (samples, channels) float32, until the pipe ends."""
    frame_bytes = SAMPLE_BYTES[info.format] * info.num_channels
    wanted = max(1, round(CHUNK_SECONDS * info.sample_rate)) * frame_bytes
    held = begun
    while True:
        whole = len(held) // frame_bytes * frame_bytes
        if whole:
            yield decode_pcm(held[:whole], info.format).reshape(-1, info.num_channels)
            held = held[whole:]
        part = file.read(wanted)
        if not part:
            return
        held += part
