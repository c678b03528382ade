"""The benchmark of shared heads runs, and shows what it is for."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_shared_head_sends_less_than_a_whole_one() -> None:
    command = [sys.executable, "-m", "benchmarks.sharded_head", "--speakers", "3000", "--batch", "4", "--steps", "1"]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert finished.returncode == 0, finished.stderr
    whole, shared = re.findall(
        r"^\| 3,000 \| (?:whole|shared) \|.*\| ([\d.]+ [KM]iB) \| [\d.]+ s \|$", finished.stdout, re.M
    )
    assert whole.endswith("MiB") and shared.endswith("KiB")
