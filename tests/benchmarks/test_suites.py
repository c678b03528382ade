"""The smaller suites, in this process: that they run and what they return, not how fast."""

import json
import sys

import pytest

from benchmarks import cold_corpus
from benchmarks.inference import measure_serving
from speakernet.checkpoint import write_checkpoint
from speakernet.cli import run_command
from speakernet.models.model_file import model_file_contents
from speakernet.models.speaker_net import SpeakerNet


def test_table_of_families(tmp_path, capsys):
    figures = tmp_path / "figures.json"
    options = [
        "--models",
        "ReDimNet2B0",
        "--step_batch",
        "2",
        "--rounds",
        "1",
        "--runtime.keep_memory",
        "false",
    ]
    options += ["--runtime.device", "cpu", "--json", str(figures)]
    assert run_command("benchmarks.command", "benchmark_performance.py", options) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("| network | parameters | MACs | training step of 2 crops, s |")
    assert printed[2].startswith("| `ReDimNet2B0` | 0.70 M | 0.27 G | ")
    assert json.loads(figures.read_text())["models"][0]["name"] == "ReDimNet2B0"


def test_counted_answers(tmp_path):
    net = SpeakerNet.named(
        "ResNet", embedding_dim=8, model_options={"channels": 8, "blocks": [1, 1]}
    )
    write_checkpoint(tmp_path / "model.pt", model_file_contents(net, loss_normalizes=True))
    found = measure_serving(tmp_path / "model.pt", clients=6, rounds=2)
    assert (found.clients, found.answers) == (6, 12)
    assert 0 < found.median_seconds <= found.high_seconds and 1 <= found.clips_a_batch <= 12


@pytest.mark.skipif(sys.platform != "linux", reason="pages are dropped as Linux does it")
def test_rows_of_reading_ahead(tmp_path, monkeypatch, capsys):
    options = [
        "--folder",
        str(tmp_path),
        "--gigabytes",
        "0.003",
        "--batches",
        "3",
        "--batch_size",
        "4",
    ]
    monkeypatch.setattr(
        sys, "argv", ["cold_corpus", *options, "--rounds", "1", "--step_milliseconds", "0", "1"]
    )
    assert cold_corpus.main() == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["| 0 ms"] * 3 + ["| 1 ms"] * 3 and len(
        {row[1] for row in rows}
    ) == 3
    found = (tmp_path / cold_corpus.NAME / "samples.npy").stat().st_size
    assert found == 128 + 2 * cold_corpus.UTTERANCE_SAMPLES * 11
