"""What this process may use of the machine: cores and memory, counted in this one place.

A container or a job sees the whole machine and may use a part of it: the kernel's scheduler keeps a set of cores
(affinity), control groups keep quotas of processor time and memory (both versions are read, every group from the
process's own up to the root, since each one binds). What cannot be read is no bound.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from speakernet.files import human_bytes

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
# Version 1 writes "no limit" as the largest number of whole pages.
NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True)
class Quota:
    """What the control groups allow.

    Attributes:
        cores: processor time a second, in cores; infinite without a quota.
        memory_bytes: the smallest limit; None without one.
        free_bytes: what is left below the tightest limit (page cache counts as free: the kernel gives it back).
    """

    cores: float = math.inf
    memory_bytes: int | None = None
    free_bytes: int | None = None


def usable_cores() -> int:
    """Cores that this process may keep busy: those of its affinity, or fewer by quota (1.5 cores are one)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Down: the second thread of 1.5 cores would be stopped half of the time, and the first waits for it at every step.
    return max(1, math.floor(min(cores, read_quota().cores)))


def usable_memory_bytes() -> int:
    """Memory that this process could take now without the kernel killing something."""
    free = read_quota().free_bytes
    available = int(psutil.virtual_memory().available)
    return available if free is None else min(available, free)


def total_memory_bytes() -> int:
    """All memory that this process could ever have: the machine's, or its control group's where that is less."""
    limit = read_quota().memory_bytes
    total = int(psutil.virtual_memory().total)
    return total if limit is None else min(total, limit)


def describe_limits() -> str:
    """Cores and memory in words, with what bounds them."""
    quota, in_machine = read_quota(), os.cpu_count() or 1
    cores = f"{usable_cores()} of {in_machine} cores"
    if quota.cores < in_machine:
        cores += f" (quota of {quota.cores:g})"
    memory = f"{human_bytes(usable_memory_bytes())} of {human_bytes(total_memory_bytes())} of memory free"
    if quota.memory_bytes is not None:
        memory += f" (limited to {human_bytes(quota.memory_bytes)} by control group)"
    return f"{cores}, {memory}"


def read_quota(root: Path | None = None, membership: Path | None = None) -> Quota:
    """The tightest quotas of this process's control groups and of all above them.

    Args:
        root: where the groups are mounted; None: where Linux has them.
        membership: the file that names the process's groups; None: the process's own.
    """
    cores, limits = math.inf, []
    for folder in _folders(root or CGROUP_ROOT, membership or MEMBERSHIP):
        cores = min(cores, _core_quota(folder))
        limits += _memory_limit(folder)
    if not limits:
        return Quota(cores)
    return Quota(cores, min(limit for limit, _ in limits), max(0, min(limit - used for limit, used in limits)))


def _folders(root: Path, membership: Path) -> Iterator[Path]:
    """The folders of the process's groups and of the groups above, that are there.

    Inside a container the named path often is the host's, and the container's own group is mounted at the root.
    """
    for line in _text(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        # Version 1 mounts each controller under its name, or a pair such as cpu,cpuacct under both; version 2 has no
        # controllers here and lies at the root, or under `unified` where version 1 is mounted beside it.
        mounts = [controllers, *controllers.split(",")] if controllers else ["", "unified"]
        # A group outside of this namespace is named by `..`, and is out of sight.
        parts = [part for part in path.split("/") if part and part != ".."]
        for mount in dict.fromkeys(mounts):
            for depth in range(len(parts), -1, -1):
                folder = root.joinpath(mount, *parts[:depth])
                if folder.is_dir():
                    yield folder


def _core_quota(folder: Path) -> float:
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    # "max" and -1 mean none.
    if not quota.isdigit() or not period.isdigit() or not int(quota) or not int(period):
        return math.inf
    return int(quota) / int(period)


def _memory_limit(folder: Path) -> list[tuple[int, int]]:
    """Limit and what is taken of it, in bytes; empty without a limit."""
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _text(folder / limit_name), _text(folder / used_name)
        if limit.isdigit() and int(limit) < NO_LIMIT_BYTES:
            taken = int(used) if used.isdigit() else 0
            # The kernel gives the page cache back before it kills anything: reading a corpus takes no memory away.
            return [(int(limit), max(0, taken - _page_cache(folder)))]
    return []


def _page_cache(folder: Path) -> int:
    """Bytes of files in memory; version 1 gives those of the groups below under names of their own."""
    facts = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    prefix = "total_" if "total_inactive_file" in facts else ""
    values = [facts.get(f"{prefix}{name}", "0") for name in ("inactive_file", "active_file")]
    return sum(int(value) for value in values if value.isdigit())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
