"""Find ffmpeg and decode with it: many files per call, no shell, file names that cannot be mistaken
for options.

ffmpeg is needed only for what soundfile cannot read (m4a, aac, webm, video, chained Ogg …).
Starting it costs four times as much as decoding a short file, hence the batches.
"""

import contextlib
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

FFMPEG_VARIABLE = "SPEAKERNET_FFMPEG"
#: A damaged file can hang a decoder; an hour of audio decodes in seconds.
TIMEOUT_SECONDS = 600
#: Formats that ffmpeg may take a file for: those that hold sound themselves. Playlists and lists of
#: parts, which would make it open other files, are not among them.
CONTAINERS = (
    "aac,ac3,eac3,aiff,amr,amrnb,amrwb,ape,asf,au,avi,caf,dts,flac,flv,loas,matroska,webm,mov,mp4,mp3,mpeg,mpegts,"
    "mpegvideo,mpc,mpc8,mxf,nistsphere,nut,ogg,oma,rm,shn,tak,truehd,tta,voc,w64,wav,wsd,wv,xwma"
)
ADVICE = (
    "install it (Debian, Ubuntu: apt install ffmpeg; macOS: brew install ffmpeg; anywhere: pip "
    "install imageio-ffmpeg) or give its path with --ffmpeg FILE or the environment variable "
    f"{FFMPEG_VARIABLE}"
)
_INPUT = re.compile(r"^Input #(\d+),", re.MULTILINE)
#: No other protocol: a playlist posing as audio must not make ffmpeg open other files or addresses.
_SAFELY = ("-protocol_whitelist", "file", "-format_whitelist", CONTAINERS)
#: No encoder name or date in the output, so that the same source gives the same bytes.
REPRODUCIBLY = ["-map_metadata", "-1", "-fflags", "+bitexact", "-flags:a", "+bitexact"]
_VIDEO = re.compile(r"^\s*Stream #\d+:\d+.*: Video:(?!.*attached pic)", re.MULTILINE)
_REASON = re.compile(r"error|invalid|no space|permission|not found|does not", re.IGNORECASE)
_NO_SOUND = "matches no streams"
#: What ffmpeg notes about a file whose end is missing, or that is damaged.
_DAMAGED = re.compile(
    r"ended prematurely|partial file|corrupt|incomplete frame|error while decoding"
    r"|error submitting packet|error during demuxing|decoding error|invalid data found",
    re.IGNORECASE,
)
#: Silence before a sound track that begins after the picture, so that times are those of the video.
_FROM_START = "aresample=async=1:min_hard_comp=1000000:first_pts=0"
_OUTPUT_KILOBITS = re.compile(r"^  Stream #0:0.*: Audio: pcm_s16le.*, (\d+) kb/s", re.MULTILINE)
_DURATION = re.compile(r"^\s*Duration: (\d+):(\d\d):(\d\d(?:\.\d+)?)", re.MULTILINE)
ENCODINGS = {
    "wav": ("-c:a", "pcm_s16le", "-f", "wav"),
    "flac": ("-c:a", "flac", "-sample_fmt", "s16", "-f", "flac"),
}


class FfmpegError(ValueError):
    """ffmpeg is missing or failed on a file."""


class Decoded(NamedTuple):
    """What ffmpeg says about one source."""

    seconds: float | None
    """Duration by the container; None if unknown."""
    is_guess: bool
    """Whether it is an estimate, or that of a picture, whose sound may be shorter."""
    is_damaged: bool = False
    """Whether the end is missing or something could not be decoded."""
    num_channels: int = 1
    """Channels of the decoded samples."""


def find_ffmpeg() -> str:
    """Path of ffmpeg by the environment variable, the PATH or `imageio-ffmpeg`, in that order."""
    named = os.environ.get(FFMPEG_VARIABLE)
    path = shutil.which(named or "ffmpeg")
    if path is not None:
        return path
    if named:
        raise FfmpegError(f"no ffmpeg at {named}; {ADVICE}")
    if importlib.util.find_spec("imageio_ffmpeg") is not None:
        return str(importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe())
    raise FfmpegError(f"ffmpeg was not found but is needed to decode m4a and aac; {ADVICE}")


@functools.cache
def ffmpeg_version(ffmpeg: str) -> str:
    """The first line of `ffmpeg -version`; FfmpegError if it does not run."""
    try:
        outcome = subprocess.run(
            [ffmpeg, "-version"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise FfmpegError(f"{ffmpeg} does not run ({error}); {ADVICE}") from error
    return outcome.stdout.splitlines()[0]


@functools.cache
def encoders_of(ffmpeg: str) -> frozenset[str]:
    """The names of an ffmpeg's audio encoders; FfmpegError if it does not run."""
    ffmpeg_version(ffmpeg)
    command = [ffmpeg, "-hide_banner", "-encoders"]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.splitlines()
    return frozenset(line.split()[1] for line in lines if line.startswith(" A"))


def decode_batch(
    ffmpeg: str,
    sources: Sequence[Path],
    targets: Sequence[Path],
    file_format: str,
    sample_rate: int,
) -> list[Decoded]:
    """Decode each source to its target (mono, 16 bit, `sample_rate`), all in one process."""
    command = ["-y"]
    for source in sources:
        # One thread per file: the callers run several batches at once.
        command += [*_SAFELY, "-threads", "1", "-i", _as_url(source)]
    for row, target in enumerate(targets):
        # Without a map, ffmpeg would choose each output's stream from among all inputs.
        command += ["-map", f"{row}:a:0", "-ac", "1", "-ar", str(sample_rate)]
        command += [*ENCODINGS[file_format], *REPRODUCIBLY, "-threads", "1", _as_url(target)]
    return run_ffmpeg(ffmpeg, command, len(sources))[0]


def decode_to_file(
    ffmpeg: str, source: Path | bytes, sample_rate: int, max_seconds: float, target: IO[bytes]
) -> Decoded:
    """Decode a file, or the content of a file, to raw 16-bit samples (little-endian) of all its
    channels, interleaved, in an open file.

    Stops after `max_seconds`. What a file is, ffmpeg decides by its content.
    """
    with as_file(source) as (name, descriptors):
        command = [*_SAFELY, "-threads", "1", "-i", name]
        command += ["-map", "0:a:0", "-t", f"{max_seconds:.3f}", "-af", _FROM_START]
        command += ["-ar", str(sample_rate), "-f", "s16le", "-c:a", "pcm_s16le", "pipe:1"]
        (decoded,), log = run_ffmpeg(ffmpeg, command, 1, target, descriptors)
    if not target.seek(0, os.SEEK_END):
        raise FfmpegError("ffmpeg decoded no samples")
    return decoded._replace(num_channels=_num_channels(log, sample_rate))


def _num_channels(log: str, sample_rate: int) -> int:
    """Channels of raw 16-bit samples that ffmpeg has written; its log gives their bit rate."""
    # Names of layouts ("stereo", "5.1(side)", "2 channels") are many, but bits are counted. The
    # last stream in the log is the output; an input may be of the same kind.
    kilobits = _OUTPUT_KILOBITS.findall(log)
    num_channels = int(kilobits[-1]) * 1000 // (16 * sample_rate) if kilobits else 0
    if not num_channels:
        raise FfmpegError("ffmpeg does not say how many channels it decoded; use a newer version")
    return num_channels


@contextlib.contextmanager
def as_file(source: Path | bytes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A name for ffmpeg to read or write, and the descriptors it needs. It must be able to seek:
    telephones write the index last.
    """
    if isinstance(source, Path):
        yield _as_url(source), ()
    elif hasattr(os, "memfd_create"):
        with scratch_file() as file:
            file.write(source)
            file.flush()
            yield f"file:/proc/self/fd/{file.fileno()}", (file.fileno(),)
    else:
        with tempfile.TemporaryDirectory(prefix="speakernet-") as folder:
            path = Path(folder) / "audio"
            path.write_bytes(source)
            yield _as_url(path), ()


def scratch_file() -> IO[bytes]:
    """A file without a name, in memory if the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("audio"), "w+b")
    return tempfile.TemporaryFile()


def _as_url(path: Path) -> str:
    # "file:" keeps ffmpeg from taking a name for a protocol ("concat:a|b") or an option ("-y.m4a").
    return f"file:{path.absolute()}"


def run_ffmpeg(
    ffmpeg: str,
    arguments: list[str],
    num_inputs: int,
    target: IO[bytes] | None = None,
    descriptors: tuple[int, ...] = (),
) -> tuple[list[Decoded], str]:
    """Run ffmpeg with its standard output in `target`; returns what its log says of each input, and
    the log.
    """
    command = [ffmpeg, "-hide_banner", "-nostats", "-loglevel", "info", *arguments]
    try:
        outcome = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=target or subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=descriptors,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise FfmpegError(f"ffmpeg did not finish within {TIMEOUT_SECONDS} s") from error
    except OSError as error:
        raise FfmpegError(f"{ffmpeg} does not run ({error}); {ADVICE}") from error
    log = outcome.stderr.decode("utf-8", "replace")
    if outcome.returncode != 0:
        if _NO_SOUND in log:
            raise FfmpegError("the file has no sound track")
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        # The last line may only say that it failed.
        reasons = [line for line in lines if _REASON.search(line)]
        status = f"status {outcome.returncode}"
        raise FfmpegError(f"ffmpeg: {[status, *lines[-1:], *reasons[-1:]][-1]}")
    starts = [match.start() for match in _INPUT.finditer(log)][:num_inputs]
    # In a batch, the log does not say whose damage it is.
    is_damaged = num_inputs == 1 and _DAMAGED.search(log) is not None
    reports = []
    for start, end in zip(starts, [*starts[1:], len(log)], strict=True):
        seconds = None
        if match := _DURATION.search(log, start, end):
            hours, minutes, rest = map(float, match.groups())
            seconds = 3600 * hours + 60 * minutes + rest
        is_estimate = "Estimating duration from bitrate" in log[: start + 1] + log[start:end]
        has_picture = _VIDEO.search(log, start, end) is not None
        reports.append(Decoded(seconds, is_estimate or has_picture, is_damaged))
    reports += [Decoded(None, is_guess=True)] * (num_inputs - len(reports))
    return reports, log
