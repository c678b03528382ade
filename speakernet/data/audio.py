"""The only door to audio files: facts from the header, a crop as float32, a file written.

PCM and float WAV are read by seeking to the samples; FLAC, OGG, MP3, A-law … go through soundfile's seek. Only the crop
is read. What soundfile cannot read (m4a, aac, webm …) ffmpeg decodes as a whole to 16 kHz, as `prepare folder` does.
Other rates are resampled, several channels mixed down. All positions and lengths handed in are in samples of the rate
asked for.
"""

import contextlib
import functools
import io
import math
import os
import stat
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import soundfile

from speakernet.data.ffmpeg import CONVERTIBLE_SUFFIXES, FfmpegError, decode_to_bytes, find_ffmpeg
from speakernet.data.riff import RiffError, parse_riff
from speakernet.files import FileError, atomic_write, check_regular, in_place_of_a_file, open_regular, reading

SAMPLE_RATE = 16_000  # Hz, of everything unless said otherwise
SAMPLE_BYTES = {"pcm_u8": 1, "pcm_s16": 2, "pcm_s24": 3, "pcm_s32": 4, "float32": 4, "float64": 8}
# Rates outside are a broken header: resampling from them would take filters of gigabytes.
LOWEST_RATE, HIGHEST_RATE = 1_000, 192_000
# 24 dB above full scale, which no recording reaches; samples that were int16 go far beyond.
LOUDEST_SAMPLE = 16.0
WRITABLE = {".wav": "WAV", ".flac": "FLAC"}
READABLE_SUFFIXES = frozenset({".wav", ".flac", ".ogg", ".opus", ".mp3", ".aif", ".aiff", ".au", ".sph"})
AUDIO_SUFFIXES = READABLE_SUFFIXES | CONVERTIBLE_SUFFIXES
"""What a walk through a folder takes for audio."""
# First bytes of what ffmpeg decodes, and its name for them; MP4 is recognised by its first box.
CONTAINERS = {
    b"\x1aE\xdf\xa3": "matroska",
    b"0&\xb2u\x8ef\xcf\x11": "asf",
    b"#!AMR": "amr",
    b"caff": "caf",
    b"\xff\xf1": "aac",
    b"\xff\xf9": "aac",
}
MP4_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
CUT_SHORT_SECONDS, CUT_SHORT_SHARE = 0.15, 0.01  # a container may promise so much more than it decodes to
KEPT_DECODED = 8  # files that ffmpeg decoded: a long recording is read window by window
HOPS_A_SECOND = 100  # frames of 10 ms
WINDOW_EXTRA_SECONDS = 0.015  # a window of 25 ms reaches 15 ms beyond its hop
MOST_SAMPLES_PER_BYTE = 8192
"""Of any coding: FLAC packs 65,535 samples of silence into 14 bytes. What claims more has a broken header."""
DECODED_AT_ONCE = 1 << 22  # samples; a claim is believed so far and no further
EXPECTED = "an audio file (WAV, FLAC, OGG, MP3 …); bring it back, convert it again or take it off the list"
RESAMPLER_REACH = 10  # scipy's default filter reaches this many samples of the slower rate to each side.


class AudioError(FileError):
    """An audio file that cannot be read; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class AudioInfo:
    """What a header says.

    Attributes:
        num_samples: samples a channel, at the file's own rate.
        sample_rate: Hz.
        num_channels: channels, mixed down when read.
        format: `pcm_s16`, `float32`, … for WAV read directly; else soundfile's name in lower case (`flac`).
        data_offset: byte at which the samples start; -1 when soundfile decodes the file.
        is_truncated: the header promises more than the file holds.
        file_bytes: size of the file when the header was read.
        modified_ns: its modification time, for noticing a change.
    """

    num_samples: int
    sample_rate: int
    num_channels: int
    format: str
    data_offset: int
    is_truncated: bool
    file_bytes: int
    modified_ns: int

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.num_samples / self.sample_rate

    @property
    def is_direct(self) -> bool:
        """Whether the samples lie in the file as they are, to be read by seeking."""
        return self.data_offset >= 0

    def num_samples_at(self, sample_rate: int) -> int:
        """Samples after resampling to `sample_rate`."""
        return -(-self.num_samples * sample_rate // self.sample_rate)


def crop_samples(frames: int, sample_rate: int = SAMPLE_RATE) -> int:
    """Samples that give so many frames of 10 ms with a window of 25 ms.

    >>> crop_samples(200)
    32240
    """
    return round(frames * sample_rate / HOPS_A_SECOND) + round(WINDOW_EXTRA_SECONDS * sample_rate)


def resample(audio: np.ndarray, up: int, down: int) -> np.ndarray:
    """`up` / `down` times as many samples along the last axis (scipy's polyphase filter)."""
    # Imported when it is needed: scipy.signal takes 40 MB in every worker process, and few corpora are resampled.
    from scipy.signal import resample_poly

    return resample_poly(audio, up, down, axis=-1)


def audio_info(path: str | Path) -> AudioInfo:
    """Read a file's header (of what only ffmpeg reads, decode the file).

    Raises:
        AudioError: missing, unreadable, or not audio.
    """
    with open_audio(path) as (_, info):
        return info


@contextlib.contextmanager
def open_audio(path: str | Path, known: AudioInfo | None = None) -> Iterator[tuple[BinaryIO, AudioInfo]]:
    """An open file for `crop_of_file` and its header; what only ffmpeg reads is decoded first.

    Args:
        path: the file.
        known: its header if it was read before; it is read again if the file has changed since.
    """
    with reading(path, EXPECTED, AudioError), open_regular(path, buffering=0) as file:
        status = os.fstat(file.fileno())
        if container := _container_of(file):
            decoded = _decode_kept(str(path), status.st_size, status.st_mtime_ns, container)
            yield io.BytesIO(decoded), _info_of_decoded(decoded, container, status)
        elif known and (status.st_size, status.st_mtime_ns) == (known.file_bytes, known.modified_ns):
            yield file, known
        else:
            yield file, info_of_file(file, path, status)


def readable_bytes(content: bytes, name: str) -> bytes:
    """The content of a file as soundfile reads it: as it is, or as a WAV file that ffmpeg decodes it to.

    Raises:
        AudioError: ffmpeg is missing or cannot decode it, as an m4a file whose index stands at its end.
    """
    container = _container_of(io.BytesIO(content))
    return _decode_with_ffmpeg(content, name, container) if container else content


def info_of_file(file: Any, name: str | Path, status: Any = None) -> AudioInfo:
    """`audio_info` for an open binary file (a member of an archive, say); `name` is for messages."""
    if status is None:
        status = os.fstat(file.fileno())
    check_regular(name, status.st_mode)
    size, modified = status.st_size, status.st_mtime_ns
    if size == 0:
        raise AudioError(f"{name}: the file is empty (0 bytes); replace it or take it off the list")
    try:
        riff = parse_riff(file, size)
    except RiffError as error:
        raise AudioError(f"{name}: broken WAV file: {error}; convert it again from its source") from error
    if riff is not None:
        _check_rate(name, riff.sample_rate)
        return AudioInfo(
            riff.num_samples,
            riff.sample_rate,
            riff.num_channels,
            riff.format,
            riff.data_offset,
            riff.is_truncated,
            size,
            modified,
        )
    file.seek(0)
    try:
        with soundfile.SoundFile(file) as sound:
            format_name = str(sound.format).lower()
            frames, rate, channels = sound.frames, sound.samplerate, sound.channels
    except (soundfile.LibsndfileError, RuntimeError, TypeError) as error:
        file.seek(0)
        reason = in_place_of_a_file(file) or _reason(error)
        raise AudioError(f"{name}: not a readable audio file ({reason})") from error
    _check_rate(name, rate)
    if frames * channels > size * MOST_SAMPLES_PER_BYTE:
        raise AudioError(
            f"{name}: broken {format_name.upper()} file: claims {frames:,} samples in {size:,} bytes; "
            "convert it again from its source"
        )
    return AudioInfo(frames, rate, channels, format_name, -1, False, size, modified)


def read_audio(
    path: str | Path,
    start: int = 0,
    num_samples: int | None = None,
    sample_rate: int = SAMPLE_RATE,
    *,
    mixes: bool = True,
) -> np.ndarray:
    """Read a crop as float32 in -1..1, mono, at `sample_rate`; shape (samples,).

    The crop is cut at the file's end: fewer samples than asked for may come back, `wrap_to_length` fills them up.

    Args:
        path: the file.
        start: first sample of the crop, counted at `sample_rate`.
        num_samples: length of the crop; None reads to the end.
        sample_rate: Hz wanted.
        mixes: several channels are mixed down; else the first is taken alone.

    Raises:
        AudioError: missing, not audio, without samples in the crop, or with NaN or infinite samples.
    """
    with open_audio(path) as (file, info):
        return crop_of_file(file, info, path, start, num_samples, sample_rate, mixes=mixes)


def info_of_bytes(content: bytes, name: str) -> AudioInfo:
    """`audio_info` for a whole file that is already in memory; `name` is for messages."""
    with reading(name, EXPECTED, AudioError):
        content = readable_bytes(content, name)
        return info_of_file(io.BytesIO(content), name, _BytesStatus(len(content)))


def read_audio_bytes(
    content: bytes, name: str, start: int = 0, num_samples: int | None = None, sample_rate: int = SAMPLE_RATE
) -> np.ndarray:
    """`read_audio` for a whole file that is already in memory; `name` is for messages."""
    with reading(name, EXPECTED, AudioError):
        content = readable_bytes(content, name)
        file = io.BytesIO(content)
        info = info_of_file(file, name, _BytesStatus(len(content)))
        return crop_of_file(file, info, name, start, num_samples, sample_rate)


def crop_of_file(
    file: Any,
    info: AudioInfo,
    name: str | Path,
    start: int,
    num_samples: int | None,
    sample_rate: int,
    *,
    mixes: bool = True,
) -> np.ndarray:
    """The crop of an open file whose header is known; see `read_audio`."""
    total = info.num_samples_at(sample_rate)
    stop = total if num_samples is None else min(total, start + num_samples)
    if total == 0:
        raise AudioError(f"{name}: the file holds no samples (header only); convert it again from its source")
    if start < 0 or stop <= start:
        raise AudioError(f"{name}: asked for samples {start} to {stop}, but it holds {total} at {sample_rate} Hz")
    if info.sample_rate == sample_rate:
        return _read_frames(file, info, name, start, stop - start, mixes)
    # resample_poly keeps sample k * down of the source at sample k * up of the result, so cutting the source at such a
    # multiple, far enough before the crop, gives the samples that resampling the whole file would give.
    common = math.gcd(sample_rate, info.sample_rate)
    up, down = sample_rate // common, info.sample_rate // common
    reach = RESAMPLER_REACH * max(up, down) // up + 1
    blocks = max(0, start // up - (reach // down + 1))
    source_start = blocks * down
    source_stop = min(info.num_samples, -(-stop * down // up) + reach)
    source = _read_frames(file, info, name, source_start, source_stop - source_start, mixes)
    resampled = resample(source, up, down).astype(np.float32, copy=False)
    offset = start - blocks * up
    return resampled[offset : offset + stop - start]


def audio_of_array(samples: np.ndarray, sample_rate: int, wanted_rate: int = SAMPLE_RATE) -> np.ndarray:
    """Samples in memory as `read_audio` would give them from a file: float32 in -1..1, mono, at `wanted_rate`.

    Args:
        samples: (samples,) or (samples, channels) as soundfile gives them, floating point in -1..1 or int16. One
            channel may also come as (1, samples), since one sample of many channels is no recording.
        sample_rate: Hz, of the array.
        wanted_rate: Hz, of the result.

    Returns:
        (samples,) float32.

    Raises:
        AudioError: another shape or type, no samples, samples that are NaN or far beyond -1..1, a rate that none is.
    """
    samples = np.asarray(samples)
    if samples.ndim == 2 and samples.shape[0] == 1:
        samples = samples[0]
    if samples.ndim == 1:
        samples = samples[:, None]
    if samples.ndim != 2 or samples.size == 0 or samples.shape[1] > samples.shape[0]:
        raise AudioError(
            f"samples of shape {np.shape(samples)}; expected (samples,) or (samples, channels), one recording at a time"
        )
    if samples.dtype != np.int16 and not np.issubdtype(samples.dtype, np.floating):
        raise AudioError(f"samples of type {samples.dtype}; expected floating point in -1..1 or int16")
    if not LOWEST_RATE <= sample_rate <= HIGHEST_RATE or sample_rate != int(sample_rate):
        raise AudioError(f"sample_rate {sample_rate}; expected {LOWEST_RATE} to {HIGHEST_RATE} Hz, a whole number")
    is_whole = samples.dtype == np.int16
    mono = finish_frames(samples.astype(np.float32) * np.float32(1 / 32768 if is_whole else 1.0), "the array")
    common = math.gcd(wanted_rate, int(sample_rate))
    up, down = wanted_rate // common, int(sample_rate) // common
    return mono if up == down else resample(mono, up, down).astype(np.float32, copy=False)


def write_audio(path: str | Path, waveform: np.ndarray, sample_rate: int = SAMPLE_RATE) -> None:
    """Write mono 16-bit WAV or FLAC, by the suffix, atomically; samples beyond -1..1 are clipped.

    Args:
        path: ends in .wav or .flac.
        waveform: float in -1..1 or int16, shape (samples,) or (samples, channels).
        sample_rate: Hz.
    """
    format_name = WRITABLE.get(Path(path).suffix.lower())
    if format_name is None:
        raise AudioError(f"{path}: can write {' and '.join(WRITABLE)}, not {Path(path).suffix!r}")
    samples = np.asarray(waveform)
    if samples.dtype != np.int16:
        samples = to_int16(samples)
    # Into memory first: where the disk is full soundfile ends in an assertion, which names neither disk nor file.
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, sample_rate, subtype="PCM_16", format=format_name)
    with atomic_write(path, "wb") as file:
        file.write(buffer.getbuffer())


def flac_bytes(waveform: np.ndarray, sample_rate: int) -> bytes:
    """A mono float waveform, (samples,), as 16-bit FLAC: half the size of WAV, and every browser plays it."""
    buffer = io.BytesIO()
    soundfile.write(buffer, to_int16(waveform), sample_rate, subtype="PCM_16", format="FLAC")
    return buffer.getvalue()


def to_int16(waveform: np.ndarray) -> np.ndarray:
    """Float samples in -1..1 as int16, rounded and clipped; the reverse of dividing by 32768."""
    return np.clip(np.rint(waveform * np.float32(32768.0)), -32768, 32767).astype(np.int16)


def wrap_to_length(waveform: np.ndarray, num_samples: int) -> np.ndarray:
    """Repeat a short waveform from its start until it has `num_samples`; a longer one is cut.

    >>> wrap_to_length(np.array([1.0, 2.0, 3.0]), 5).tolist()
    [1.0, 2.0, 3.0, 1.0, 2.0]
    """
    if len(waveform) >= num_samples:
        return waveform[:num_samples]
    if len(waveform) == 0:
        raise AudioError("cannot fill up an empty waveform; take the file off the list")
    return np.resize(waveform, num_samples)


class _BytesStatus:
    """What `os.fstat` would say of a file in memory."""

    def __init__(self, size: int) -> None:
        self.st_size = size
        self.st_mtime_ns = 0
        self.st_mode = stat.S_IFREG


def _read_frames(
    file: Any, info: AudioInfo, name: str | Path, start: int, count: int, mixes: bool = True
) -> np.ndarray:
    """`count` frames at the file's own rate as mono float32; shape (count,)."""
    if not info.is_direct:
        return _decode_frames(file, name, start, count, mixes)
    frame_bytes = SAMPLE_BYTES[info.format] * info.num_channels
    file.seek(info.data_offset + start * frame_bytes)
    raw = file.read(count * frame_bytes)
    if len(raw) < count * frame_bytes:
        raise AudioError(f"{name}: the file became shorter while it was being read")
    return finish_frames(decode_pcm(raw, info.format).reshape(count, info.num_channels), name, mixes)


def _decode_frames(file: Any, name: str | Path, start: int, count: int, mixes: bool) -> np.ndarray:
    """Frames through libsndfile."""
    file.seek(0)
    try:
        with soundfile.SoundFile(file) as sound:
            if start:
                sound.seek(start)
            # A header may promise any length: memory is taken for what was decoded, not for what is promised.
            blocks = []
            for first in range(0, count, DECODED_AT_ONCE):
                wanted = min(DECODED_AT_ONCE, count - first)
                blocks.append(sound.read(wanted, dtype="float32", always_2d=True))
                if len(blocks[-1]) < wanted:
                    break
            frames = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
    except (soundfile.LibsndfileError, RuntimeError) as error:
        raise AudioError(f"{name}: cannot decode samples {start} to {start + count} ({_reason(error)})") from error
    if len(frames) < count:
        raise AudioError(f"{name}: decoding stopped after {start + len(frames)} of {start + count} samples")
    return finish_frames(frames, name, mixes)


def decode_pcm(raw: bytes | np.ndarray, format_name: str) -> np.ndarray:
    """Little-endian samples of a WAV as float32 in -1..1, interleaved as they come."""
    if format_name == "pcm_s16":
        return np.frombuffer(raw, dtype="<i2") * np.float32(1 / 32768)
    if format_name == "pcm_u8":
        return (np.frombuffer(raw, dtype=np.uint8).astype(np.float32) - 128) * np.float32(1 / 128)
    if format_name == "pcm_s24":
        # Placed in the upper three bytes of an int32, so that the sign comes out right.
        wide = np.zeros((len(raw) // 3, 4), dtype=np.uint8)
        wide[:, 1:] = np.frombuffer(raw, dtype=np.uint8).reshape(-1, 3)
        return wide.view("<i4")[:, 0].astype(np.float32) * np.float32(2.0**-31)
    if format_name == "pcm_s32":
        # Cast first: a product of int32 and float32 is a float64 of twice the size.
        return np.frombuffer(raw, dtype="<i4").astype(np.float32) * np.float32(2.0**-31)
    return np.frombuffer(raw, dtype="<f4" if format_name == "float32" else "<f8").astype(np.float32)


def finish_frames(frames: np.ndarray, name: str | Path, mixes: bool = True) -> np.ndarray:
    """Mix (samples, channels) to (samples,), or take the first channel; refuse NaN and far too loud samples."""
    # Comparisons with NaN are false.
    if not (frames.max() <= LOUDEST_SAMPLE and frames.min() >= -LOUDEST_SAMPLE):
        loudest = float(np.abs(frames).max())
        if not math.isfinite(loudest):
            raise AudioError(f"{name}: holds NaN or infinite samples; convert it again from its source")
        raise AudioError(
            f"{name}: samples up to {loudest:.6g}; expected floating point in -1..1: divide what was int16 by 32768"
        )
    mono = frames.mean(axis=1, dtype=np.float32) if mixes and frames.shape[1] > 1 else frames[:, 0]
    return np.ascontiguousarray(mono)


def _container_of(file: BinaryIO) -> str:
    """Format for ffmpeg, by the first bytes of an open file; empty for what soundfile reads."""
    head = file.read(12)
    file.seek(0)
    if head[4:8] in MP4_BOXES:
        return "mov"
    return next((name for start, name in CONTAINERS.items() if head.startswith(start)), "")


@functools.lru_cache(maxsize=KEPT_DECODED)
def _decode_kept(path: str, _size: int, _modified_ns: int, container: str) -> bytes:
    return _decode_with_ffmpeg(Path(path), path, container)


def _decode_with_ffmpeg(source: Path | bytes, name: str, container: str) -> bytes:
    """A WAV file of what ffmpeg decodes.

    Raises:
        AudioError: ffmpeg is missing, cannot decode it, or finds less than the container promises.
    """
    try:
        raw, facts = decode_to_bytes(find_ffmpeg(), source, SAMPLE_RATE, container)
    except FfmpegError as error:
        advice = ""
        if isinstance(source, bytes) and container == "mov":
            advice = "; m4a and mp4 may need a file to seek in: give it as a file, or convert it to WAV or FLAC"
        raise AudioError(f"{name}: {error}{advice}") from error
    seconds = len(raw) / 2 / SAMPLE_RATE
    if facts.source_seconds and not facts.is_estimate:
        tolerance = max(CUT_SHORT_SECONDS, CUT_SHORT_SHARE * facts.source_seconds)
        if seconds < facts.source_seconds - tolerance:
            raise AudioError(
                f"{name}: decodes to {seconds:.2f} of {facts.source_seconds:.2f} seconds; the file is cut short"
            )
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, SAMPLE_RATE, len(raw) // 2, "NONE", ""))
        file.writeframes(raw)
    return buffer.getvalue()


def _info_of_decoded(decoded: bytes, container: str, status: os.stat_result) -> AudioInfo:
    """Facts of a file that ffmpeg decoded to WAV: its samples are not in the file itself, so there is no offset."""
    found = info_of_file(io.BytesIO(decoded), container, _BytesStatus(len(decoded)))
    return AudioInfo(found.num_samples, found.sample_rate, 1, container, -1, False, status.st_size, status.st_mtime_ns)


def cannot_open(path: str | Path, error: OSError) -> AudioError:
    """What to raise for a file that the system does not give."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return AudioError(f"{path}: cannot be read ({reason}); expected {EXPECTED}")


def _check_rate(name: str | Path, sample_rate: int) -> None:
    if not LOWEST_RATE <= sample_rate <= HIGHEST_RATE:
        raise AudioError(f"{name}: broken header: {sample_rate} Hz; expected {LOWEST_RATE} to {HIGHEST_RATE} Hz")


def _reason(error: Exception) -> str:
    return str(error).rstrip(".").split(": ", 1)[-1]
