"""The step profiler: what it writes, what it leaves out, and the peak of tensors."""

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from speakernet.training.options import RuntimeOptions
from speakernet.training.profiler import NoProfiler, StepProfiler, peak_tensor_bytes


def profiler_of(num_steps: int, folder: Path) -> StepProfiler:
    """A profiler of a run on the CPU."""
    return StepProfiler(RuntimeOptions(profile_steps=num_steps), folder, torch.device("cpu"))


def test_profiler_writes_a_trace_a_table_and_shares(tmp_path: Path) -> None:
    profiler = profiler_of(2, tmp_path)
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


def test_without_profiling_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    profiler = NoProfiler()
    with profiler.phase("data"):
        profiler.step()
    profiler.close()
    assert not list(tmp_path.iterdir())


def test_a_profile_of_a_short_run_says_what_it_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for steps in (3, 2):
        profiler = profiler_of(2, tmp_path / str(steps))
        for _ in range(steps):
            with profiler.phase("forward"):
                torch.ones(8, 8) @ torch.ones(8, 8)
            profiler.step()
        profiler.close()
    assert "trace of 1 steps" in caplog.text
    assert "nothing was profiled: 2 steps, and the first 2 only warm up" in caplog.text


def test_an_evaluation_between_two_steps_is_not_recorded(tmp_path: Path):
    profiler = profiler_of(2, tmp_path)
    matrix = torch.ones(8, 8)
    for step in range(4):
        matrix @ matrix
        if step == 2:
            with profiler.paused():
                torch.sigmoid(matrix)
        profiler.step()
    profiler.close()
    assert "aten::mm" in profiler.table and "aten::sigmoid" not in profiler.table


def test_peak_of_tensors_counts_what_lives_at_one_time() -> None:
    kept = torch.ones(1024, 1024)

    def run() -> None:
        first = kept + 1  # 4 MiB
        second = first * 2  # 8 MiB at once
        del first
        torch.add(second, 1)  # 8 MiB again

    assert 8 * 2**20 <= peak_tensor_bytes(run) < 8.1 * 2**20
    assert peak_tensor_bytes(lambda: None) == 0
