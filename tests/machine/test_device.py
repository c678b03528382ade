"""The device and torch's settings: requested, applied, refused; threads in lanes; memory of the
process.
"""

import logging
import threading
import time

import pytest
import torch

from speakernet.config import load_config
from speakernet.machine import device
from speakernet.machine.device import choose_device, find_device
from speakernet.machine.options import MachineOptions
from speakernet.machine.settings import many_shapes, optimize_torch_settings
from speakernet.machine.threads import in_lanes, lanes_of


@pytest.fixture
def gpus(monkeypatch):
    """A fake machine with two GPUs; the list records the devices that become current."""
    current = []
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
def test_find_device(gpus, options, rank, expected):
    assert find_device(MachineOptions(**options), rank) == torch.device(expected)
    assert gpus == [], "finding does not make it current"


def test_choose_device(gpus, caplog):
    caplog.set_level(logging.INFO)
    assert choose_device(MachineOptions(gpu_id=1)) == torch.device("cuda:1")
    assert gpus == [torch.device("cuda:1")] and "cuda:1 (made-up 1)" in caplog.text
    choose_device(MachineOptions(device="cpu"))
    assert "device: cpu (" in caplog.text and len(gpus) == 1
    with pytest.raises(ValueError, match="nccl, which needs GPUs"):
        choose_device(MachineOptions(device="cpu", backend="nccl"))


def test_missing_gpu(gpus, monkeypatch):
    with pytest.raises(ValueError, match=r"gpu_id is 2\b"):
        find_device(MachineOptions(gpu_id=2))
    with pytest.raises(ValueError, match="rank 2 "):
        find_device(MachineOptions(), 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "unusable_gpu", lambda: ("", ""))
    with pytest.raises(ValueError, match=r"runtime\.device is cuda"):
        choose_device(MachineOptions(device="cuda"))
    assert choose_device(MachineOptions()) == torch.device("cpu")
    with pytest.raises(ValueError, match="'mps'"):
        load_config(["--runtime.device", "mps"])


@pytest.fixture(autouse=True)
def _restore_torch():
    threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    benchmark = torch.backends.cudnn.benchmark
    tf32 = torch.backends.cudnn.allow_tf32
    torch.set_num_threads(4)
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cudnn.allow_tf32 = tf32
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    torch.set_num_threads(threads)


def applied(device=None, **options):
    varies_lengths = options.pop("varies_lengths", False)
    return optimize_torch_settings(MachineOptions(**options), device, varies_lengths=varies_lengths)


def test_settings_are_applied():
    settings = applied(deterministic=True, threads=1)
    assert torch.are_deterministic_algorithms_enabled() and settings["deterministic"] is True
    assert settings["threads"] == 1 == torch.get_num_threads()
    # A later run in the same process, say of a notebook, does not inherit it.
    assert applied(threads=1)["deterministic"] is False
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, True),
        ({"varies_lengths": True}, False),
        ({"varies_lengths": True, "cudnn_benchmark": True}, True),
        ({"varies_lengths": True, "cudnn_benchmark": False}, False),
        ({"deterministic": True}, False),
    ],
)
def test_cudnn_benchmark(options, chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert applied(torch.device("cuda:0"), **options)["cudnn_benchmark"] is chosen
    with many_shapes():
        assert not torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark is chosen


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_only_for_convolutions(tf32, monkeypatch):
    """Filters, pooling and heads are matrix products and keep full float32 precision."""
    torch.set_float32_matmul_precision("high")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    applied(torch.device("cuda:0"), tf32=tf32)
    assert (
        torch.get_float32_matmul_precision() == "highest"
        and torch.backends.cudnn.allow_tf32 is tf32
    )


def test_settings_without_effect(caplog):
    with pytest.raises(ValueError, match=r"threads is 1000 on .* cores; expected 0"):
        applied(threads=1000)
    applied(torch.device("cpu"), cudnn_benchmark=True)
    assert "runtime.cudnn_benchmark has no effect" in caplog.text


def test_order_bounds_and_threads():
    taken = []
    open_lanes = 0
    most = 0
    lock = threading.Lock()

    def items():
        for number in range(12):
            taken.append(number)
            yield number

    def work(number):
        nonlocal open_lanes, most
        with lock:
            open_lanes += 1
            most = max(most, open_lanes)
        time.sleep(0.002 * (number % 3))
        with lock:
            open_lanes -= 1
        return (
            number,
            torch.get_num_threads(),
            threading.current_thread() is threading.main_thread(),
        )

    results = []
    for result in in_lanes(work, items(), 2):
        results.append(result)
        assert len(taken) <= len(results) + 3
    assert [number for number, *_ in results] == list(range(12)) and most == 2
    assert {tuple(rest) for _, *rest in results} == {(2, False)}
    assert torch.get_num_threads() == 4


def test_errors_in_order():
    done = []

    def work(number):
        if number == 3:
            raise ValueError("the fourth is bad")
        done.append(number)

    with pytest.raises(ValueError, match="the fourth"):
        list(in_lanes(work, iter(range(1000)), 2))
    assert len(done) < 10 and torch.get_num_threads() == 4


def test_one_lane():
    here = threading.get_ident()
    assert set(
        in_lanes(lambda _: (threading.get_ident(), torch.get_num_threads()), range(3), 1)
    ) == {(here, 4)}


def test_number_of_lanes():
    assert lanes_of("cpu") == 4 and lanes_of("cuda:1") == 1
    torch.set_num_threads(64)
    assert lanes_of(torch.device("cpu")) == 8
