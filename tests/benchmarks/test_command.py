"""The benchmark from the command line on a tiny corpus: that it runs and what it writes, not how
fast.
"""

import json

import numpy as np
import pytest

from benchmarks import loader
from benchmarks.data import prepare_data
from speakernet.cli import run_command
from speakernet.config import load_config
from speakernet.data.audio import audio_info, write_audio
from speakernet.data.opening import open_source


def benchmark(arguments):
    """Run `python benchmark_performance.py` with these arguments."""
    return run_command("benchmarks.command", "benchmark_performance.py", arguments)


@pytest.fixture(scope="module")
def options(tiny_corpus, tmp_path_factory):
    """Options for the tiny corpus with some noise and one RIR."""
    root = tmp_path_factory.mktemp("disturbances")
    random = np.random.default_rng(3)
    for folder in (*(f"musan/{kind}/a/b" for kind in ("noise", "music", "speech")), "rirs"):
        (root / folder).mkdir(parents=True)
        for clip in range(7 if folder != "rirs" else 0):
            write_audio(root / folder / f"{clip}.wav", 0.1 * random.standard_normal(40000))
    write_audio(
        root / "rirs" / "0.wav", random.standard_normal(800) * np.exp(-np.arange(800) / 100) / 4
    )
    options = {
        "data.train_list": tiny_corpus / "train_list.txt",
        "augment.noise_path": root / "musan",
        "augment.rir_path": root / "rirs",
        "data.batch_size": 4,
        "data.crop_frames": 50,
        "data.num_workers": 0,
        "model.name": "ResNet",
        "model.embedding_dim": 8,
        "evaluation.eval_frames": 50,
        "evaluation.num_crops": 2,
        "runtime.compile": "off",
        "runtime.device": "cpu",
    }
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def test_recordings_in_every_form(options, tmp_path):
    config = load_config(options).config
    data = prepare_data(config, tmp_path, 5)
    sources = {form: open_source(data.root / form) for form in ("wav", "flac", "packed")}
    for name in data.names:
        wave = sources["wav"].read(f"{name}.wav")
        assert 4 * 16000 <= len(wave) <= 12 * 16000
        np.testing.assert_array_equal(sources["flac"].read(f"{name}.flac"), wave)
        np.testing.assert_array_equal(sources["packed"].read(f"{name}.wav"), wave)
    assert [audio_info(path).format for path in data.paths("flac")] == ["flac"] * 5
    assert (
        len(list((data.root / "musan").glob("*/*/*/*.wav"))) == 21
        and len(list((data.root / "rirs").glob("*/*/*.wav"))) == 1
    )


@pytest.mark.slow
def test_loading_measures_everything(options, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loader, "WARM_BATCHES", 1)
    monkeypatch.setattr("benchmarks.suites.COMPARED_BATCH_SIZE", 4)
    file = tmp_path / "figures.json"
    sizes = f"--num_batches 2 --rounds 1 --num_utterances 4 --loading --json {file}"
    assert benchmark([*options, *sizes.split()]) == 0
    figures = json.loads(file.read_text())
    comparisons = figures["comparisons"]
    measures = [comparison["measure"] for comparison in comparisons]
    assert len(set(measures)) == 12
    assert all(comparison["ratio"] > 0 for comparison in comparisons)
    assert measures[0] in capsys.readouterr().out


def test_default_measurements(options, tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert benchmark([*options, "--num_batches", "2", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert figures["loader"]["num_batches"] == 2 and figures["training"]["steps"] == 2
    assert figures["training"]["epoch_seconds"] > 0
    assert "waiting for data" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--loading"], "data.train_list"),
        (["--steps", "faster", "--rounds", "1"], "'faster'"),
    ],
)
def test_wrong_arguments_are_named(arguments, named, capsys):
    assert benchmark(arguments) == 1
    printed = capsys.readouterr()
    assert named in printed.err and not printed.out


@pytest.mark.slow
def test_compare(options, tiny_corpus, capsys, tmp_path):
    file = tmp_path / "figures.json"
    words = f"--compare --data.test_list {tiny_corpus}/trials.txt --augment.enabled true"
    words += f" --rounds 1 --num_batches 3 --json {file}"
    assert benchmark([*options, *words.split()]) == 0
    epochs = json.loads(file.read_text())["epochs"]
    assert list(epochs) == ["original", "optimised"]
    assert all(min(figures.values()) > 0 for figures in epochs.values())
    output = capsys.readouterr().out
    assert "| optimised | " in output
