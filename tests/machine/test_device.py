"""The device of a run: what is asked for, what there is, and refusals in a sentence."""

import logging

import pytest
import torch

from speakernet.config import load_config
from speakernet.machine import device
from speakernet.machine.device import choose_device, find_device
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
    ("options", "expected"),
    [
        ({}, "cuda:0"),
        ({"device": "cuda"}, "cuda:0"),
        ({"gpu_id": 1}, "cuda:1"),
        ({"device": "cpu", "gpu_id": 1}, "cpu"),
    ],
)
def test_the_gpu_is_the_one_asked_for(gpus: list[torch.device], options: dict, expected: str) -> None:
    assert find_device(MachineOptions(**options)) == torch.device(expected)
    assert gpus == [], "finding has no effect"


def test_the_chosen_gpu_is_made_current_and_named(gpus: list[torch.device], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert choose_device(MachineOptions(gpu_id=1)) == torch.device("cuda:1")
    assert gpus == [torch.device("cuda:1")] and "device: cuda:1 (made-up 1)" in caplog.text
    choose_device(MachineOptions(device="cpu"))
    assert "device: cpu (asked for)" in caplog.text and len(gpus) == 1


def test_a_process_of_several_takes_its_own_gpu(gpus: list[torch.device]) -> None:
    assert find_device(MachineOptions(), local_rank=1) == torch.device("cuda:1")
    assert find_device(MachineOptions(gpu_id=0), local_rank=1) == torch.device("cuda:0")


def test_a_gpu_that_is_not_there_is_refused(gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="gpu_id: 2, but there are 2 GPUs, numbered from 0"):
        find_device(MachineOptions(gpu_id=2))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "unusable_gpu", lambda: ("", ""))
    with pytest.raises(ValueError, match=r"torch finds no GPU here; use --runtime\.device auto or cpu"):
        choose_device(MachineOptions(device="cuda"))


def test_a_machine_without_gpu_trains_on_its_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(MachineOptions()) == torch.device("cpu")
    assert "device: cpu (no GPU that torch can use)" in caplog.text


def test_apples_gpu_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"--runtime\.device.*'mps'; expected auto or cpu or cuda$"):
        load_config(["--runtime.device", "mps"])
