"""Machine facts, torch's settings with reasons, memory monitor, timers, profiler."""

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from speakernet.performance.profiler import NoProfiler, StepProfiler, make_profiler
from speakernet.performance.system import (
    MemoryMonitor,
    log_performance_info,
    log_system_info,
    log_time,
    optimize_torch_settings,
    timed,
)


@pytest.fixture(autouse=True)
def _torch_as_before():
    threads = torch.get_num_threads()
    yield
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
