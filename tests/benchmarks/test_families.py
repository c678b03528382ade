"""The suite over families, in this process: that it trains and embeds each and names what it measured."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.families import SMALLEST, measure_compiled, measure_models, published_config
from speakernet.cli import run_command
from speakernet.config.schema import config_from_dict
from speakernet.models.options import FAMILIES, MODELS
from speakernet.models.speaker_net import SpeakerNet


@pytest.fixture(autouse=True)
def _torch_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def small():
    return config_from_dict({"runtime": {"device": "cpu", "keep_memory": False, "threads": 0}})


def test_one_of_each_family_is_measured_when_none_is_named() -> None:
    assert len(SMALLEST) == len(FAMILIES) and all(name in MODELS for name in SMALLEST)


@pytest.mark.parametrize("name", SMALLEST)
def test_networks_are_the_published_ones(name: str) -> None:
    config = published_config(small(), name)
    trunk = MODELS[name].options
    assert (config.model.name, config.model.embedding_dim) == (name, trunk.published_dim)
    assert getattr(config.frontend, "num_mels", 0) == trunk.published_mels
    assert config.runtime.compile == "off"


def test_a_step_and_an_embedding_of_each_are_timed() -> None:
    done = measure_models(small(), ["ReDimNet2B0", "XVector"], batch_size=2, rounds=1)
    assert [one.name for one in done] == ["ReDimNet2B0", "XVector"]
    assert all(one.step_seconds > one.embedding_seconds > 0 for one in done)
    with pytest.raises(ValueError, match="ReDimNet2B0"):
        measure_models(small(), ["ReDimNet2B00"], batch_size=2, rounds=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_compiled_step_is_timed_beside_the_eager_one() -> None:
    (one,) = measure_compiled(small(), ["XVector"], batch_size=2, rounds=1)
    assert one.name == "XVector" and one.compile_seconds > one.compiled_seconds > 0 and one.eager_seconds > 0
    # The first loss, before any step, is that of the same weights.
    assert one.loss_difference < 1e-2


def test_a_network_that_cannot_be_compiled_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*inputs: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(SpeakerNet, "compile", lambda net, **options: setattr(net, "_compiled_call_impl", broken))
    with pytest.raises(ValueError, match="XVector was not compiled"):
        next(measure_compiled(small(), ["XVector"], batch_size=2, rounds=1))


def test_the_table_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    options = ["--models", "ReDimNet2B0", "--step_batch", "2", "--rounds", "1", "--runtime.keep_memory", "false"]
    options += ["--runtime.device", "cpu", "--json", str(figures)]
    assert run_command("benchmarks.command", "benchmark_performance.py", options) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("| network | parameters | MACs | training step of 2 crops, s |")
    assert printed[2].startswith("| `ReDimNet2B0` | 0.70 M | 0.27 G | ")
    assert json.loads(figures.read_text())["models"][0]["name"] == "ReDimNet2B0"
