"""Torch's settings: what is applied, with the reason; what is refused; what has no effect here."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from speakernet.machine.facts import usable_cores
from speakernet.machine.options import MachineOptions
from speakernet.machine.settings import AppliedSetting, many_shapes, optimize_torch_settings


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


def applied(device: torch.device | None = None, **options: object) -> dict[str, AppliedSetting]:
    return {setting.name: setting for setting in optimize_torch_settings(MachineOptions(**options), device)}


def test_settings_say_what_was_applied_and_why() -> None:
    settings = applied(deterministic=True, threads=1)
    assert torch.are_deterministic_algorithms_enabled()
    assert settings["threads"].value == 1 == torch.get_num_threads()
    assert settings["deterministic"].reason


def test_a_setting_without_effect_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    settings = applied(attention=["flash"], memory_fraction=0.5)
    assert str(settings["attention"]) == "attention = no effect (there is no GPU)"
    assert settings["memory_fraction"].value == "no effect"


@pytest.mark.parametrize(
    ("device", "expected"), [("cuda:1", [(0.5, torch.device("cuda:1"))]), ("cpu", []), (None, [(0.5, None)])]
)
def test_the_memory_bound_goes_to_the_chosen_gpu(
    device: str | None, expected: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds: list[tuple] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *bound: bounds.append(bound))
    chosen = None if device is None else torch.device(device)
    settings = applied(chosen, memory_fraction=0.5)
    assert bounds == expected
    if device == "cpu":
        assert str(settings["memory_fraction"]) == "memory_fraction = no effect (this run is on the CPU)"


@pytest.mark.parametrize(
    ("options", "varies_lengths", "benchmark", "reason"),
    [
        ({}, False, True, "crops have few lengths"),
        ({}, True, False, "crops have many lengths"),
        ({"cudnn_benchmark": True}, True, True, "crops have few lengths"),
        ({"cudnn_benchmark": False}, True, False, "asked for"),
        ({"deterministic": True}, False, False, "asked for"),
    ],
)
def test_convolutions_are_timed_where_their_shapes_come_again(
    options: dict, varies_lengths: bool, benchmark: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made = optimize_torch_settings(MachineOptions(**options), torch.device("cuda:0"), varies_lengths=varies_lengths)
    (setting,) = [one for one in made if one.name == "cudnn_benchmark"]
    assert (setting.value, setting.reason) == (benchmark, reason)
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


def test_more_threads_than_cores_are_called_slow() -> None:
    many = usable_cores() + 1
    settings = applied(threads=many)
    assert f"there are {many - 1} cores for them" in str(settings["threads"])


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


def test_freed_memory_is_kept_on_linux_and_says_so_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(applied(keep_memory=False, threads=0)) == {"deterministic"}
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    settings = applied()
    assert str(settings["keep_memory"]) == "keep_memory = False (the C library is not glibc)"


def keeping_of_who_saves() -> str:
    settings = optimize_torch_settings(MachineOptions(), save_memory=True)
    return next(str(setting) for setting in settings if setting.name == "keep_memory")


def test_who_saves_memory_keeps_none() -> None:
    """In a process of its own: it changes the allocator."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as processes:
        assert processes.submit(keeping_of_who_saves).result().startswith("keep_memory = False (")
