"""Find ffmpeg and decode with it: many files per call, no shell, file names that cannot be mistaken
for options.

ffmpeg is needed only for formats that soundfile cannot read (m4a, aac, webm …). Starting it costs
four times as much as decoding a short file, hence the batches.
"""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

FFMPEG_VARIABLE = "SPEAKERNET_FFMPEG"
#: A damaged file can hang a decoder; an hour of audio decodes in seconds.
TIMEOUT_SECONDS = 600
#: Suffixes of files with sound that soundfile cannot read.
CONVERTIBLE_SUFFIXES = frozenset(
    {".m4a", ".aac", ".mp4", ".webm", ".wma", ".3gp", ".amr", ".mka", ".mkv", ".mov", ".caf"}
)
ADVICE = (
    "install it (Debian, Ubuntu: apt install ffmpeg; macOS: brew install ffmpeg; anywhere: pip "
    "install imageio-ffmpeg) or give its path with --ffmpeg FILE or the environment variable "
    f"{FFMPEG_VARIABLE}"
)
_INPUT = re.compile(r"^Input #(\d+),", re.MULTILINE)
_DURATION = re.compile(r"^\s*Duration: (\d+):(\d\d):(\d\d(?:\.\d+)?)", re.MULTILINE)
ENCODINGS = {
    "wav": ("-c:a", "pcm_s16le", "-f", "wav"),
    "flac": ("-c:a", "flac", "-sample_fmt", "s16", "-f", "flac"),
}


class FfmpegError(ValueError):
    """ffmpeg is missing or failed on a file."""


Decoded: TypeAlias = tuple[float | None, bool]
"""Duration of one source in seconds according to ffmpeg (None if unknown), and whether it is an
estimate."""


def find_ffmpeg(given: str | None = None) -> str:
    """Path of ffmpeg: the given one, or from the environment variable, the PATH or
    `imageio-ffmpeg`, in that order.
    """
    named = given or os.environ.get(FFMPEG_VARIABLE)
    found = shutil.which(named or "ffmpeg")
    if found is not None:
        return found
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
        # One thread per file: the callers run several batches at once. Protocols as in
        # `decode_to_bytes`.
        command += ["-protocol_whitelist", "file", "-threads", "1", "-i", _as_url(source)]
    # Without a map, ffmpeg would choose each output's stream from among all inputs.
    for row, target in enumerate(targets):
        command += [
            "-map",
            f"{row}:a:0",
            "-ac",
            "1",
            "-ar",
            str(sample_rate),
            *ENCODINGS[file_format],
        ]
        # No encoder name or date in the output, so that the same source gives the same bytes.
        command += [
            "-map_metadata",
            "-1",
            "-fflags",
            "+bitexact",
            "-flags:a",
            "+bitexact",
            "-threads",
            "1",
        ]
        command.append(_as_url(target))
    _, decoded = _run(ffmpeg, command, len(sources))
    return decoded


def decode_to_bytes(
    ffmpeg: str, source: Path | bytes, sample_rate: int, container: str = ""
) -> tuple[bytes, Decoded]:
    """Decode a file, or the content of a file, to raw 16-bit mono samples (little-endian) in
    memory.
    """
    content = source if isinstance(source, bytes) else b""
    # No other protocol: a playlist posing as audio must not make ffmpeg open other files or
    # addresses.
    name, protocol = ("pipe:0", "pipe") if isinstance(source, bytes) else (_as_url(source), "file")
    command = [
        "-protocol_whitelist",
        protocol,
        *(("-f", container) if container else ()),
        "-i",
        name,
    ]
    command += [
        "-map",
        "0:a:0",
        "-ac",
        "1",
        "-ar",
        str(sample_rate),
        "-f",
        "s16le",
        "-c:a",
        "pcm_s16le",
        "pipe:1",
    ]
    raw, (decoded,) = _run(ffmpeg, command, 1, content)
    if not raw:
        raise FfmpegError("ffmpeg decoded no samples")
    return raw, decoded


def _as_url(path: Path) -> str:
    # "file:" keeps ffmpeg from taking a name for a protocol ("concat:a|b") or an option ("-y.m4a").
    return f"file:{path.absolute()}"


def _run(
    ffmpeg: str, arguments: list[str], num_inputs: int, content: bytes = b""
) -> tuple[bytes, list[Decoded]]:
    """Run ffmpeg; returns its standard output and each input's duration, taken from its log."""
    command = [ffmpeg, "-hide_banner", "-nostats", "-loglevel", "info", *arguments]
    try:
        outcome = subprocess.run(
            command, input=content, capture_output=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise FfmpegError(f"ffmpeg did not finish within {TIMEOUT_SECONDS} s") from error
    except OSError as error:
        raise FfmpegError(f"{ffmpeg} does not run ({error}); {ADVICE}") from error
    log = outcome.stderr.decode("utf-8", "replace")
    if outcome.returncode != 0:
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        raise FfmpegError(f"ffmpeg: {lines[-1] if lines else f'status {outcome.returncode}'}")
    starts = [match.start() for match in _INPUT.finditer(log)][:num_inputs]
    found: list[Decoded] = []
    for start, end in zip(starts, [*starts[1:], len(log)], strict=True):
        match = _DURATION.search(log, start, end)
        hours, minutes, rest = map(float, match.groups() if match else "000")
        seconds = 3600 * hours + 60 * minutes + rest if match else None
        found.append(
            (seconds, "Estimating duration from bitrate" in log[: start + 1] + log[start:end])
        )
    return outcome.stdout, found + [(None, True)] * (num_inputs - len(found))
