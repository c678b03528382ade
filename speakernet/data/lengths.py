"""How long compressed audio is, where its header only guesses, and a header that tells libsndfile
the truth.

Used by `audio.py` alone. MP3 without a length, FLAC of unknown length (both written to a pipe),
joined MP3 and chained Ogg: libsndfile believes the header, or estimates from the size of the file,
and stops there. The scans here read frame and page headers and decode nothing. `with_length` shows
libsndfile the same bytes behind a header with the right number of samples, so that its seeking
still works.
"""

import io
import os
import re
import struct
import threading
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

BLOCK_BYTES = 1 << 18  # read at once while scanning
MPEG_BITRATES = {
    # (is MPEG 1, layer): kbit/s by index; index 0 is a free format, which libsndfile cannot read.
    (True, 2): (0, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 3): (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 2): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (False, 3): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
MPEG_RATES = {
    3: (44100, 48000, 32000),
    2: (22050, 24000, 16000),
    0: (11025, 12000, 8000),
}  # by version bits
_BIT_RATES_AND_RATES = b"".join(b"\\x%x0-\\x%xb" % (index, index) for index in range(1, 15))
MPEG_SYNC = re.compile(
    rb"\xff[\xe2-\xe5\xf2-\xf5\xfa-\xfd][" + _BIT_RATES_AND_RATES + rb"].", re.DOTALL
)
FRAMES_TO_CONFIRM = 3  # in a row: eleven bits of a sync word occur by chance in tags and pictures
DECODER_DELAY = 529  # samples that an MP3 decoder drops at the start, if the file has a length
XING_BYTES = 16  # "Xing", flags and number of frames, and room for "LAME"
TAIL_BYTES = 2880  # the longest frame; a Xing header may or may not count its own
OGG_PAGE = re.compile(b"OggS")
OGG_CONTINUED = 1
OGG_FIRST = 2
OGG_LAST = 4
FLAC_TOTAL = slice(
    21, 26
)  # 4 bits of something else and 36 bits: samples in STREAMINFO, 0 if unknown
# Chunks that recorders write behind the samples.
TRAILING_CHUNKS = re.compile(
    rb"LIST|id3 |ID3 |_PMX|bext|iXML|axml|cue |smpl|fact|JUNK|junk|PAD |FLLR|afsp|acid|inst|MD5 "
)
TRAILING_BYTES = 1 << 20  # in which they are looked for
# RIFF sizes that programs leave if they cannot seek back: SoX 0x7ffff000, arecord 0x80000000,
# ffmpeg 0xffffffff, others these less the size of a header.
PIPE_SIZES = ((0x7FFF0000, 0x8000FFFF), (0xFFFF0000, 0xFFFFFFFF))
NOTED_SIZE = re.compile(r": (\d+) \(should be (\d+)\)")  # in libsndfile's log


def is_pipe_size(size: int) -> bool:
    """Whether a size in a RIFF header is what a program leaves that writes to a pipe."""
    return any(low <= size <= high for low, high in PIPE_SIZES)


def view(file: IO[bytes], head: bytes = b"", start: int = 0) -> io.BufferedReader:
    """A file to read: `head`, then the bytes from `start` on of an open file.

    It has a position of its own, so several threads, and processes after a fork, may view the same
    file.
    """
    return io.BufferedReader(_View(file, head, start))


class _View(io.RawIOBase):
    """What `view` returns, without its buffer."""

    def __init__(self, file: IO[bytes], head: bytes = b"", start: int = 0) -> None:
        super().__init__()
        self._file = file
        self._head = head
        self._start = start
        with _SEEKING:
            self._size = len(head) + max(0, file.seek(0, io.SEEK_END) - start)
        self._position = 0
        try:
            self._descriptor = file.fileno() if hasattr(os, "pread") else -1
        except OSError:
            # In memory.
            self._descriptor = -1

    def readable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def seekable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See `io.IOBase`."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def tell(self) -> int:
        """See `io.IOBase`."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`."""
        wanted = len(buffer)
        content = self._head[self._position : self._position + wanted]
        if len(content) < wanted:
            place = self._start + self._position + len(content) - len(self._head)
            content += self._read_at(place, wanted - len(content))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _read_at(self, place: int, count: int) -> bytes:
        if self._descriptor >= 0:
            return os.pread(self._descriptor, count, place)
        with _SEEKING:
            self._file.seek(place)
            return self._file.read(count)


_SEEKING = threading.Lock()


class _Scanner:
    """Bytes of a file at any position, read in blocks."""

    def __init__(self, file: IO[bytes]) -> None:
        self.size = file.seek(0, io.SEEK_END)
        self._file = file
        self._start = 0
        self._block = b""

    def bytes_at(self, position: int, count: int) -> bytes:
        begin = position - self._start
        if not 0 <= begin <= len(self._block) - count:
            self._file.seek(position)
            self._start, self._block, begin = position, self._file.read(max(count, BLOCK_BYTES)), 0
        return self._block[begin : begin + count]

    def find(self, mark: re.Pattern[bytes], position: int) -> int:
        """Where `mark`, of four bytes, is next; the end of the file if nowhere."""
        while position < self.size:
            block = self.bytes_at(position, BLOCK_BYTES)
            if match := mark.search(block):
                return position + match.start()
            position += max(1, len(block) - 3)
        return self.size


@dataclass(frozen=True)
class MpegHeader:
    """What the four bytes before a frame of MPEG audio say."""

    version: int
    layer: int
    sample_rate: int
    is_mono: bool
    frame_bytes: int
    frame_samples: int

    @property
    def kind(self) -> tuple[int, int, int]:
        """What cannot change within a file."""
        return self.version, self.layer, self.sample_rate

    @property
    def side_bytes(self) -> int:
        """Bytes between the header and a Xing header (layer 3)."""
        if self.version == 3:
            return 17 if self.is_mono else 32
        return 9 if self.is_mono else 17


def mpeg_header(raw: bytes) -> MpegHeader | None:
    """Read the four bytes before a frame of MPEG audio, layer 2 or 3; None if they are something
    else.
    """
    if len(raw) < 4 or raw[0] != 0xFF or raw[1] < 0xE0:
        return None
    version = raw[1] >> 3 & 3
    layer = 4 - (raw[1] >> 1 & 3)
    bitrate_index = raw[2] >> 4
    rate_index = raw[2] >> 2 & 3
    padding = raw[2] >> 1 & 1
    if version == 1 or layer not in (2, 3) or bitrate_index in (0, 15) or rate_index == 3:
        return None
    sample_rate = MPEG_RATES[version][rate_index]
    frame_samples = 576 if layer == 3 and version != 3 else 1152
    bits_per_second = 1000 * MPEG_BITRATES[version == 3, layer][bitrate_index]
    frame_bytes = frame_samples // 8 * bits_per_second // sample_rate + padding
    return MpegHeader(version, layer, sample_rate, raw[3] >> 6 == 3, frame_bytes, frame_samples)


@dataclass(frozen=True)
class MpegFrames:
    """The sound in a file of MPEG audio."""

    first: bytes
    """The first frame's header."""
    start: int
    """Where the first frame of sound begins, behind a frame with a Xing header."""
    num_frames: int
    """Complete frames; -1 if the file's own header has the length."""
    is_cut: bool
    """Whether the last frame is incomplete."""

    @property
    def num_samples(self) -> int:
        """Samples in the complete frames, as a decoder gives them."""
        header = mpeg_header(self.first)
        assert header is not None, "it was read from the file"
        return self.num_frames * header.frame_samples - (DECODER_DELAY if header.layer == 3 else 0)


def mpeg_frames(file: IO[bytes], *, counts: bool = True) -> MpegFrames | None:
    """Find the frames of MPEG audio; None if the kind of the frames changes, or they are of another
    kind.

    Without `counts`, only the first frame is looked at.
    """
    scanner = _Scanner(file)
    position, header = _next_frame(scanner, _behind_tags(scanner, 0))
    if header is None:
        return None
    first = scanner.bytes_at(position, 4)
    kind = header.kind
    tag = scanner.bytes_at(position + 4 + header.side_bytes, 16)
    if tag[:4] in (b"Xing", b"Info") and len(tag) == 16:
        flags, _, num_bytes = struct.unpack(">III", tag[4:])
        if flags & 3 == 3 and not _has_frames_behind(scanner, position + num_bytes):
            return MpegFrames(first, position, -1, is_cut=False)
        # Joined files: the header counts the frames of the first one.
        position += header.frame_bytes
    start = position
    num_frames = 0
    is_cut = False
    while counts and position < scanner.size:
        header = mpeg_header(scanner.bytes_at(position, 4))
        if header is None:
            position, header = _next_frame(scanner, _behind_tags(scanner, position))
            if header is None:
                break
        if header.kind != kind:
            return None
        position += header.frame_bytes
        is_cut = position > scanner.size
        num_frames += not is_cut
    return MpegFrames(first, start, num_frames, is_cut)


def _has_frames_behind(scanner: _Scanner, position: int) -> bool:
    """Whether sound follows where a Xing header says that it ends, as in joined files."""
    if scanner.size - position <= TAIL_BYTES:
        return False
    return _next_frame(scanner, _behind_tags(scanner, position))[1] is not None


def _behind_tags(scanner: _Scanner, position: int) -> int:
    """The position behind any ID3v2 tags."""
    while (tag := scanner.bytes_at(position, 10))[:3] == b"ID3" and len(tag) == 10:
        size = 0
        for part in tag[6:]:
            size = size << 7 | part & 127
        position += 10 + size
    return position


def _next_frame(scanner: _Scanner, position: int) -> tuple[int, MpegHeader | None]:
    """Where the next frame is, and its header; the end of the file and None if there is none."""
    while (position := scanner.find(MPEG_SYNC, position)) < scanner.size:
        header = mpeg_header(scanner.bytes_at(position, 4))
        if header is not None and _has_followers(scanner, position + header.frame_bytes, header):
            return position, header
        position += 1
    return scanner.size, None


def _has_followers(scanner: _Scanner, position: int, header: MpegHeader) -> bool:
    """Whether frames of the same kind follow, or the file ends there."""
    for _ in range(FRAMES_TO_CONFIRM):
        if position >= scanner.size:
            return True
        follower = mpeg_header(scanner.bytes_at(position, 4))
        if follower is None or follower.kind != header.kind:
            return False
        position += follower.frame_bytes
    return True


def with_length(file: IO[bytes], format_name: str, num_samples: int) -> io.BufferedReader | None:
    """The same audio behind a header that says `num_samples`; None for formats without such a
    header.
    """
    if format_name == "flac":
        file.seek(0)
        head = bytearray(file.read(FLAC_TOTAL.stop))
        if head[:4] != b"fLaC":
            return None
        head[FLAC_TOTAL] = (head[FLAC_TOTAL.start] >> 4 << 36 | num_samples).to_bytes(5, "big")
        return view(file, bytes(head), len(head))
    frames = mpeg_frames(file, counts=False) if format_name == "mp3" else None
    header = mpeg_header(frames.first) if frames else None
    if frames is None or header is None or header.layer != 3:
        return None
    num_frames = -(-(num_samples + DECODER_DELAY) // header.frame_samples)
    return view(file, _xing_frame(frames.first, num_frames), frames.start)


def _xing_frame(first: bytes, num_frames: int) -> bytes:
    """A silent MP3 frame like the one with header `first`, which says how many frames follow."""
    raw = bytearray(first)
    raw[1] |= 1  # no checksum
    frame = b""
    for index in range(1, 15):
        raw[2] = index << 4 | raw[2] & 0x0D
        header = mpeg_header(bytes(raw))
        assert header is not None, "only the bit rate was changed"
        frame = bytes(raw) + bytes(header.side_bytes) + b"Xing" + struct.pack(">II", 1, num_frames)
        if header.frame_bytes >= len(frame) + XING_BYTES:
            return frame.ljust(header.frame_bytes, b"\0")
    raise AssertionError("the highest bit rate has room for it")


@dataclass(frozen=True)
class OggPages:
    """How an Ogg file is built."""

    is_chained: bool
    """Whether a second stream begins behind the first one; libsndfile reads the first only."""
    is_cut: bool
    """Whether the page is missing, or incomplete, that ends a stream."""


def ogg_pages(file: IO[bytes]) -> OggPages:
    """Go through the pages of an Ogg file."""
    scanner = _Scanner(file)
    position = flags = end = 0
    is_chained = has_sound = False
    while position < scanner.size:
        head = scanner.bytes_at(position, 27)
        if not OGG_PAGE.match(head) or len(head) < 27:
            position = scanner.find(OGG_PAGE, position + 1)
            continue
        flags = head[5]
        is_chained |= has_sound and bool(flags & OGG_FIRST)
        has_sound |= not flags & OGG_FIRST
        position = end = position + 27 + head[26] + sum(scanner.bytes_at(position + 27, head[26]))
    return OggPages(is_chained, is_cut=not flags & OGG_LAST or end > scanner.size)


def says_it_is_cut(file: IO[bytes], log: str) -> bool:
    """Whether the header claims more bytes than the file has; `log` is what libsndfile noted about
    it.
    """
    sizes = [(int(claimed), int(found)) for claimed, found in NOTED_SIZE.findall(log)]
    if any(claimed > found and not is_pipe_size(claimed) for claimed, found in sizes):
        return True
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    head = file.read(1024)
    if not head.startswith(b"NIST_1A"):
        return False
    # SPHERE: text, the header's own size in the second line.
    fields = dict(re.findall(rb"^(\w+) -i (\d+)", head, re.MULTILINE))
    names = (b"sample_count", b"channel_count", b"sample_n_bytes")
    num_bytes = int(head[8:16]) if head[8:16].strip().isdigit() else 0
    return (
        num_bytes + int(np.prod([int(fields.get(name, 0)) for name in names], dtype=np.float64))
        > size
    )


def end_of_samples(file: IO[bytes], offset: int, size: int) -> int:
    """Where the samples of a WAV end whose header does not say it: before well-formed chunks at the
    file's end.
    """
    start = max(offset, size - TRAILING_BYTES)
    file.seek(start)
    tail = file.read(size - start)
    end = len(tail)
    places = [match.start() for match in TRAILING_CHUNKS.finditer(tail)]
    for place in reversed(places):
        body = place + 8
        if body <= end:
            (length,) = struct.unpack("<I", tail[body - 4 : body])
            # Padded to an even length.
            if body + length in (end, end - length % 2):
                end = place
    return start + end
