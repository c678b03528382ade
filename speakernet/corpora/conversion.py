"""Convert audio files to 16 kHz mono WAV or FLAC in parallel, checked against the source's duration.

A target appears under its final name only when it was decoded whole, so a killed run leaves nothing to be mistaken for
audio. Targets that other tools left (header only, cut short) are found by their length and made again.
"""

import itertools
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from speakernet.corpora.download import check_space
from speakernet.corpora.summary import StepSummary
from speakernet.data.audio import AudioError, audio_info
from speakernet.data.ffmpeg import Decoded, FfmpegError, decode_batch
from speakernet.files import parallel_map, temporary_beside

# Starting ffmpeg costs 20 ms, decoding a four-second m4a 3 ms: one call for 16 is about four times as fast.
BATCH_FILES = 16
#: A codec pads a frame or two (1024 samples each) at either end; what is missing beyond this is missing audio.
TOLERANCE_SECONDS = 0.15
TOLERANCE_SHARE = 0.01
#: Where the container does not tell the duration, ffmpeg's guess from the bit rate may be far off.
ESTIMATE_SHARE = 0.5
MPEG4_SUFFIXES = {".m4a", ".mp4", ".m4b", ".mov"}
#: A damaged header may describe boxes without end; an honest file has a few dozen.
MAX_BOXES = 10_000
LEAST_FREE_BYTES = 64 << 20


@dataclass(frozen=True)
class Conversion:
    """One file to convert."""

    source: Path
    target: Path


@dataclass(frozen=True)
class ConversionOptions:
    """How to convert. `keep_sources` False removes a source once its target is verified."""

    ffmpeg: str
    file_format: str = "wav"
    sample_rate: int = 16000
    keep_sources: bool = True


def convert_all(
    conversions: Iterable[Conversion],
    options: ConversionOptions,
    num_jobs: int,
    summary: StepSummary,
    description: str = "convert",
    total: int | None = None,
) -> None:
    """Convert what is not there yet; failures are counted and listed, the rest goes on.

    Takes an iterator and keeps a few batches in flight, so a million files need no more memory than a hundred.

    Raises:
        DiskFullError: the disk cannot hold more; what was made stays for the next run.
    """
    batches = _batches(conversions)
    results = parallel_map(
        lambda batch: _convert_batch(batch, options),
        batches,
        num_jobs,
        description,
        total=total,
        units_of=lambda result: result[0] + result[1] + len(result[2]),
    )
    for made, skipped, broken in results:
        summary.add_made(made)
        summary.add_skipped(skipped)
        for source, reason in broken:
            summary.add_broken(str(source), reason)


def audio_seconds(path: Path, sample_rate: int | None = None) -> float | None:
    """Duration of a whole, non-empty audio file by its header, or None; `sample_rate` None takes any."""
    try:
        info = audio_info(path)
    except (AudioError, OSError):
        return None
    if info.num_samples <= 0 or info.is_truncated or (sample_rate is not None and info.sample_rate != sample_rate):
        return None
    return info.num_samples / info.sample_rate


def length_problem(found_seconds: float, decoded: Decoded) -> str | None:
    """What is wrong with a decoded length, or None. Too short is cut audio, too long a damaged header."""
    expected = decoded.source_seconds
    if found_seconds <= 0:
        return "no audio came out"
    if expected is None:
        return None
    share = ESTIMATE_SHARE if decoded.is_estimate else TOLERANCE_SHARE
    if abs(found_seconds - expected) > max(TOLERANCE_SECONDS, share * expected):
        return f"{found_seconds:.2f} s came out of {expected:.2f} s; the source is damaged"
    return None


def source_seconds(path: Path) -> float | None:
    """How long the source says it lasts, where that can be read without ffmpeg."""
    if path.suffix.lower() in MPEG4_SUFFIXES:
        try:
            return mp4_seconds(path)
        except OSError:
            return None
    return audio_seconds(path)


def mp4_seconds(path: str | Path) -> float | None:
    """Duration in seconds from the movie header (`moov`/`mvhd`), or None where there is no whole header.

    Source: ISO/IEC 14496-12, 8.2.2.
    """
    with Path(path).open("rb") as file:
        # Not asked of ffprobe: a second run over a million files then costs two small reads each to skip them.
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


def is_converted(conversion: Conversion, sample_rate: int) -> bool:
    """Whether the target is there, whole, at the right rate, and as long as its source says."""
    found = audio_seconds(conversion.target, sample_rate)
    if found is None:
        return False
    # Removed once it was converted (--remove_originals): there is nothing left to compare with.
    if not conversion.source.exists():
        return True
    return length_problem(found, Decoded(source_seconds(conversion.source), False)) is None


def _batches(conversions: Iterable[Conversion]) -> Iterator[list[Conversion]]:
    iterator = iter(conversions)
    while batch := list(itertools.islice(iterator, BATCH_FILES)):
        yield batch


def _convert_batch(batch: list[Conversion], options: ConversionOptions) -> tuple[int, int, list[tuple[Path, str]]]:
    """(made, skipped, broken with reasons) of one batch."""
    missing = [one for one in batch if not is_converted(one, options.sample_rate)]
    broken: list[tuple[Path, str]] = []
    if missing:
        try:
            broken = _decode(missing, options)
        except FfmpegError:
            # A full disk fails every file that follows: stop, rather than list a million of them as broken.
            check_space(missing[0].target.parent, LEAST_FREE_BYTES)
            # One bad file ends the whole call: each on its own tells which, and saves the others.
            for one in missing:
                try:
                    broken += _decode([one], options)
                except FfmpegError as error:
                    broken.append((one.source, str(error)))
    if not options.keep_sources:
        bad = {source for source, _ in broken}
        for one in batch:
            if one.source not in bad:
                one.source.unlink(missing_ok=True)
    return len(missing) - len(broken), len(batch) - len(missing), broken


def _decode(batch: list[Conversion], options: ConversionOptions) -> list[tuple[Path, str]]:
    """Decode a batch and rename what is whole; the rest is returned with reasons.

    Raises:
        FfmpegError: ffmpeg failed on at least one; nothing was renamed.
    """
    halves = []
    for one in batch:
        one.target.parent.mkdir(parents=True, exist_ok=True)
        halves.append(temporary_beside(one.target))
    broken = []
    try:
        sources = [one.source for one in batch]
        decoded = decode_batch(options.ffmpeg, sources, halves, options.file_format, options.sample_rate)
        for one, half, outcome in zip(batch, halves, decoded, strict=True):
            seconds = audio_seconds(half, options.sample_rate)
            # The header's own word where there is one: ffmpeg's may be a guess from the bit rate.
            known = source_seconds(one.source)
            if known is not None:
                outcome = Decoded(known, False)
            problem = length_problem(seconds or 0.0, outcome)
            if problem is None:
                # Not flushed: a million flushes take hours on a spinning disk, and a killed process loses nothing
                # without them.
                half.replace(one.target)
            else:
                broken.append((one.source, problem))
    finally:
        for half in halves:
            half.unlink(missing_ok=True)
    return broken


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
