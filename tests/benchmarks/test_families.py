"""The suite over families, in this process: that it trains and embeds each and names what it measured."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.families import SMALLEST, measure_compiled, published_config
from speakernet.cli import run_command
from speakernet.config.schema import config_from_dict
from speakernet.models.options import MODELS


@pytest.fixture(autouse=True)
def _torch_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def small():
    return config_from_dict({"runtime": {"device": "cpu", "keep_memory": False, "threads": 0}})


@pytest.mark.parametrize("name", SMALLEST)
def test_networks_are_the_published_ones(name: str) -> None:
    config = published_config(small(), name)
    trunk = MODELS[name].options
    assert (config.model.name, config.model.embedding_dim) == (name, trunk.published.dim)
    assert getattr(config.frontend, "num_mels", 0) == trunk.published.mels
    assert config.runtime.compile == "off"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_compiled_step_is_timed_beside_the_eager_one() -> None:
    (one,) = measure_compiled(small(), ["XVector"], batch_size=2, rounds=1)
    assert one.name == "XVector" and one.compile_seconds > one.compiled_seconds > 0 and one.eager_seconds > 0
    # The first loss, before any step, is that of the same weights.
    assert one.loss_difference < 1e-2


def test_the_table_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    options = ["--models", "ReDimNet2B0", "--step_batch", "2", "--rounds", "1", "--runtime.keep_memory", "false"]
    options += ["--runtime.device", "cpu", "--json", str(figures)]
    assert run_command("benchmarks.command", "benchmark_performance.py", options) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("| network | parameters | MACs | training step of 2 crops, s |")
    assert printed[2].startswith("| `ReDimNet2B0` | 0.70 M | 0.27 G | ")
    assert json.loads(figures.read_text())["models"][0]["name"] == "ReDimNet2B0"
