"""Machine facts, torch's settings with reasons, memory monitor, timers, profiler."""

import json
import logging
import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from speakernet.machine.allocation import HUGE_PAGES, huge_pages
from speakernet.machine.limits import usable_cores
from speakernet.machine.settings import (
    MemoryMonitor,
    log_performance_info,
    log_system_info,
    log_time,
    optimize_torch_settings,
    timed,
)
from speakernet.training.profiler import NoProfiler, StepProfiler, make_profiler, peak_tensor_bytes


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


def test_system_info_is_plain_and_names_versions(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    info = log_system_info()
    assert json.loads(json.dumps(info)) == info
    assert info["versions"]["torch"] == torch.__version__.split("+")[0] or info["versions"]["torch"]
    assert info["cpu_cores"] >= 1
    assert "torch" in caplog.text
    assert log_performance_info()["threads"] == torch.get_num_threads()


def test_settings_say_what_was_applied_and_why() -> None:
    applied = {setting.name: setting for setting in optimize_torch_settings(deterministic=True, threads=1)}
    assert torch.are_deterministic_algorithms_enabled()
    assert applied["threads"].value == 1 == torch.get_num_threads()
    assert applied["deterministic"].reason


def test_a_setting_without_effect_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    applied = {setting.name: setting for setting in optimize_torch_settings(attention=["flash"], memory_fraction=0.5)}
    assert str(applied["attention"]) == "attention = no effect (there is no GPU)"
    assert applied["memory_fraction"].value == "no effect"


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
    applied = {one.name: one for one in optimize_torch_settings(memory_fraction=0.5, device=chosen)}
    assert bounds == expected
    if device == "cpu":
        assert str(applied["memory_fraction"]) == "memory_fraction = no effect (this run is on the CPU)"


def test_more_threads_than_cores_are_called_slow() -> None:
    many = usable_cores() + 1
    applied = {setting.name: setting for setting in optimize_torch_settings(threads=many)}
    assert f"there are {many - 1} cores for them" in str(applied["threads"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 5000}, "threads: 5000 on .* cores; expected 0"),
        ({"interop_threads": -1}, "interop_threads: -1"),
        ({"attention": ["bogus"]}, "attention: bogus; expected some of flash"),
        ({"memory_fraction": 7.0}, "memory_fraction: 7.0; expected 0"),
    ],
)
def test_settings_without_sense_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimize_torch_settings(**options)


def test_memory_monitor_sees_the_peak() -> None:
    readings = iter([100, 300, 900, 200] + [200] * 10_000)
    seen: list[int] = []

    def read() -> int:
        seen.append(next(readings))
        return seen[-1]

    with MemoryMonitor(sample_seconds=0.001, read=read) as monitor:
        while len(seen) < 5:
            pass
    assert monitor.peak_bytes == 900
    assert monitor.added_bytes == 800


def test_timers_log_and_pass_the_result_through(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    @log_time
    def double(value: int) -> int:
        return 2 * value

    assert double(4) == 8
    with timed("a block"):
        pass
    assert "double took" in caplog.text
    assert "a block took" in caplog.text


def test_profiler_writes_a_trace_a_table_and_shares(tmp_path: Path) -> None:
    profiler = make_profiler(True, tmp_path, 2, torch.device("cpu"))
    assert isinstance(profiler, StepProfiler)
    net = nn.Linear(64, 64)
    for _ in range(5):
        with profiler.phase("data"):
            batch = torch.randn(32, 64)
        with profiler.phase("forward"):
            loss = net(batch).square().mean()
        with profiler.phase("backward"):
            loss.backward()
        profiler.step()
    profiler.close()
    assert json.loads((tmp_path / "steps.pt.trace.json").read_text())["traceEvents"]
    assert "addmm" in profiler.table or "linear" in profiler.table
    assert sum(profiler.shares.values()) == pytest.approx(1.0)
    assert profiler.shares["optimizer"] == 0


def test_without_profiling_nothing_happens(tmp_path: Path) -> None:
    profiler = make_profiler(False, tmp_path, 2, torch.device("cpu"))
    assert isinstance(profiler, NoProfiler)
    with profiler.phase("data"):
        profiler.step()
    profiler.close()
    assert not list(tmp_path.iterdir())


def test_freed_memory_is_kept_on_linux_and_says_so_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {setting.name for setting in optimize_torch_settings(keep_memory=False)} == {"deterministic"}
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    applied = {setting.name: setting for setting in optimize_torch_settings()}
    assert str(applied["keep_memory"]) == "keep_memory = False (the C library is not glibc)"


def test_who_saves_memory_keeps_none() -> None:
    """In a process of its own: it changes the allocator."""
    script = (
        "from speakernet.machine.settings import optimize_torch_settings\n"
        "print(*[setting for setting in optimize_torch_settings(save_memory=True) if setting.name == 'keep_memory'])\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("keep_memory = False (")


def page_faults(script: str) -> list[int]:
    """What the script prints, in a process of its own, whose memory no other test has grown.

    `faults(times, mebibytes)` makes and frees a tensor that often and counts the page faults.
    """
    begin = (
        "import resource, torch\n"
        "from speakernet.machine.allocation import keep_freed_memory, release_freed_memory, return_freed_memory\n"
        "def faults(times, mebibytes):\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    for _ in range(times):\n"
        "        torch.ones(mebibytes, 512, 512)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
    )
    # Without huge pages, each of which is one fault.
    environment = {**os.environ, HUGE_PAGES: "0"}
    result = subprocess.run(
        [sys.executable, "-c", begin + script], capture_output=True, text=True, check=True, env=environment
    )
    return [int(number) for number in result.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="memory is kept with glibc only")
def test_kept_memory_costs_no_page_faults() -> None:
    given_back, kept, released = page_faults(
        "given_back = faults(4, 64)\n"
        "assert keep_freed_memory()[0]\n"
        # Small allocations take bites out of the freed place, and the heap grows by another: up to six times was seen.
        "faults(32, 64)\n"
        "kept = faults(4, 64)\n"
        "release_freed_memory()\n"
        "print(given_back, kept, faults(1, 64))\n"
    )
    pages = 64 * 2**20 // mmap.PAGESIZE
    assert given_back >= 4 * pages and kept < pages / 4 and released > pages / 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="memory is given back with glibc only")
def test_memory_is_given_back_where_the_c_library_would_keep_it() -> None:
    """By itself it keeps tensors of up to 32 MiB once it has freed one."""
    script = "faults(8, 24)\nprint(faults(4, 24))\n"
    pages = 24 * 2**20 // mmap.PAGESIZE
    assert page_faults(script)[0] < 2 * pages
    assert page_faults("assert not return_freed_memory()[0]\n" + script)[0] >= 4 * pages


def test_huge_pages_need_their_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HUGE_PAGES, raising=False)
    assert huge_pages() == (False, "THP_MEM_ALLOC_ENABLE=1 was not set before torch was imported")


def test_peak_of_tensors_counts_what_lives_at_one_time() -> None:
    kept = torch.ones(1024, 1024)

    def run() -> None:
        first = kept + 1  # 4 MiB
        second = first * 2  # 8 MiB at once
        del first
        torch.add(second, 1)  # 8 MiB again

    assert 8 * 2**20 <= peak_tensor_bytes(run) < 8.1 * 2**20
    assert peak_tensor_bytes(lambda: None) == 0


def test_a_profile_of_a_short_run_says_what_it_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for steps in (3, 2):
        profiler = StepProfiler(tmp_path / str(steps), num_steps=2)
        for _ in range(steps):
            with profiler.phase("forward"):
                torch.ones(8, 8) @ torch.ones(8, 8)
            profiler.step()
        profiler.close()
    assert "trace of 1 steps" in caplog.text
    assert "nothing was profiled: 2 steps, and the first 2 only warm up" in caplog.text


def test_an_evaluation_between_two_steps_is_not_recorded(tmp_path: Path):
    profiler = StepProfiler(tmp_path, num_steps=2)
    matrix = torch.ones(8, 8)
    for step in range(4):
        matrix @ matrix
        if step == 2:
            with profiler.paused():
                torch.sigmoid(matrix)
        profiler.step()
    profiler.close()
    assert "aten::mm" in profiler.table and "aten::sigmoid" not in profiler.table
