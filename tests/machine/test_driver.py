"""A GPU that torch cannot use: the driver as files and programs tell it, and what is advised for it."""

import logging
import re
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet

from speakernet.checks.doctor import machine_findings
from speakernet.machine import facts
from speakernet.machine.device import choose_device
from speakernet.machine.facts import FOR_OLDER_CUDA, driver_version, unusable_gpu
from speakernet.machine.options import MachineOptions

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Oct 19 18:56:32 UTC 2023\nGCC version:  gcc 12.2.0\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (builder@host)\nGCC version: 13.3\n"


class Machine:
    """A machine whose driver is a file or a program in the PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has_file(self, text: str) -> None:
        (self.folder / "version").write_text(text)

    def has_program(self, answer: str) -> None:
        program = self.folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{answer}\n")
        program.chmod(0o755)


@pytest.fixture()
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """No GPU for torch, which is built for CUDA 13; no driver yet."""
    monkeypatch.setattr(facts, "VERSION_FILE", tmp_path / "version")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("text", "version"), [(CLOSED, "535.129.03"), (OPEN, "570.86.10"), (CLOSED, "384.81"), (OPEN, "580.65")]
)
def test_the_driver_is_read_from_its_file(machine: Machine, text: str, version: str) -> None:
    machine.has_file(text.format(version))
    assert driver_version() == version


def test_or_asked_of_its_program(machine: Machine) -> None:
    assert driver_version() == ""
    machine.has_program("echo 550.54.15; echo 550.54.15")
    assert driver_version() == "550.54.15"
    machine.has_program("echo NVIDIA-SMI has failed because it could not communicate with the driver; exit 9")
    assert driver_version() == ""
    machine.has_file("something else")
    assert driver_version() == ""


@pytest.mark.parametrize(
    ("version", "cuda", "found", "advice"),
    [
        ("535.129.03", "13.0", "535.129.03.*built for CUDA 13.0.*takes driver 580 or later", "torch>=2.9,<2.11"),
        ("470.57.02", "13.2", "takes driver 580 or later", "no torch that speakernet supports"),
        ("470.57.02", "12.8", "takes driver 525 or later", "no torch that speakernet supports"),
        ("580.65.06", "13.0", "can use no GPU$", "--gpus all"),
        ("535.129.03", "12.8", "can use no GPU$", "--gpus all"),
        ("535.129.03", None, "built without CUDA", "torch>=2.9,<2.11"),
    ],
)
def test_what_helps_depends_on_driver_and_torch(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, version: str, cuda: str | None, found: str, advice: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    machine.has_file(OPEN.format(version))
    said = unusable_gpu()
    assert re.search(found, said[0]) and advice in said[1]


def test_training_warns_and_the_doctor_too(machine: Machine, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO)
    machine.has_program("echo 535.129.03")
    assert choose_device(MachineOptions()).type == "cpu"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "535.129.03" in warning and "CUDA 13.0" in warning and FOR_OLDER_CUDA in warning
    with pytest.raises(ValueError, match=r"runtime\.device: cuda, but there is an NVIDIA driver \(535.*pip install"):
        choose_device(MachineOptions(device="cuda"))
    (finding,) = [one for one in machine_findings(tmp_path) if one.check == "GPU"]
    assert finding.level == "warning" and FOR_OLDER_CUDA in finding.advice


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_who_asked_for_the_cpu_is_not_warned(
    machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    machine.has_program("echo 535.129.03")
    choose_device(MachineOptions(device="cpu"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    choose_device(MachineOptions())
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_the_line_for_older_drivers_stays_within_the_bounds_of_the_package(repository: Path) -> None:
    bounds = dict(re.findall(r'"(torch(?:audio)?)([<>=][^"]+)"', (repository / "setup.py").read_text()))
    advised = dict(re.findall(r"'(torch(?:audio)?)([<>=][^']+)'", FOR_OLDER_CUDA))
    assert set(bounds) == set(advised) == {"torch", "torchaudio"}
    for name, specifiers in advised.items():
        assert all(version in SpecifierSet(bounds[name]) for version in ("2.9.1", "2.10.0"))
        assert "2.10.0" in SpecifierSet(specifiers) and "2.11.0" not in SpecifierSet(specifiers)
