"""No reading of a measuring library may end a run, whatever it raises."""

import json
import logging
import types
from pathlib import Path

import pytest
import torch

from speakernet.assembly.batch_size import BatchSizeFinder
from speakernet.machine import facts, memory
from speakernet.machine.facts import measuring as guarded
from speakernet.machine.facts import system_info
from speakernet.machine.memory import Monitor
from speakernet.training.options import RuntimeOptions
from speakernet.training.profiler import StepProfiler
from speakernet.training.progress import PerformanceTracker


class NVMLError(Exception):
    """Like pynvml's: no subclass of anything that callers expect."""


def refuse(*arguments: object, **options: object) -> None:
    raise NVMLError("Not Supported")


@pytest.fixture(autouse=True)
def _nothing_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_failed_readings", set())


def test_a_failed_reading_is_left_out_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    found = {}
    for _ in range(2):
        with guarded("the temperature"):
            found["temperature"] = refuse()
    assert found == {}
    assert [record.getMessage() for record in caplog.records] == [
        "the temperature is not measured here (NVMLError: Not Supported)"
    ]


def test_who_stops_the_run_is_not_held_back() -> None:
    for error in (KeyboardInterrupt, SystemExit):
        with pytest.raises(error), guarded("the temperature"):
            raise error


def test_the_tracker_goes_on_without_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """MIG, vGPU and containers answer with errors of NVML's own, and a broken driver refuses even the memory."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1 << 30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", refuse)
    monkeypatch.setattr(torch.cuda, "utilization", refuse)
    running = PerformanceTracker("no", 1, torch.device("cuda:0"))
    running.update(0.5, 8, {})
    summary = running.summary()
    assert summary["device_peak_bytes"] == 1 << 30 and summary["utterances_per_second"] == 16.0
    assert not {"device_reserved_bytes", "gpu_utilisation_percent"} & set(summary)


def test_a_process_that_may_not_read_its_own_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(memory.psutil, "Process", refuse)
    running = PerformanceTracker("no", 1, torch.device("cpu"))
    running.update(0.5, 8, {})
    summary = running.summary()
    assert "process_peak_bytes" not in summary and summary["utterances_per_second"] == 16.0
    assert "peak memory of the process is not measured here" in caplog.text


def test_facts_of_the_machine_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(facts.psutil, "virtual_memory", refuse)
    monkeypatch.setattr(memory.psutil, "Process", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    info = system_info()
    assert info["cpu_cores"] >= 1 and info["gpus"] == [] and "memory_bytes" not in info
    assert json.loads(json.dumps(info)) == info


def test_the_memory_monitor_and_the_batch_finder_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with Monitor(sample_seconds=0.001, read=refuse) as monitor:
        pass
    assert monitor.peak == monitor.start == 0 and monitor.mean is None
    finder = BatchSizeFinder(torch.nn.Linear(4, 4), int, int, 1 << 30, read_memory=refuse)
    assert finder.find(1, 4) in (1, 2, 4)


def test_a_profiler_that_fails_leaves_the_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    profiler = StepProfiler(RuntimeOptions(profile_steps=1), tmp_path, torch.device("cpu"))
    profiler.close()
    broken = types.SimpleNamespace(step=refuse, stop=refuse, toggle_collection_dynamic=refuse)
    profiler._profiler, profiler._is_running, profiler._steps = broken, True, 1
    with profiler.paused():
        pass
    profiler.step()
    profiler.close()
    assert "the profile is not measured here (NVMLError: Not Supported)" in caplog.text
