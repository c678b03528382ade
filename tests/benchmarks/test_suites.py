"""The smaller suites, in this process: that they run and what they give, never how fast."""

import functools
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import multiprocessing

from benchmarks import cold_corpus, sharded_head
from benchmarks.families import measure_compiled
from benchmarks.inference import THREADS, measure_runtimes, measure_serving
from speakernet.checkpoint import write_checkpoint
from speakernet.cli import run_command
from speakernet.config.schema import config_from_dict
from speakernet.models.model_file import model_file_contents
from speakernet.models.speaker_net import SpeakerNet


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_compiled_step_is_timed_beside_the_eager_one() -> None:
    config = config_from_dict({"runtime": {"device": "cpu", "keep_memory": False, "threads": 0}})
    (one,) = measure_compiled(config, ["XVector"], batch_size=2, rounds=1)
    assert one.name == "XVector" and one.compile_seconds > one.compiled_seconds > 0 and one.eager_seconds > 0
    # The first loss, before any step, is that of the same weights.
    assert one.loss_difference < 1e-2


def test_the_table_of_families(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    options = ["--models", "ReDimNet2B0", "--step_batch", "2", "--rounds", "1", "--runtime.keep_memory", "false"]
    options += ["--runtime.device", "cpu", "--json", str(figures)]
    assert run_command("benchmarks.command", "benchmark_performance.py", options) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("| network | parameters | MACs | training step of 2 crops, s |")
    assert printed[2].startswith("| `ReDimNet2B0` | 0.70 M | 0.27 G | ")
    assert json.loads(figures.read_text())["models"][0]["name"] == "ReDimNet2B0"


@pytest.mark.slow
def test_every_runtime_is_measured_on_every_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.inference.AUDIO_SECONDS", 1.0)
    found = measure_runtimes("ResNet", rounds=1)
    assert {(one.runtime, one.threads) for one in found} == {
        (runtime, threads) for runtime in ("torch", "torch, norms merged", "ONNX Runtime") for threads in THREADS
    }
    assert all(one.real_time_factor > 0 for one in found)


def test_every_answer_of_every_client_is_counted(tmp_path: Path) -> None:
    net = SpeakerNet.named("ResNet", embedding_dim=8, model_options={"channels": 8, "blocks": [1, 1]})
    write_checkpoint(tmp_path / "model.pt", model_file_contents(net, loss_normalizes=True))
    found = measure_serving(tmp_path / "model.pt", clients=6, rounds=2)
    assert (found.clients, found.answers) == (6, 12)
    assert 0 < found.median_seconds <= found.high_seconds and 1 <= found.clips_a_batch <= 12


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="autograd's threads of CUDA devices do not survive a fork")
def test_a_shared_head_sends_less_than_a_whole_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fork = functools.partial(multiprocessing.start_processes, start_method="fork")
    monkeypatch.setattr(multiprocessing, "spawn", fork)
    monkeypatch.setattr(sys, "argv", ["sharded_head", "--speakers", "3000", "--batch", "4", "--steps", "1"])
    assert sharded_head.main() == 0
    row = r"^\| 3,000 \| (?:whole|shared) \|.*\| ([\d.]+ [KM]iB) \| [\d.]+ s \|$"
    whole, shared = re.findall(row, capsys.readouterr().out, re.M)
    assert whole.endswith("MiB") and shared.endswith("KiB")


@pytest.mark.skipif(sys.platform != "linux", reason="pages are dropped as Linux does it")
def test_reading_ahead_has_a_row_for_each_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--folder", str(tmp_path), "--gigabytes", "0.003", "--batches", "3", "--batch_size", "4"]
    monkeypatch.setattr(sys, "argv", ["cold_corpus", *options, "--rounds", "1", "--step_milliseconds", "0", "1"])
    assert cold_corpus.main() == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["| 0 ms"] * 3 + ["| 1 ms"] * 3 and len({row[1] for row in rows}) == 3
    found = (tmp_path / cold_corpus.NAME / "samples.npy").stat().st_size
    assert found == 128 + 2 * cold_corpus.UTTERANCE_SAMPLES * 11
