"""What the machine brings: free space, disk speed, shared memory, ffmpeg, torch and torchaudio, GPU and driver."""

import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from speakernet.checks.findings import Finding
from speakernet.data.audio import AudioError
from speakernet.data.ffmpeg import FfmpegError, ffmpeg_version, find_ffmpeg
from speakernet.data.lists import StringTable
from speakernet.data.sources import AudioSource
from speakernet.files import human_bytes
from speakernet.machine.facts import (
    TORCH_PAIR,
    describe_limits,
    driver_version,
    gpu_facts,
    unusable_gpu,
    usable_cores,
    version_of,
)

LEAST_FREE_BYTES = 5 << 30
# Docker gives 64 MiB unless told otherwise: eight batches of 64 crops of 2 s in float32.
LEAST_SHARED_BYTES = 1 << 30
NUM_TIMED_FILES = 200
#: Two-second crops a second and reader below which the disk, not the network, sets the pace.
SLOW_READS_PER_SECOND = 100
#: Reading all files once in less is no wait that anybody should act on, however slow each is.
SHORT_PASS_SECONDS = 60
IMPORT_TIMEOUT_SECONDS = 120


def machine_findings(save_path: Path, *, needs_ffmpeg: bool = False) -> Iterator[Finding]:
    """Everything about the machine; `needs_ffmpeg` where the lists name files that nothing else can decode."""
    yield Finding("ok", "limits", describe_limits())
    yield _free_space(save_path)
    yield from _shared_memory()
    yield _ffmpeg(needs_ffmpeg)
    yield _torch_pair()
    yield _gpu()


def disk_finding(source: AudioSource, names: StringTable, check: str) -> Finding:
    """Time some whole-file reads by one reader, spread over the list so that few of them lie in memory already."""
    rows = range(0, len(names), max(1, len(names) // NUM_TIMED_FILES))
    num_read = 0
    started = time.perf_counter()
    for row in rows:
        try:
            source.read(names[row])
            num_read += 1
        except AudioError:
            continue
    seconds = time.perf_counter() - started
    if not num_read:
        return Finding("warning", check, "no file could be read to time the disk")
    rate = num_read / max(seconds, 1e-9)
    message = f"{rate:,.0f} files a second by one reader (files that were read before come from memory)"
    if rate < SLOW_READS_PER_SECOND and len(names) / rate > SHORT_PASS_SECONDS:
        return Finding("warning", check, message, "copy the data to a local SSD, or pack it: speakernet pack")
    return Finding("ok", check, message)


def _free_space(save_path: Path) -> Finding:
    folder = save_path.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        return Finding("error", "save path", f"{folder} is not writable", "choose another --training.save_path")
    message = f"{human_bytes(free)} free in {folder}"
    if free < LEAST_FREE_BYTES:
        return Finding("warning", "free space", message, "checkpoints of a large model may not fit; free some space")
    return Finding("ok", "free space", message)


def _shared_memory() -> Iterator[Finding]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return
    usage = shutil.disk_usage(folder)
    message = f"{human_bytes(usage.free)} of {human_bytes(usage.total)} free for worker processes"
    if usage.free < LEAST_SHARED_BYTES:
        advice = "workers may die with a bus error: start the container with --shm-size=8g, or use fewer workers"
        yield Finding("warning", "shared memory", message, advice)
    else:
        yield Finding("ok", "shared memory", message)


def _ffmpeg(is_needed: bool) -> Finding:
    try:
        path = find_ffmpeg()
        return Finding("ok", "ffmpeg", f"{ffmpeg_version(path)} ({path})")
    except FfmpegError as error:
        if is_needed:
            return Finding("warning", "ffmpeg", str(error), "the lists name files that only ffmpeg can convert")
        return Finding("ok", "ffmpeg", "not found, and nothing here needs it (it decodes m4a, as VoxCeleb2 comes)")


@functools.cache
def _torch_pair() -> Finding:
    versions = {package: version_of(package) for package in ("torch", "torchaudio")}
    for package, version in versions.items():
        if version is None:
            return Finding("error", "torch", f"{package} is not installed", "pip install -e . in the checkout")
    message = ", ".join(f"{package} {version}" for package, version in versions.items())
    # In a process of its own: a pair that does not match may take the process down.
    outcome = subprocess.run(
        [sys.executable, "-c", "import torchaudio"], capture_output=True, text=True, timeout=IMPORT_TIMEOUT_SECONDS,
        check=False,
    )  # fmt: skip
    if outcome.returncode != 0:
        last = (outcome.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        advice = f"install a pair that belongs together: {TORCH_PAIR}"
        return Finding("error", "torch", f"{message}: torchaudio does not load ({last})", advice)
    return Finding("ok", "torch", message)


def _gpu() -> Finding:
    facts = gpu_facts()
    if facts:
        names = ", ".join(f"{gpu['name']} ({human_bytes(gpu['memory_bytes'])})" for gpu in facts["gpus"])
        return Finding("ok", "GPU", f"{names}; CUDA {facts['cuda']}; driver {driver_version() or 'unknown'}")
    found, advice = unusable_gpu()
    if found:
        return Finding("warning", "GPU", found, advice)
    return Finding("ok", "GPU", f"none; training runs on {usable_cores()} CPU cores")
