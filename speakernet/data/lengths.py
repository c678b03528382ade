"""How long compressed audio is if its header only guesses, and a header that tells libsndfile the
truth.

Used by `audio.py` alone. The scans here read frame and page headers and decode nothing.
"""

import io
import math
import re
import struct
from dataclasses import dataclass
from typing import IO

# Crops are drawn from lengths, so a wrong length is a wrong corpus: speech that is never trained
# on, or crops of silence. Most headers say the truth. These do not:
#
#   MP3 without a Xing frame     an encoder that writes to a pipe cannot go back and fill it in;
#                                libsndfile estimates from the first bit rate and stops there
#   joined MP3 (cat a.mp3 b.mp3) the Xing frame of the first file counts only its own frames
#   FLAC of unknown length       0 in the header, also from a pipe
#   chained Ogg                  libsndfile reads the first stream only; ffmpeg decodes such a file
#   WAV from a pipe              a size near 2 or 4 GB, or 0 (`audio.parse_riff`)
#
# The number found once is kept in the lookup table. It does not help by itself, because libsndfile
# still believes the header and neither seeks nor reads beyond it. So `with_length` gives it the
# same bytes behind a header with the right number, in memory: such files are rare and mostly short.
# What remains in doubt is the start of an MP3: decoders differ by up to 1,105 samples in what they
# drop there; we follow libsndfile (`DECODER_DELAY`), which is what reads the crops.

BLOCK_BYTES = 1 << 18  # read at once while scanning
LOW_BITRATES = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
MPEG_BITRATES = {
    # (is MPEG 1, layer): kbit/s by index; index 0 is a free format, which libsndfile cannot read.
    (True, 2): (0, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 3): (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 2): LOW_BITRATES,
    (False, 3): LOW_BITRATES,
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


def _size_of(file: IO[bytes]) -> int:
    return file.seek(0, io.SEEK_END)


def _bytes_at(file: IO[bytes], position: int, count: int) -> bytes:
    file.seek(position)
    return file.read(count)


def _find(file: IO[bytes], mark: re.Pattern[bytes], position: int) -> int:
    """Where `mark`, of four bytes, is next; the end of the file if nowhere."""
    while len(block := _bytes_at(file, position, BLOCK_BYTES)) >= 4:
        if match := mark.search(block):
            return position + match.start()
        position += len(block) - 3
    return _size_of(file)


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


def mpeg_frames(file: IO[bytes]) -> tuple[int | None, bool] | None:
    """Find the frames of MPEG audio: how many samples the complete ones have (None if the file's
    own header says it), and whether the last one is incomplete.

    Returns None if the kind of the frames changes, or they are of another kind.
    """
    position, header = _next_frame(file, 0)
    if header is None:
        return None
    first = header
    size = _size_of(file)
    tag = _bytes_at(file, position + 4 + header.side_bytes, XING_BYTES)
    if tag[:4] in (b"Xing", b"Info") and len(tag) == XING_BYTES:
        flags, _, num_bytes = struct.unpack(">III", tag[4:])
        end = position + num_bytes
        if flags & 3 == 3 and (size - end <= TAIL_BYTES or _next_frame(file, end)[1] is None):
            return None, False
        # Joined files: the header counts the frames of the first one.
        position += header.frame_bytes
    num_frames = 0
    is_cut = False
    while position < size:
        header = mpeg_header(_bytes_at(file, position, 4))
        if header is None:
            position, header = _next_frame(file, position)
        if header is None:
            break
        if header.kind != first.kind:
            return None
        position += header.frame_bytes
        is_cut = position > size
        num_frames += not is_cut
    delay = DECODER_DELAY if first.layer == 3 else 0
    return num_frames * first.frame_samples - delay, is_cut


def _next_frame(file: IO[bytes], position: int) -> tuple[int, MpegHeader | None]:
    """Where the next frame is, and its header; the end of the file and None if there is none."""
    # Behind any ID3v2 tags, whose pictures may look like frames.
    while (tag := _bytes_at(file, position, 10))[:3] == b"ID3" and len(tag) == 10:
        size = 0
        for digit in tag[6:]:
            size = size << 7 | digit & 127
        position += 10 + size
    end = _size_of(file)
    while (position := _find(file, MPEG_SYNC, position)) < end:
        header = mpeg_header(_bytes_at(file, position, 4))
        if header is not None and _has_followers(file, position + header.frame_bytes, header):
            return position, header
        position += 1
    return end, None


def _has_followers(file: IO[bytes], position: int, header: MpegHeader) -> bool:
    """Whether frames of the same kind follow, or the file ends there."""
    for _ in range(FRAMES_TO_CONFIRM):
        raw = _bytes_at(file, position, 4)
        if not raw:
            return True
        follower = mpeg_header(raw)
        if follower is None or follower.kind != header.kind:
            return False
        position += follower.frame_bytes
    return True


def with_length(file: IO[bytes], format_name: str, num_samples: int) -> IO[bytes] | None:
    """The same audio behind a header that says `num_samples`; None for formats without such a
    header.
    """
    start = 0
    if format_name == "mp3":
        start, header = _next_frame(file, 0)
        if header is None or header.layer != 3:
            return None
        first = _bytes_at(file, start, 4)
        if _bytes_at(file, start + 4 + header.side_bytes, 4) in (b"Xing", b"Info"):
            # Of joined files: it counts only the first one.
            start += header.frame_bytes
        num_frames = -(-(num_samples + DECODER_DELAY) // header.frame_samples)
        return io.BytesIO(_xing_frame(first, num_frames) + _bytes_at(file, start, -1))
    content = bytearray(_bytes_at(file, 0, -1))
    if content[:4] != b"fLaC":
        return None
    content[FLAC_TOTAL] = (content[FLAC_TOTAL][0] >> 4 << 36 | num_samples).to_bytes(5, "big")
    return io.BytesIO(content)


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


def ogg_pages(file: IO[bytes]) -> tuple[bool, bool]:
    """Go through the pages of an Ogg file: whether a second stream begins behind the first one
    (libsndfile reads the first only), and whether the page that ends a stream is missing or
    incomplete.
    """
    size = _size_of(file)
    position = flags = end = 0
    is_chained = has_sound = False
    while position < size:
        head = _bytes_at(file, position, 27)
        if not OGG_PAGE.match(head) or len(head) < 27:
            position = _find(file, OGG_PAGE, position + 1)
            continue
        flags = head[5]
        is_chained |= has_sound and bool(flags & OGG_FIRST)
        has_sound |= not flags & OGG_FIRST
        position = end = position + 27 + head[26] + sum(file.read(head[26]))
    return is_chained, not flags & OGG_LAST or end > size


def says_it_is_cut(file: IO[bytes], log: str) -> bool:
    """Whether the header claims more bytes than the file has; `log` is what libsndfile noted about
    it.
    """
    for claimed, available in NOTED_SIZE.findall(log):
        if int(claimed) > int(available) and not is_pipe_size(int(claimed)):
            return True
    head = _bytes_at(file, 0, 1024)
    if not head.startswith(b"NIST_1A"):
        return False
    # SPHERE: text, the header's own size in the second line.
    fields = {b"": head[8:16].strip(), **dict(re.findall(rb"^(\w+) -i (\d+)", head, re.MULTILINE))}
    header_bytes, *factors = (
        int(fields.get(name, 0))
        for name in (b"", b"sample_count", b"channel_count", b"sample_n_bytes")
    )
    return header_bytes + math.prod(factors) > _size_of(file)


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
