"""This machine and the part of it that this process may use: cores, memory, versions, GPUs, the
NVIDIA driver.

A container or job sees the whole machine but may use only part of it: the scheduler assigns a set
of cores (affinity), and control groups set quotas of processor time and memory (both versions are
read, for every group from the process's own up to the root, because each can set a limit). An
unreadable quota counts as no limit. No torch is imported here.
"""

import contextlib
import functools
import importlib.metadata
import logging
import math
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import speakernet
from speakernet.files import human_bytes

logger = logging.getLogger(__name__)

TORCH_PAIR = "pip install 'torch>=2.9,<2.15' 'torchaudio>=2.9,<2.12'"
"""Installs matching versions of torch and torchaudio, within the bounds of setup.py."""
PACKAGES = ("torch", "torchaudio", "numpy", "scipy", "soundfile")
BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""Linux's names for x86 AMX and AVX512-BF16, and Arm's BF16 extension."""
CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
# Version 1 writes "no limit" as the largest number of whole pages.
NO_LIMIT_BYTES = 1 << 60

VERSION_FILE = Path("/proc/driver/nvidia/version")

FOR_OLDER_CUDA = "pip install 'torch>=2.9,<2.11' 'torchaudio>=2.9,<2.11'"
"""Within the bounds of setup.py: pip's Linux builds of torch 2.9 and 2.10 are for CUDA 12.8, from
2.11 on for 13."""

_failed_readings: set[str] = set()


@contextlib.contextmanager
def measuring(what: str) -> Iterator[None]:
    """Run a measurement that may fail, such as NVML's; a failure is logged once per process and
    does not end the run.

    >>> found = {}
    >>> with measuring("the temperature"):
    ...     found["temperature"] = 1 / 0
    >>> found
    {}
    """
    try:
        yield
    except Exception as error:
        # Any exception: a library raises its own types, which may not even be importable here.
        if what not in _failed_readings:
            _failed_readings.add(what)
            reason = str(error).strip().partition("\n")[0]
            logger.info("cannot measure %s (%s: %s)", what, type(error).__name__, reason)


@dataclass(frozen=True)
class Quota:
    """Limits of the control groups; page cache counts as free, because the kernel can reclaim
    it.
    """

    cores: float = math.inf
    memory_bytes: int | None = None
    free_bytes: int | None = None


def usable_cores() -> int:
    """Cores that this process may keep busy: its affinity, or fewer if a quota is lower (1.5 cores
    count as one).
    """
    cores = os.cpu_count() or 1
    if sys.platform == "linux":
        cores = len(os.sched_getaffinity(0))
    # Rounded down: a second thread on 1.5 cores would be suspended half the time, and the first
    # would wait for it.
    return max(1, math.floor(min(cores, read_quota().cores)))


def usable_memory_bytes() -> int:
    """Memory that this process can still allocate before the kernel kills something."""
    free = read_quota().free_bytes
    available = int(psutil.virtual_memory().available)
    return available if free is None else min(available, free)


def total_memory_bytes() -> int:
    """All memory that this process can ever have: the machine's, or its control group's limit if
    lower.
    """
    limit = read_quota().memory_bytes
    # A control group may have a limit above the machine's memory.
    total = int(psutil.virtual_memory().total)
    return total if limit is None else min(total, limit)


def describe_limits() -> str:
    """Cores and memory as text, with their limits."""
    quota = read_quota()
    in_machine = os.cpu_count() or 1
    cores = f"{usable_cores()} of {in_machine} cores"
    if quota.cores < in_machine:
        cores += f" (quota of {quota.cores:g})"
    memory = (
        f"{human_bytes(usable_memory_bytes())} of {human_bytes(total_memory_bytes())} of "
        "memory free"
    )
    if quota.memory_bytes is not None:
        memory += f" (limited to {human_bytes(quota.memory_bytes)} by control group)"
    return f"{cores}, {memory}"


def read_quota() -> Quota:
    """The tightest quotas among this process's control groups and all their parents."""
    cores = math.inf
    limits: list[int] = []
    free: list[int] = []
    for folder in _group_folders():
        # Version 2 of control groups, else version 1; "max" and -1 mean no limit.
        version_1 = [_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        quota = (_text(folder / "cpu.max") or " ".join(version_1)).split()
        if len(quota) == 2 and all(part.isdigit() and int(part) for part in quota):
            cores = min(cores, int(quota[0]) / int(quota[1]))
        limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
        if limit.isdigit() and int(limit) < NO_LIMIT_BYTES:
            used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes")
            counts = dict(re.findall(r"(\w+) (\d+)", _text(folder / "memory.stat")))
            # Version 1 includes child groups only in the fields with this prefix.
            prefix = "total_" if "total_inactive_file" in counts else ""
            cache = 0
            for name in ("inactive_file", "active_file"):
                cache += int(counts.get(prefix + name, 0))
            limits.append(int(limit))
            free.append(int(limit) - max(0, int(used or 0) - cache))
    if not limits:
        return Quota(cores)
    return Quota(cores, min(limits), max(0, min(free)))


def _group_folders() -> Iterator[Path]:
    """The existing folders of the process's groups and their parents.

    Inside a container, the listed path is often the host's, and the container's own group is
    mounted at the root.
    """
    for line in _text(MEMBERSHIP).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        # Version 1 mounts each controller under its name, or a pair such as cpu,cpuacct under both;
        # version 2 lists no controllers here and is mounted at the root, or under `unified` beside
        # version 1.
        mounts = [controllers, *controllers.split(",")] if controllers else ["", "unified"]
        # `..` stands for a group outside this namespace.
        steps = [step for step in path.split("/") if step and step != ".."]
        for mount in dict.fromkeys(mounts):
            for depth in range(len(steps), -1, -1):
                folder = CGROUP_ROOT.joinpath(mount, *steps[:depth])
                if folder.is_dir():
                    yield folder


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""


@functools.cache
def system_info() -> dict[str, Any]:
    """Versions, processor, memory and GPUs as plain values, for `results.json` and the report; read
    once.
    """
    info: dict[str, Any] = {
        "platform": platform.platform(),
        "python": platform.python_version(),
        # Not from the metadata: an editable install keeps the version from when it was installed.
        "versions": {
            "speakernet": speakernet.__version__,
            **{name: version_of(name) for name in PACKAGES},
        },
        "cpu": cpu_name(),
        "cpu_cores": usable_cores(),
        "memory_bytes": total_memory_bytes(),
        "gpus": [],
    }
    with measuring("the names and memory of the GPUs"):
        info |= gpu_facts()
    return info


def version_of(package: str) -> str | None:
    """The installed version of a package, None if it is not installed."""
    # Not `__version__`: importing a torchaudio that does not match its torch may end the process.
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu_facts() -> dict[str, Any]:
    """`gpus` (name and memory of each that torch can use), `cuda` (the version torch was built for)
    and `tf32`.
    """
    # Imported late: torch takes two seconds, and the facts above do not need it.
    import torch

    if not torch.cuda.is_available():
        return {}
    gpus = []
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        gpus.append({"name": gpu.name, "memory_bytes": int(gpu.total_memory)})
    tf32 = bool(torch.backends.cudnn.allow_tf32)
    return {"cuda": torch.version.cuda, "tf32": tf32, "gpus": gpus}


def cpu_name() -> str:
    """The processor's model name, or its family on systems that do not give one."""
    return _cpu_facts().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """The processor's instruction-set flags in Linux's naming; empty on other systems."""
    facts = _cpu_facts()
    # Called flags on x86, features on Arm.
    return frozenset((facts.get("flags") or facts.get("Features", "")).split())


def native_bf16(flags: frozenset[str] | None = None) -> str | None:
    """The flag that shows native bfloat16 arithmetic; None if the processor does not have it."""
    flags = cpu_flags() if flags is None else flags
    return next((flag for flag in BF16_FLAGS if flag in flags), None)


@functools.cache
def _cpu_facts() -> dict[str, str]:
    """The lines of /proc/cpuinfo about the first core."""
    # The file repeats these lines for each core; model and flags hardly ever differ.
    facts: dict[str, str] = {}
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    return facts


def driver_version() -> str:
    """The NVIDIA driver's version from its kernel module; "unknown" if only nvidia-smi exists, else
    empty.
    """
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 …
    version = re.search(r"\s(\d+(?:\.\d+)+)\s", _text(VERSION_FILE))
    if version:
        return version[1]
    return "unknown" if shutil.which("nvidia-smi") else ""


def unusable_gpu() -> tuple[str, str]:
    """The problem and what to do if there is an NVIDIA driver but torch has no GPU; otherwise two
    empty strings.
    """
    # Imported late: torch takes two seconds.
    import torch

    # Empty or -1 hides all GPUs, which is the user's choice.
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    driver = driver_version()
    if is_hidden or torch.cuda.is_available() or not driver:
        return "", ""
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return (
        f"there is an NVIDIA driver ({driver}), but torch {torch.__version__}, {built}, cannot use "
        "the GPU",
        f"check with nvidia-smi which CUDA version the driver supports; for CUDA 13: {TORCH_PAIR}; "
        f"for CUDA 12: {FOR_OLDER_CUDA}; start containers with --gpus all",
    )
