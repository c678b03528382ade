"""Torch's settings: what is applied, what is refused, what has no effect here."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from speakernet.machine.facts import usable_cores
from speakernet.machine.options import MachineOptions
from speakernet.machine.settings import many_shapes, optimize_torch_settings


@pytest.fixture(autouse=True)
def _torch_as_before():
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    benchmark, tf32 = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = benchmark, tf32
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    torch.set_num_threads(threads)


def applied(device: torch.device | None = None, **options: Any) -> dict[str, Any]:
    varies_lengths = options.pop("varies_lengths", False)
    return optimize_torch_settings(MachineOptions(**options), device, varies_lengths=varies_lengths)


def test_settings_are_applied() -> None:
    settings = applied(deterministic=True, threads=1)
    assert torch.are_deterministic_algorithms_enabled() and settings["deterministic"] is True
    assert settings["threads"] == 1 == torch.get_num_threads()


@pytest.mark.parametrize(("device", "bound"), [("cuda:1", True), ("cpu", False), (None, True)])
def test_the_memory_bound_goes_to_the_chosen_gpu(
    device: str | None, bound: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bounds: list[tuple] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *bound: bounds.append(bound))
    chosen = None if device is None else torch.device(device)
    applied(chosen, memory_fraction=0.5)
    assert bounds == ([(0.5, chosen)] if bound else [])
    assert ("runtime.memory_fraction has no effect" in caplog.text) is not bound


@pytest.mark.parametrize(
    ("options", "benchmark"),
    [
        ({}, True),
        ({"varies_lengths": True}, False),
        ({"varies_lengths": True, "cudnn_benchmark": True}, True),
        ({"varies_lengths": True, "cudnn_benchmark": False}, False),
        ({"deterministic": True}, False),
    ],
)
def test_convolutions_are_timed_if_their_shapes_come_again(
    options: dict, benchmark: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert applied(torch.device("cuda:0"), **options)["cudnn_benchmark"] is benchmark
    with many_shapes():
        assert not torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark is benchmark


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_is_for_convolutions_alone(tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters, pooling and heads are products of matrices, and keep all bits of float32."""
    torch.set_float32_matmul_precision("high")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    applied(torch.device("cuda:0"), tf32=tf32)
    assert torch.get_float32_matmul_precision() == "highest" and torch.backends.cudnn.allow_tf32 is tf32


def test_more_threads_than_cores_are_slow(caplog: pytest.LogCaptureFixture) -> None:
    applied(threads=usable_cores() + 1)
    assert "runtime.threads" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 1000}, "threads: 1000 on .* cores; expected 0"),
        ({"interop_threads": -1}, "interop_threads"),
        ({"attention": ["bogus"]}, "attention is"),
        ({"memory_fraction": 7.0}, "memory_fraction"),
    ],
)
def test_settings_without_sense_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        applied(**options)


def test_freed_memory_is_kept_with_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "keep_memory" not in applied(keep_memory=False, threads=0)
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    assert applied()["keep_memory"] is False


def keeps_memory() -> bool:
    return optimize_torch_settings(MachineOptions(), save_memory=True)["keep_memory"]


def test_who_saves_memory_keeps_none() -> None:
    """In a process of its own: it changes the allocator."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as processes:
        assert processes.submit(keeps_memory).result() is False
