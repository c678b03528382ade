"""The step profiler: what it writes, what it leaves out, and the peak of tensors."""

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from speakernet.training.options import RuntimeOptions
from speakernet.training.profiler import StepProfiler, peak_tensor_bytes


def profiler_of(num_steps: int, folder: Path) -> StepProfiler:
    """A profiler of a run on the CPU."""
    return StepProfiler(RuntimeOptions(profile_steps=num_steps), folder, torch.device("cpu"))


@pytest.mark.parametrize(("num_steps", "expected"), [(5, "trace of 2 steps"), (3, "trace of 1 steps"), (2, "nothing")])
def test_what_a_profile_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture, num_steps: int, expected: str) -> None:
    caplog.set_level(logging.INFO)
    profiler = profiler_of(2, tmp_path)
    net = nn.Linear(64, 64)
    for _ in range(num_steps):
        with torch.profiler.record_function("speakernet.forward"):
            loss = net(torch.randn(32, 64)).square().mean()
        with torch.profiler.record_function("speakernet.backward"):
            loss.backward()
        profiler.step()
    profiler.close()
    assert expected in caplog.text
    if num_steps > 2:
        assert json.loads((tmp_path / "steps.pt.trace.json").read_text())["traceEvents"]
        assert "addmm" in caplog.text and "data 0%" in caplog.text and "backward 0%" not in caplog.text


def test_peak_of_tensors_counts_what_lives_at_one_time() -> None:
    kept = torch.ones(1024, 1024)

    def run() -> None:
        first = kept + 1  # 4 MiB
        second = first * 2  # 8 MiB at once
        del first
        torch.add(second, 1)  # 8 MiB again

    assert 8 * 2**20 <= peak_tensor_bytes(run) < 8.1 * 2**20
    assert peak_tensor_bytes(lambda: None) == 0
