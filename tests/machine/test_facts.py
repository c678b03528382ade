"""Cores, memory and quotas in containers, versions, GPUs and drivers; failed readings are not
fatal.
"""

import logging
import math

import pytest
import torch

from speakernet.checks import Finding
from speakernet.checks.doctor import machine_findings
from speakernet.machine import facts
from speakernet.machine.device import choose_device
from speakernet.machine.facts import Quota, measuring, read_quota, system_info
from speakernet.machine.memory import Monitor
from speakernet.machine.options import MachineOptions
from speakernet.machine.settings import optimize_torch_settings

GIB = 1 << 30
CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Oct 19 18:56:32 UTC 2023\nGCC "
    "version:  gcc 12.2.0\n"
)
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  "
    "(builder@host)\nGCC version: 13.3\n"
)


def write(folder, **files):
    """Files of a control group; __ stands for the dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


V2 = {
    "": {
        "cpu__max": "250000 100000",
        "memory__max": 8 * GIB,
        "memory__current": 3 * GIB,
        "memory__stat": f"anon {2 * GIB}\ninactive_file {GIB // 2}\nactive_file {GIB // 4}",
    }
}
TIGHTEST = {
    "jobs": {"cpu__max": "300000 100000", "memory__max": 4 * GIB, "memory__current": 3 * GIB},
    "jobs/mine": {"cpu__max": "max 100000", "memory__max": "max", "memory__current": GIB},
    "": {"cpu__max": "800000 100000", "memory__max": 64 * GIB, "memory__current": 10 * GIB},
}
V1 = {"cpu,cpuacct": {"cpu__cfs_quota_us": 200000, "cpu__cfs_period_us": 100000},
      "memory": {"memory__limit_in_bytes": 2 * GIB, "memory__usage_in_bytes": GIB,
                 "memory__stat": ("inactive_file 7\ntotal_inactive_file "
                 f"{GIB // 4}\ntotal_active_file 0")},
      "cpu/job": {"cpu__cfs_quota_us": 150000, "cpu__cfs_period_us": 100000}}  # fmt: skip
UNLIMITED = {
    "cpu": {"cpu__cfs_quota_us": -1, "cpu__cfs_period_us": 100000},
    "memory": {"memory__limit_in_bytes": 9223372036854771712, "memory__usage_in_bytes": 5},
}


@pytest.mark.parametrize(
    ("groups", "membership", "expected"),
    [
        (V2, "0::/", Quota(2.5, 8 * GIB, 8 * GIB - 3 * GIB + GIB // 2 + GIB // 4)),
        (TIGHTEST, "0::/jobs/mine", Quota(3.0, 4 * GIB, GIB)),
        # A path of the host.
        (
            V1,
            "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/a",
            Quota(2.0, 2 * GIB, GIB + GIB // 4),
        ),
        (V1, "4:cpu,cpuacct:/job", Quota(1.5)),
        (UNLIMITED, "2:cpu:/\n1:memory:/", Quota(math.inf)),
        (
            {"": {"cpu__max": "nonsense", "memory__max": "?"}},
            "0::/../../elsewhere\nbroken line",
            Quota(),
        ),
    ],
)
def test_quota(tmp_path, monkeypatch, groups, membership, expected):
    monkeypatch.setattr(facts, "CGROUP_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(facts, "MEMBERSHIP", tmp_path / "membership")
    for folder, files in groups.items():
        write(tmp_path / "cgroup" / folder, **files)
    write(tmp_path, membership=membership)
    assert read_quota() == expected


@pytest.fixture
def container(tmp_path, monkeypatch):
    """`docker run --cpus 1.5 --memory 8m`, seen from inside."""
    write(
        tmp_path / "cgroup", cpu__max="150000 100000", memory__max=8 << 20, memory__current=6 << 20
    )
    write(tmp_path, membership="0::/")
    monkeypatch.setattr(facts, "CGROUP_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(facts, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(
        facts.os, "sched_getaffinity", lambda process: set(range(64)), raising=False
    )
    system_info.cache_clear()
    yield tmp_path / "cgroup"
    system_info.cache_clear()


def test_limits(container):
    assert facts.usable_cores() == 1
    assert facts.usable_memory_bytes() == 2 << 20 and facts.total_memory_bytes() == 8 << 20
    write(container, cpu__max="6400000 100000", memory__current=9 << 20)
    assert facts.usable_cores() == 64 and facts.usable_memory_bytes() == 0
    write(container, cpu__max="50000 100000")
    assert facts.usable_cores() == 1


def test_users_of_the_limits(container, monkeypatch):
    # `_torch_pair` imports torchaudio in a new process, which is slow;
    # `tests/checks/test_doctor.py` covers it.
    monkeypatch.setattr("speakernet.checks.doctor._torch_pair", lambda: Finding("ok", "torch", ""))
    info = system_info()
    assert (info["cpu_cores"], info["memory_bytes"]) == (1, 8 << 20)
    findings = {finding.check: finding.message for finding in machine_findings(container)}
    assert "1.5" in findings["limits"] and "8.0 MiB" in findings["limits"]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(8)
        applied = optimize_torch_settings(MachineOptions(threads="auto", keep_memory=False))
        assert torch.get_num_threads() == 1 == applied["threads"]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("text", "name", "flags", "bf16"),
    [
        ("processor : 0\nmodel name : AMD\nflags : fpu avx512_bf16\n\nmodel name : other\n", "AMD",
         {"fpu", "avx512_bf16"}, "avx512_bf16"),
        ("processor : 0\nFeatures : asimd bf16\n", "aarch64", {"asimd", "bf16"}, "bf16"),
        ("", "aarch64", set(), None),
    ],
    ids=["x86", "Arm", "no /proc"],
)  # fmt: skip
def test_processor(text, name, flags, bf16, monkeypatch):
    monkeypatch.setattr(facts, "_text", lambda path: text)
    monkeypatch.setattr(facts.platform, "processor", lambda: "")
    monkeypatch.setattr(facts.platform, "machine", lambda: "aarch64")
    facts._cpu_facts.cache_clear()
    try:
        assert (facts.cpu_name(), facts.cpu_flags(), facts.native_bf16()) == (name, flags, bf16)
    finally:
        facts._cpu_facts.cache_clear()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """torch, built for CUDA 13, sees no GPU; the folder is the PATH and may have the driver's
    file.
    """
    monkeypatch.setattr(facts, "VERSION_FILE", tmp_path / "version")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("driver", "cuda", "found"),
    [(OPEN, "13.0", "built for CUDA 13.0"), (CLOSED, None, "built without CUDA")],
)
def test_unusable_gpu(machine, caplog, monkeypatch, driver, cuda, found):
    """Training and the doctor warn of an unusable GPU, unless the CPU was requested."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    (machine / "version").write_text(driver.format("535.129.03"))
    assert choose_device(MachineOptions()).type == "cpu"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "535.129.03" in warning and found in warning and facts.FOR_OLDER_CUDA in warning
    with pytest.raises(ValueError, match=r"runtime\.device is cuda.*535.*pip install"):
        choose_device(MachineOptions(device="cuda"))
    (finding,) = [found for found in machine_findings(machine) if found.check == "GPU"]
    assert finding.level == "warning" and facts.FOR_OLDER_CUDA in finding.advice
    caplog.clear()
    choose_device(MachineOptions(device="cpu"))
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        choose_device(MachineOptions())
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


class NVMLError(Exception):
    """Like pynvml's, which is not a subclass of an exception that callers expect."""


def refuse(*arguments, **options):
    raise NVMLError("Not Supported")


def test_failed_readings(monkeypatch, caplog):
    """Failed readings are omitted and logged once."""
    monkeypatch.setattr(facts, "_failed_readings", set())
    caplog.set_level(logging.INFO)
    for _ in range(2):
        with measuring("the temperature"):
            refuse()
    assert (
        len(caplog.records) == 1
        and "the temperature" in caplog.text
        and "NVMLError: Not Supported" in caplog.text
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    system_info.cache_clear()
    info = system_info()
    assert info["cpu_cores"] >= 1 and info["gpus"] == []
    monkeypatch.undo()
    system_info.cache_clear()
    with Monitor(refuse, sample_seconds=0.001) as monitor:
        pass
    assert monitor.peak == monitor.start == 0 and monitor.mean is None
