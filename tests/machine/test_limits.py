"""Cores and memory in containers: quotas of both versions of control groups, from made-up folders."""

import math
from pathlib import Path

import pytest

from speakernet.machine import facts as machine
from speakernet.machine.facts import Quota, read_quota

GIB = 1 << 30


def write(folder: Path, **files: object) -> None:
    """Files of a group; __ stands for the dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def quota_of(folder: Path, membership: str) -> Quota:
    write(folder, membership=membership)
    return read_quota(folder / "cgroup", folder / "membership")


def test_version_2_in_a_container(tmp_path: Path) -> None:
    write(
        tmp_path / "cgroup",
        cpu__max="250000 100000",
        memory__max=8 * GIB,
        memory__current=3 * GIB,
        memory__stat=f"anon {2 * GIB}\ninactive_file {GIB // 2}\nactive_file {GIB // 4}",
    )
    assert quota_of(tmp_path, "0::/") == Quota(2.5, 8 * GIB, 8 * GIB - 3 * GIB + GIB // 2 + GIB // 4)


def test_the_tightest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    write(tmp_path / "cgroup" / "jobs", cpu__max="300000 100000", memory__max=4 * GIB, memory__current=3 * GIB)
    write(tmp_path / "cgroup" / "jobs" / "mine", cpu__max="max 100000", memory__max="max", memory__current=GIB)
    write(tmp_path / "cgroup", cpu__max="800000 100000", memory__max=64 * GIB, memory__current=10 * GIB)
    assert quota_of(tmp_path, "0::/jobs/mine") == Quota(3.0, 4 * GIB, GIB)


def test_version_1_where_the_path_is_the_hosts(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    write(root / "cpu,cpuacct", cpu__cfs_quota_us=200000, cpu__cfs_period_us=100000)
    write(
        root / "memory",
        memory__limit_in_bytes=2 * GIB,
        memory__usage_in_bytes=GIB,
        memory__stat=f"inactive_file 7\ntotal_inactive_file {GIB // 4}\ntotal_active_file 0",
    )
    found = quota_of(tmp_path, "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc")
    assert found == Quota(2.0, 2 * GIB, GIB + GIB // 4)


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_version_1_mounts_have_several_names(tmp_path: Path, mount: str) -> None:
    write(tmp_path / "cgroup" / mount / "job", cpu__cfs_quota_us=150000, cpu__cfs_period_us=100000)
    assert quota_of(tmp_path, "4:cpu,cpuacct:/job").cores == 1.5


def test_no_quota_and_nothing_to_read_are_no_bound(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    write(root / "cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    write(root / "memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=5)
    assert quota_of(tmp_path, "2:cpu:/\n1:memory:/") == Quota(math.inf, None, None)
    write(root, cpu__max="nonsense", memory__max="?")
    assert quota_of(tmp_path, "0::/../../elsewhere\nbroken line") == Quota()
    assert read_quota(tmp_path / "nothing", tmp_path / "nowhere") == Quota()


@pytest.fixture()
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`docker run --cpus 1.5 --memory 8m`, seen from inside."""
    write(tmp_path / "cgroup", cpu__max="150000 100000", memory__max=8 << 20, memory__current=6 << 20)
    write(tmp_path, membership="0::/")
    monkeypatch.setattr(machine, "CGROUP_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    return tmp_path / "cgroup"


def test_what_a_process_may_use(container: Path) -> None:
    assert machine.usable_cores() == 1
    assert machine.usable_memory_bytes() == 2 << 20 and machine.total_memory_bytes() == 8 << 20
    write(container, cpu__max="6400000 100000", memory__current=9 << 20)
    assert machine.usable_cores() == 64 and machine.usable_memory_bytes() == 0
    write(container, cpu__max="50000 100000")
    assert machine.usable_cores() == 1


def test_everything_that_counts_cores_and_memory_asks_here(container: Path) -> None:
    import torch

    from speakernet.assembly.batch_size import DEFAULT_MEMORY_SHARE, BatchSizeFinder
    from speakernet.checks.doctor import machine_findings
    from speakernet.data.sharing import free_shared_memory
    from speakernet.machine.facts import system_info
    from speakernet.machine.options import MachineOptions
    from speakernet.machine.settings import optimize_torch_settings

    assert free_shared_memory() <= 2 << 20
    finder = BatchSizeFinder(torch.nn.Linear(2, 2), int, int)
    assert finder.limit_bytes == int(DEFAULT_MEMORY_SHARE * (2 << 20))
    info = system_info()
    assert (info["cpu_cores"], info["memory_bytes"]) == (1, 8 << 20)
    findings = {finding.check: finding.message for finding in machine_findings(container)}
    assert "quota of 1.5" in findings["limits"] and "limited to 8.0 MiB by control group" in findings["limits"]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(8)
        options = MachineOptions(threads="auto", keep_memory=False)
        applied = {setting.name: setting for setting in optimize_torch_settings(options)}
        assert torch.get_num_threads() == 1 == applied["threads"].value
    finally:
        torch.set_num_threads(before)
