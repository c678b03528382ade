"""The device of a run: what is asked for and what there is, its clock and its utilisation."""

import logging

import pytest
import torch

from speakernet.config import load_config
from speakernet.machine import device
from speakernet.machine.device import choose_device, find_device, utilisation_monitor
from speakernet.machine.options import MachineOptions


@pytest.fixture()
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine with two GPUs; the list has those that were made current."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"made-up {device.index}")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return current


@pytest.mark.parametrize(
    ("options", "rank", "expected"),
    [
        ({}, None, "cuda:0"),
        ({"device": "cuda"}, None, "cuda:0"),
        ({"gpu_id": 1}, None, "cuda:1"),
        ({"device": "cpu", "gpu_id": 1}, None, "cpu"),
        ({}, 1, "cuda:1"),
        ({"gpu_id": 0}, 1, "cuda:0"),
    ],
)
def test_find_device(gpus: list[torch.device], options: dict, rank: int | None, expected: str) -> None:
    assert find_device(MachineOptions(**options), rank) == torch.device(expected)
    assert gpus == [], "finding has no effect"


def test_choose_device(gpus: list[torch.device], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert choose_device(MachineOptions(gpu_id=1)) == torch.device("cuda:1")
    assert gpus == [torch.device("cuda:1")] and "cuda:1 (made-up 1)" in caplog.text
    choose_device(MachineOptions(device="cpu"))
    assert "cpu (asked for)" in caplog.text and len(gpus) == 1


def test_a_gpu_that_is_missing(gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"gpu_id: 2\b"):
        find_device(MachineOptions(gpu_id=2))
    with pytest.raises(ValueError, match="rank 2 "):
        find_device(MachineOptions(), 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "unusable_gpu", lambda: ("", ""))
    with pytest.raises(ValueError, match=r"runtime\.device: cuda"):
        choose_device(MachineOptions(device="cuda"))
    assert choose_device(MachineOptions()) == torch.device("cpu")
    with pytest.raises(ValueError, match="'mps'"):
        load_config(["--runtime.device", "mps"])


def test_utilisation(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([80, 40])
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: next(readings))
    for name, mean in (("cuda:1", 60.0), ("cpu", None)):
        with utilisation_monitor(torch.device(name)) as monitor:
            pass
        assert monitor.mean == mean
