"""Audio files: read a header, read a crop as float32, write a file.

What a file is, its content decides, never its name. PCM and float WAV files are read by seeking to
the samples; FLAC, OGG, MP3, A-law … go through soundfile's seek, behind a header with the right
length if their own only guesses (`lengths.py`). Only the crop is read. What soundfile cannot
read whole (m4a, aac, webm, video, chained Ogg …) is decoded by ffmpeg to 16 kHz, as in `prepare
folder`. Other rates are resampled, several channels mixed down. Positions and lengths passed in are
in samples at the requested rate. `sources.FolderRows` has its own faster path for plain 16-bit WAV
files.
"""

import base64
import bisect
import contextlib
import dataclasses
import functools
import io
import math
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import soundfile
from numpy import ndarray

from speakernet.data import lengths
from speakernet.data.ffmpeg import (
    FfmpegError,
    decode_to_file,
    find_ffmpeg,
    scratch_file,
)
from speakernet.distributed import CommandEnd
from speakernet.files import FileError, atomic_write, in_place_of_a_file, open_regular, reading

SAMPLE_RATE = 16_000  # Hz, by default


class PcmCoding(NamedTuple):
    """How samples are stored in a WAV file."""

    code: int
    """In the header, where 1 means integers and 3 floating point."""
    bits: int
    dtype: str
    """24 bits are widened to 32."""
    scale: float
    """Brings samples to -1..1."""


PCM_CODINGS = {
    "pcm_u8": PcmCoding(1, 8, "u1", 2.0**-7),
    "pcm_s16": PcmCoding(1, 16, "<i2", 2.0**-15),
    "pcm_s24": PcmCoding(1, 24, "<i4", 2.0**-31),
    "pcm_s32": PcmCoding(1, 32, "<i4", 2.0**-31),
    "float32": PcmCoding(3, 32, "<f4", 1.0),
    "float64": PcmCoding(3, 64, "<f8", 1.0),
}
SAMPLE_BYTES = {name: coding.bits // 8 for name, coding in PCM_CODINGS.items()}
# A header with a rate outside these bounds is broken; resampling from it would take filters of
# gigabytes.
LOWEST_RATE = 1_000
HIGHEST_RATE = 192_000
# 24 dB above full scale: no recording reaches it, and unscaled int16 samples go far beyond.
LOUDEST_SAMPLE = 16.0
WRITABLE = {".wav": "WAV", ".flac": "FLAC"}
READABLE_SUFFIXES = frozenset({
    ".wav", ".wave", ".w64", ".rf64", ".bwf", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".mp2",
    ".aif", ".aiff", ".aifc", ".au", ".snd", ".sph",
})  # fmt: skip
"""Suffixes of files with sound that need no ffmpeg, unless their content is something else."""
CONVERTIBLE_SUFFIXES = frozenset({
    ".m4a", ".m4b", ".caf", ".aac", ".mp4", ".m4v", ".3gp", ".3g2", ".mov", ".webm", ".weba",
    ".mka", ".mkv", ".wma", ".wmv", ".asf", ".amr", ".awb", ".ac3", ".eac3", ".dts", ".spx",
    ".wv", ".tta", ".ape", ".mpc", ".avi", ".mpg", ".mpeg", ".ts", ".m2ts", ".mts", ".flv",
    ".ogv", ".rm",
})  # fmt: skip
"""Suffixes of files with sound that ffmpeg decodes."""
AUDIO_SUFFIXES = READABLE_SUFFIXES | CONVERTIBLE_SUFFIXES
"""Suffixes that count as audio when a folder is searched; a file that is named by itself may have
any.
"""
# A file may decode to this much less than its container claims.
CUT_SHORT_SECONDS = 0.15
CUT_SHORT_SHARE = 0.01
KEPT_DECODED = 8  # files decoded by ffmpeg, on disk: a long recording is read window by window
KEPT_FACTS = 10_000  # headers of compressed files, so that a length is learned once in a process
FFMPEG = "ffmpeg"
"""Format of files that are decoded whole: 16 bits at `SAMPLE_RATE`, in a temporary file."""
HOPS_A_SECOND = 100  # frames of 10 ms
WINDOW_EXTRA_SECONDS = 0.015  # a window of 25 ms reaches 15 ms beyond its hop
MAX_SAMPLES_PER_BYTE = 8192
"""For any coding: FLAC packs 65,535 samples of silence into 14 bytes. A header that claims more is
broken.
"""
# That ffmpeg decodes: a broken time stamp may ask for years of silence.
LONGEST_SECONDS = 100 * 3600
UNKNOWN_FLAC = 1 << 62  # samples that libsndfile claims where FLAC says "unknown"
MAX_FLAC = (1 << 36) - 1
LAYER_2_SAMPLES = 1152  # of a frame
UNKNOWN_BYTES = 1 << 62
"""Size of a pipe."""
DECODED_AT_ONCE = 1 << 22  # samples allocated at once, since a header may claim any number
EXPECTED = "an audio file (WAV, FLAC, OGG, MP3 …); restore it, convert it again or leave it out"
# scipy's default filter reaches this many samples of the slower rate to each side.
RESAMPLER_REACH = 10
RIFF_KINDS = (b"RIFF", b"RF64", b"BW64")
EXTENSIBLE = 0xFFFE  # the code is in a GUID, which ends in these 14 bytes for plain codings
GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")
RIFF_HEADER_BYTES = 4096  # Read at once; nearly every header fits, so that a file costs one read.
CHUNK_BYTES = 48  # the longest chunk before the samples that is looked into, with its own header
MP3_LEAD_SAMPLES = 11520  # Ten frames: the bits of one begin up to 511 bytes before its place.
MAX_CHUNKS = 1024
MAX_CHANNELS = 1024  # soundfile's limit


class AudioError(FileError):
    """An audio file that cannot be read; the message names the file and what is wrong with it."""


class NoSpeechError(CommandEnd, AudioError):
    """A recording in which nobody speaks, so there is nothing to decide about."""

    exit_status = 2


@dataclass(frozen=True)
class AudioInfo:
    """The facts in a file's header."""

    num_samples: int
    sample_rate: int
    num_channels: int
    format: str
    data_offset: int
    """Byte offset of the samples if they can be read by seeking, else -1."""
    is_truncated: bool
    file_bytes: int
    modified_ns: int

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.num_samples / self.sample_rate

    def num_samples_at(self, sample_rate: int) -> int:
        """Samples after resampling to `sample_rate`."""
        return -(-self.num_samples * sample_rate // self.sample_rate)


def crop_samples(frames: int, sample_rate: int = SAMPLE_RATE) -> int:
    """Number of samples that give `frames` frames of 10 ms with a window of 25 ms.

    >>> crop_samples(200)
    32240
    """
    return round(frames * sample_rate / HOPS_A_SECOND) + round(WINDOW_EXTRA_SECONDS * sample_rate)


def audio_info(path: str | Path) -> AudioInfo:
    """Read a file's header; a file that only ffmpeg can read is decoded for this."""
    with open_audio(path) as (_, info):
        return info


@contextlib.contextmanager
def open_audio(
    path: str | Path, known: AudioInfo | None = None
) -> Iterator[tuple[IO[bytes], AudioInfo]]:
    """Open a file for `crop_of_file` and read its header, unless it is `known` and the file
    unchanged.

    A file that only ffmpeg can read is decoded first.
    """
    with reading(path, EXPECTED, AudioError), open_regular(path) as file:
        status = os.fstat(file.fileno())
        key = (str(path), status.st_size, status.st_mtime_ns)
        info = known
        if info is None or key[1:] != (info.file_bytes, info.modified_ns):
            info = _learned.get(key) or _learn(file, key)
        if info.format == FFMPEG:
            with _naming(path):
                decoded, _ = _decode_kept(*key)
            # A map has a position of its own, so that several threads may read the same file.
            content: Any = mmap.mmap(decoded.fileno(), 0, access=mmap.ACCESS_READ)
            yield content, info
        else:
            yield file, info


_learned: dict[tuple[str, int, int], AudioInfo] = {}


def _learn(file: IO[bytes], key: tuple[str, int, int]) -> AudioInfo:
    """Read the header of an open file, and keep the facts if they were hard to find."""
    name, size, modified_ns = key
    try:
        info = _info_of_file(file, name, size, modified_ns)
    except _NeedsFfmpegError as need:
        with _naming(name, need):
            _, info = _decode_kept(*key)
        info = dataclasses.replace(info, file_bytes=size, modified_ns=modified_ns)
    if info.data_offset < 0:
        if len(_learned) >= KEPT_FACTS:
            _learned.clear()
        _learned[key] = info
    return info


def open_audio_bytes(
    content: bytes, name: str, max_seconds: float = LONGEST_SECONDS
) -> tuple[IO[bytes], AudioInfo]:
    """`open_audio` for a whole file that is already in memory; `name` is for messages.

    What only ffmpeg can read is decoded for at most `max_seconds`, in memory if the system
    allows it.
    """
    with reading(name, EXPECTED, AudioError):
        file = io.BytesIO(content)
        try:
            return file, _info_of_file(file, name, len(content), 0)
        except _NeedsFfmpegError as need:
            with _naming(name, need):
                return _decode_with_ffmpeg(content, name, max_seconds)


def read_audio(
    path: str | Path,
    start: int = 0,
    num_samples: int | None = None,
    sample_rate: int = SAMPLE_RATE,
    *,
    channel: int | None = None,
) -> ndarray:
    """Read a crop as float32 in -1..1, mono, at `sample_rate`; shape (samples,).

    Several channels are mixed, or with `channel`, counted from 0, one of them is read. The crop
    ends at the end of the file, so it may be shorter than requested; `wrap_to_length` extends it.
    """
    with open_audio(path) as (file, info):
        return crop_of_file(file, info, path, start, num_samples, sample_rate, channel=channel)


def crop_of_file(
    file: IO[bytes],
    info: AudioInfo,
    name: str | Path,
    start: int,
    num_samples: int | None,
    sample_rate: int,
    *,
    channel: int | None = None,
) -> ndarray:
    """Read a crop of an open file whose header is known; see `read_audio`."""
    total = info.num_samples_at(sample_rate)
    stop = total if num_samples is None else min(total, start + num_samples)
    if total == 0:
        raise AudioError(
            f"{name}: the file holds no samples (header only); convert it again from its source"
        )
    if start < 0 or stop <= start:
        raise AudioError(
            f"{name}: samples {start} to {stop} requested, but the file has {total} at "
            f"{sample_rate} Hz"
        )
    up, down = Fraction(sample_rate, info.sample_rate).as_integer_ratio()
    if up == down:
        return finish_frames(_read_frames(file, info, name, start, stop), name, channel)
    # resample_poly maps sample k * down of the source to sample k * up of the result, so cutting
    # the source at a multiple of `down`, far enough before the crop, gives the same samples as
    # resampling the whole file.
    reach = RESAMPLER_REACH * max(up, down) // up + 1
    blocks = max(0, start // up - (reach // down + 1))
    last = min(info.num_samples, -(-stop * down // up) + reach)
    frames = _read_frames(file, info, name, blocks * down, last)
    resampled = resample(finish_frames(frames, name, channel), up, down)
    return resampled[start - blocks * up :][: stop - start]


def _read_frames(
    file: IO[bytes], info: AudioInfo, name: str | Path, first: int, last: int
) -> ndarray:
    """Samples `first` to `last` at the file's own rate, (samples, channels)."""
    count = last - first
    if info.data_offset < 0 and info.format != FFMPEG:
        return _decode_frames(file, info, name, first, count)
    coding = "pcm_s16" if info.format == FFMPEG else info.format
    frame_bytes = SAMPLE_BYTES[coding] * info.num_channels
    file.seek(max(0, info.data_offset) + first * frame_bytes)
    raw = file.read(count * frame_bytes)
    if len(raw) < count * frame_bytes:
        raise AudioError(f"{name}: the file became shorter while it was being read")
    return decode_pcm(raw, coding).reshape(count, info.num_channels)


def resample(audio: ndarray, up: int, down: int) -> ndarray:
    """Resample float32 audio by `up` / `down` with scipy's polyphase filter."""
    # Imported late: scipy.signal takes 40 MB in every worker process, and few corpora are
    # resampled.
    from scipy.signal import resample_poly

    return resample_poly(audio, up, down).astype(np.float32, copy=False)


def audio_of_array(samples: ndarray, sample_rate: int, wanted_rate: int = SAMPLE_RATE) -> ndarray:
    """Convert samples in memory to what `read_audio` returns for a file: float32 in -1..1, mono, at
    `wanted_rate`.

    Returns:
        (samples,) float32.
    """
    samples = np.asarray(samples)
    if samples.ndim == 1 or samples.shape[:1] == (1,):
        samples = samples.reshape(-1, 1)
    if samples.ndim != 2 or samples.size == 0 or samples.shape[1] > samples.shape[0]:
        raise AudioError(
            f"samples of shape {samples.shape}; expected (samples,) or (samples, channels), "
            "one recording at a time"
        )
    is_int16 = samples.dtype == np.int16
    if not is_int16 and not np.issubdtype(samples.dtype, np.floating):
        raise AudioError(
            f"samples of type {samples.dtype}; expected floating point in -1..1 or int16"
        )
    try:
        # A rate may be a tensor, or text of a header or a form.
        rate = float(sample_rate)
    except (TypeError, ValueError):
        rate = math.nan
    if not LOWEST_RATE <= rate <= HIGHEST_RATE or not rate.is_integer():
        expected = f"a whole number from {LOWEST_RATE} to {HIGHEST_RATE} Hz"
        raise AudioError(f"sample_rate {sample_rate!r}; expected {expected}")
    scale = np.float32(2.0**-15 if is_int16 else 1.0)
    mono = finish_frames(samples.astype(np.float32) * scale, "the array")
    up, down = Fraction(wanted_rate, int(rate)).as_integer_ratio()
    return mono if up == down else resample(mono, up, down)


def write_audio(path: str | Path, waveform: ndarray, sample_rate: int = SAMPLE_RATE) -> None:
    """Atomically write mono 16-bit WAV or FLAC, depending on the suffix; samples beyond -1..1 are
    clipped.
    """
    format_name = WRITABLE.get(Path(path).suffix.lower())
    if format_name is None:
        raise AudioError(
            f"{path}: cannot write {Path(path).suffix!r}; expected {' or '.join(WRITABLE)}"
        )
    # In memory first: on a full disk soundfile fails with an assertion that names neither disk nor
    # file.
    content = encode_audio(waveform, sample_rate, format_name)
    with atomic_write(path, "wb") as file:
        file.write(content)


def flac_address(waveform: ndarray, sample_rate: int) -> str:
    """A mono waveform, (samples,), as a `data:` URL; FLAC is half the size of WAV and plays in
    every browser.
    """
    content = base64.b64encode(encode_audio(waveform, sample_rate, "FLAC")).decode()
    return f"data:audio/flac;base64,{content}"


def encode_audio(waveform: ndarray, sample_rate: int, format_name: str) -> bytes:
    """Encode a mono waveform, (samples,), as a 16-bit file."""
    samples = np.asarray(waveform)
    if samples.dtype != np.int16:
        samples = to_int16(samples)
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, sample_rate, subtype="PCM_16", format=format_name)
    return buffer.getvalue()


def to_int16(waveform: ndarray) -> ndarray:
    """Convert float samples in -1..1 to int16, rounded and clipped; the inverse of dividing by
    32768.
    """
    return np.clip(np.rint(waveform * np.float32(32768.0)), -32768, 32767).astype(np.int16)


def wrap_to_length(waveform: ndarray, num_samples: int) -> ndarray:
    """Repeat a short waveform from its start until it has `num_samples`; cut a longer one.

    >>> wrap_to_length(np.array([1.0, 2.0, 3.0]), 5).tolist()
    [1.0, 2.0, 3.0, 1.0, 2.0]
    """
    if len(waveform) >= num_samples:
        return waveform[:num_samples]
    if len(waveform) == 0:
        raise AudioError("cannot repeat an empty waveform; leave out the file")
    return np.resize(waveform, num_samples)


def decode_pcm(raw: bytes | ndarray, format_name: str) -> ndarray:
    """Decode a WAV file's little-endian samples to float32 in -1..1; channels stay interleaved."""
    coding = PCM_CODINGS[format_name]
    if coding.bits == 24:
        # Placed in the upper three bytes of an int32, so that the sign comes out right.
        wide = np.zeros((len(raw) // 3, 4), dtype=np.uint8)
        wide[:, 1:] = np.frombuffer(raw, dtype=np.uint8).reshape(-1, 3)
        raw = wide.reshape(-1)
    # Cast first: int32 times float32 gives float64, twice the size.
    samples = np.frombuffer(raw, dtype=coding.dtype).astype(np.float32)
    if coding.bits == 8:
        samples -= 128
    return samples * np.float32(coding.scale)


def finish_frames(frames: ndarray, name: str | Path, channel: int | None = None) -> ndarray:
    """Mix (samples, channels) to (samples,), or take one channel; reject NaN and far too loud
    samples.
    """
    # Comparisons with NaN are false.
    if not (frames.max() <= LOUDEST_SAMPLE and frames.min() >= -LOUDEST_SAMPLE):
        loudest = np.abs(frames).max()
        if not np.isfinite(loudest):
            raise AudioError(
                f"{name}: holds NaN or infinite samples; convert it again from its source"
            )
        raise AudioError(
            f"{name}: samples up to {loudest:.6g}; expected floating point in -1..1 (divide int16 "
            "values by 32768)"
        )
    if channel is None and frames.shape[1] > 1:
        return np.ascontiguousarray(frames.mean(axis=1, dtype=np.float32))
    return np.ascontiguousarray(frames[:, channel or 0])


class _NeedsFfmpegError(ValueError):
    """A file that libsndfile cannot read, or not to its end; the message says why."""


def _info_of_file(file: IO[bytes], name: str | Path, size: int, modified_ns: int) -> AudioInfo:
    """Read the header of an open file of `size` bytes."""
    if size == 0:
        raise AudioError(f"{name}: the file is empty (0 bytes); replace it or leave it out")
    file.seek(0)
    info = parse_riff(file, name, size, modified_ns)
    if info is None:
        info = _info_of_coded(file, name, size, modified_ns)
    if not LOWEST_RATE <= info.sample_rate <= HIGHEST_RATE:
        raise AudioError(
            f"{name}: broken header: {info.sample_rate} Hz; expected {LOWEST_RATE} to "
            f"{HIGHEST_RATE} Hz"
        )
    return info


def _info_of_coded(file: IO[bytes], name: str | Path, size: int, modified_ns: int) -> AudioInfo:
    """Read the header of a file that must be decoded, and learn its length if the header does not
    say it (see `lengths.py`).
    """
    file.seek(0)
    is_ogg = file.read(4) == b"OggS"
    is_chained, is_cut = lengths.ogg_pages(file) if is_ogg else (False, False)
    if is_chained:
        raise _NeedsFfmpegError(
            "several Ogg streams joined into one file, of which libsndfile reads only the first"
        )
    file.seek(0)
    try:
        with soundfile.SoundFile(file) as sound:
            format_name = str(sound.format).lower()
            subtype = str(sound.subtype)
            log = str(sound.extra_info)
            num_samples = sound.frames
            rate = sound.samplerate
            channels = sound.channels
    except (RuntimeError, TypeError) as error:
        file.seek(0)
        if instead := in_place_of_a_file(file):
            raise AudioError(
                f"{name}: not a readable audio file ({instead}); expected {EXPECTED}"
            ) from error
        raise _NeedsFfmpegError(_reason(error)) from error
    if format_name == "mp3":
        frames = lengths.mpeg_frames(file)
        if frames is None:
            raise _NeedsFfmpegError("its frame type changes, or is not layer 2 or 3")
        num_counted, is_cut = frames
        if num_counted is not None:
            num_samples = _learn_length(file, format_name, num_samples, num_counted)
    elif format_name == "flac" and num_samples >= UNKNOWN_FLAC:
        at_most = min(MAX_FLAC, size * MAX_SAMPLES_PER_BYTE // channels)
        num_samples = _learn_length(file, format_name, num_samples, at_most)
    elif subtype.startswith("MPEG"):
        raise _NeedsFfmpegError("MP3 inside another format, whose length libsndfile guesses")
    elif not is_ogg:
        is_cut = lengths.says_it_is_cut(file, log)
    if is_ogg and not num_samples:
        raise _NeedsFfmpegError("libsndfile finds no samples")
    if num_samples * channels > size * MAX_SAMPLES_PER_BYTE:
        raise AudioError(
            f"{name}: broken {format_name.upper()} file: claims {num_samples:,} samples in "
            f"{size:,} bytes; convert it again from its source"
        )
    return AudioInfo(num_samples, rate, channels, format_name, -1, is_cut, size, modified_ns)


def _learn_length(file: IO[bytes], format_name: str, claimed: int, at_most: int) -> int:
    """Samples of a file whose header does not say it: `at_most`, or as many as can be decoded."""
    if lengths.with_length(file, format_name, at_most) is None:
        if abs(claimed - at_most) > LAYER_2_SAMPLES:
            raise _NeedsFfmpegError(f"its length is unknown (libsndfile guesses {claimed:,})")
        return min(claimed, at_most)

    def is_behind(place: int) -> bool:
        """Whether the sound ends before a sample, which a header makes the last one."""
        view = lengths.with_length(file, format_name, place + 1)
        try:
            with soundfile.SoundFile(view) as sound:
                sound.seek(place)
                return len(sound.read(1)) == 0
        except RuntimeError:
            return True

    if not is_behind(at_most - 1):
        return at_most
    return bisect.bisect_left(range(at_most), True, key=is_behind)


# Why headers of WAV files are read here and not by libsndfile: a corpus has a million of them, and
# one read of 4 KiB tells where the samples are, from which point a crop is a seek and a read. The
# forms below are those that recorders and converters really write. When in doubt (a coded form, a
# big-endian file) the answer is None and libsndfile decides; only what cannot be any kind of WAV is
# an error here.
def parse_riff(
    file: IO[bytes], name: str | Path, file_bytes: int, modified_ns: int = 0
) -> AudioInfo | None:
    """Find the samples of an open WAV file of `file_bytes` bytes; None if it is not a WAV of plain
    samples.

    Accepts every layout of plain PCM and float WAV files: chunks before and after the samples, the
    extensible form, RF64 and BW64 with 64-bit sizes, the sizes that a recorder leaves that wrote to
    a pipe. Everything else (A-law, ADPCM, big-endian RIFX) is left to soundfile. If the data chunk
    claims more than the file has, only what is there counts (`is_truncated`). With `file_bytes` of
    `UNKNOWN_BYTES`, the file is the head of a pipe.
    """
    head = file.read(RIFF_HEADER_BYTES)
    if head[:4] not in RIFF_KINDS or head[8:12] != b"WAVE":
        return None
    long_size = None
    layout = None
    position = 12
    for _ in range(MAX_CHUNKS):
        chunk = head[position : position + CHUNK_BYTES]
        if len(chunk) < CHUNK_BYTES and len(head) == RIFF_HEADER_BYTES:
            file.seek(position)
            chunk = file.read(CHUNK_BYTES)
        if len(chunk) < 8:
            break
        kind, size = struct.unpack("<4sI", chunk[:8])
        body = chunk[8:]
        if kind == b"ds64" and len(body) >= 24:
            long_size = struct.unpack("<Q", body[8:16])[0]
        elif kind == b"fmt ":
            layout = _parse_format(body[:size], name)
            if layout is None:
                return None
        elif kind == b"data":
            if layout is None:
                raise _broken(name, "the samples come before the 'fmt ' chunk")
            coding, channels, rate = layout
            offset = position + 8
            available = max(0, file_bytes - offset)
            if size == 0xFFFFFFFF and long_size is not None:
                size = long_size
            # A recorder that never filled in the size leaves 0, or a size near 2 or 4 gigabytes:
            # the rest of the file is samples, except for chunks at its end.
            is_pipe = file_bytes >= UNKNOWN_BYTES
            has_pipe_size = lengths.is_pipe_size(size) or size >= UNKNOWN_BYTES
            is_unfinished = size == 0 or (has_pipe_size and (is_pipe or size > available))
            if is_unfinished and available and not is_pipe:
                available = lengths.end_of_samples(file, offset, file_bytes) - offset
            num_bytes = available if is_unfinished else min(size, available)
            num_samples = num_bytes // (SAMPLE_BYTES[coding] * channels)
            is_cut = not is_unfinished and size > available
            return AudioInfo(
                num_samples, rate, channels, coding, offset, is_cut, file_bytes, modified_ns
            )
        # Chunks are padded to an even length.
        position += 8 + size + (size & 1)
    raise _broken(name, "no 'fmt ' or no 'data' chunk: the file ends after its header")


def _parse_format(body: bytes, name: str | Path) -> tuple[str, int, int] | None:
    """Coding, channels and rate in the body of a 'fmt ' chunk; None if samples must be decoded."""
    if len(body) < 16:
        raise _broken(name, f"a 'fmt ' chunk of {len(body)} bytes; expected at least 16")
    code, channels, rate, _, frame_bytes, bits = struct.unpack("<HHIIHH", body[:16])
    if code == EXTENSIBLE and len(body) == 40 and body[26:] == GUID_TAIL:
        (code,) = struct.unpack("<H", body[24:26])
    names = [name for name, coding in PCM_CODINGS.items() if coding[:2] == (code, bits)]
    if not names:
        return None
    if not 0 < channels <= MAX_CHANNELS or rate == 0 or frame_bytes != channels * bits // 8:
        layout = f"{channels} channels of {bits} bits at {rate} Hz in frames of {frame_bytes} bytes"
        raise _broken(name, layout)
    return names[0], channels, rate


def _broken(name: str | Path, problem: str) -> AudioError:
    return AudioError(f"{name}: broken WAV file: {problem}; convert it again from its source")


def _decode_frames(
    file: IO[bytes], info: AudioInfo, name: str | Path, start: int, count: int
) -> ndarray:
    """Decode frames with libsndfile, (count, channels)."""
    try:
        file.seek(0)
        with soundfile.SoundFile(file) as sound:
            if sound.frames == info.num_samples:
                frames = _decode_blocks(sound, start, count)
            else:
                # The header's length is wrong, and the right one was learned. libsndfile expects
                # its place in the file.
                place = file.tell()
                view = lengths.with_length(file, str(sound.format).lower(), info.num_samples)
                file.seek(place)
                with soundfile.SoundFile(view) if view else sound as right:
                    frames = _decode_blocks(right, start, count)
    except RuntimeError as error:
        raise AudioError(
            f"{name}: the file is damaged: samples {start} to {start + count} cannot be decoded "
            f"({_reason(error)}); convert it again from its source or leave it out"
        ) from error
    if len(frames) < count:
        raise AudioError(
            f"{name}: the file is damaged: decoding stopped after {start + len(frames)} of "
            f"{start + count} samples"
        )
    return frames


def _decode_blocks(sound: soundfile.SoundFile, start: int, count: int) -> ndarray:
    # A frame of MP3 may need bits of earlier frames, which a seek skips, and soundfile ends every
    # read with a seek.
    lead_samples = MP3_LEAD_SAMPLES if sound.format == "MP3" else 0
    # A header may claim any length, so memory is allocated only for what was decoded.
    blocks = []
    for first in range(start, start + count, DECODED_AT_ONCE):
        size = min(DECODED_AT_ONCE, start + count - first)
        lead = min(first, lead_samples)
        if first:
            sound.seek(first - lead)
        blocks.append(sound.read(lead + size, dtype="float32", always_2d=True)[lead:])
        if len(blocks[-1]) < size:
            break
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


@functools.lru_cache(maxsize=KEPT_DECODED)
def _decode_kept(path: str, _size: int, _modified_ns: int) -> tuple[IO[bytes], AudioInfo]:
    file, info = _decode_with_ffmpeg(Path(path), path, LONGEST_SECONDS)
    if info.seconds >= LONGEST_SECONDS:
        raise AudioError(f"{path}: more than {LONGEST_SECONDS // 3600} hours of sound; split it")
    return file, info


def _decode_with_ffmpeg(
    source: Path | bytes, name: str, max_seconds: float
) -> tuple[IO[bytes], AudioInfo]:
    """Raw samples in a temporary file without a name, and what they are."""
    # What came from memory stays there, where the system allows it.
    target = scratch_file() if isinstance(source, bytes) else tempfile.TemporaryFile()  # noqa: SIM115
    try:
        decoded = decode_to_file(find_ffmpeg(), source, SAMPLE_RATE, max_seconds, target)
    except FfmpegError:
        target.close()
        raise
    num_bytes = target.tell()
    channels = decoded.num_channels
    num_samples = num_bytes // (2 * channels)
    is_cut = decoded.is_damaged
    info = AudioInfo(num_samples, SAMPLE_RATE, channels, FFMPEG, -1, is_cut, num_bytes, 0)
    promised = 0.0 if decoded.is_guess else min(decoded.seconds or 0.0, max_seconds)
    if info.seconds < promised - max(CUT_SHORT_SECONDS, CUT_SHORT_SHARE * promised):
        raise AudioError(
            f"{name}: decodes to {info.seconds:.2f} of {promised:.2f} seconds; "
            "the file is truncated"
        )
    return target, info


@contextlib.contextmanager
def _naming(name: str | Path, need: object = "libsndfile cannot read it") -> Iterator[None]:
    """Name the file in an error of ffmpeg, and why ffmpeg was needed."""
    try:
        yield
    except FfmpegError as error:
        raise AudioError(
            f"{name}: not a readable audio file ({need}; {error}); expected {EXPECTED}"
        ) from error


def _reason(error: Exception) -> str:
    return str(error).rstrip(".").split(": ", 1)[-1]
