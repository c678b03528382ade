"""`speakernet find-batch-size`: real steps of a configuration, within a memory limit; no figure is a matter of time."""

from pathlib import Path

import pytest
import torch

from speakernet.assembly.batch_size import find_batch_size, planned_run
from speakernet.assembly.training import prepare_machine
from speakernet.cli import main
from speakernet.config import load_config
from speakernet.training.batch_advice import PlannedRun, batch_size_advice
from speakernet.training.batch_size import Measurement

OPTIONS = [
    "--model.name",
    "ResNet",
    "--model.embedding_dim",
    "8",
    "--data.crop_frames",
    "50",
    "--runtime.device",
    "cpu",
]


def test_the_command_prints_every_size_the_configured_one_too(capsys: pytest.CaptureFixture[str]) -> None:
    options = [*OPTIONS, "--data.batch_size", "6", "--min_batch_size", "2", "--max_batch_size", "4"]
    assert main(["find-batch-size", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines[:3]] == [2, 4, 6]
    best = int(lines[3].split()[1])
    assert best in (2, 4) and lines[3].startswith("fastest: ")
    assert "of the configuration" in lines[4] and "--batch_size" in lines[-1]


def test_the_settings_of_the_run_are_those_that_sizes_are_tried_with() -> None:
    """On a GPU too: torch's switches are what `prepare_machine` made them, before and after."""

    def settings() -> tuple[object, ...]:
        cudnn = torch.backends.cudnn
        switches = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
        return cudnn.benchmark, cudnn.allow_tf32, cudnn.deterministic, torch.get_num_threads(), *switches

    found = []
    before = torch.backends.cudnn.benchmark
    for benchmark in (True, False):
        torch.backends.cudnn.benchmark = benchmark
        config = load_config([*OPTIONS, "--model.options", "{channels: 8}"]).config
        prepare_machine(config)
        at_first = settings()
        find_batch_size(config, 2, 2)
        found.append((at_first, settings()))
    torch.backends.cudnn.benchmark = before
    assert all(one == other for one, other in found) and found[0] != found[1]


def test_sizes_of_metric_losses_are_whole_speakers(capsys: pytest.CaptureFixture[str]) -> None:
    metric = ["--loss.name", "angleproto", "--data.utterances_per_speaker", "3", "--data.batch_size", "2"]
    assert main(["find-batch-size", *OPTIONS, *metric, "--min_batch_size", "4", "--max_batch_size", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines[:2]] == [3, 6]
    assert any(lines[-1].endswith(f"--batch_size {speakers}") for speakers in (1, 2))


def test_the_training_list_is_counted_where_it_is_there(tiny_corpus: Path) -> None:
    options = [*OPTIONS, "--max_epoch", "7", "--training.accumulation_steps", "2", "--lr", "0.5"]
    run = planned_run(load_config([*options, "--train_list", f"{tiny_corpus}/train_list.txt"]).config)
    assert run == PlannedRun(32, 7, 0.5, 2, True)
    assert planned_run(load_config([*options, "--train_list", "nowhere.txt"]).config).num_utterances == 0


def measured(batch_size: int, throughput: float) -> Measurement:
    fits = throughput > 0
    return Measurement(batch_size, fits, batch_size / throughput if fits else float("inf"), 0)


SMALL, LARGE = PlannedRun(1440, 16, 0.002), PlannedRun(1_000_000, 150, 0.1)


@pytest.mark.parametrize(
    ("configured", "fastest", "run", "said", "last"),
    [
        ((32, 100.0), (32, 100.0), SMALL, "are the fastest", "keep --batch_size 32"),
        ((32, 100.0), (64, 110.0), LARGE, "10 % faster", "too little to tune a run anew: keep --batch_size 32"),
        ((32, 100.0), (64, 150.0), SMALL, "22 steps instead of 45, the run 352 instead of 720", "keep --batch_size 32"),
        ((32, 100.0), (64, 150.0), LARGE, "50 % faster", "use it with --batch_size 64"),
        ((32, 100.0), (64, 150.0), LARGE, "0.1 belongs to 32 (a first guess for 64: 0.2 for sgd, 0.14 for adam)", "64"),
        ((64, 100.0), (32, 150.0), SMALL, "has 45 steps instead of 22", "use it with --batch_size 32"),
        ((32, 100.0), (64, 150.0), PlannedRun(0, 16, 0.1), "more than about 40,000 utterances", "keep --batch_size 32"),
        ((64, 0.0), (16, 100.0), LARGE, "do not fit: take --batch_size 16", "training stays what it was"),
        ((64, 0.0), (16, 100.0), LARGE, "--training.accumulation_steps 4", "training stays what it was"),
    ],
)  # fmt: skip
def test_a_size_is_recommended_for_what_it_does_to_training(
    configured: tuple[int, float], fastest: tuple[int, float], run: PlannedRun, said: str, last: str
) -> None:
    lines = batch_size_advice(measured(*configured), measured(*fastest), run)
    assert said in "\n".join(lines) and lines[-1].endswith(last)


def test_a_memory_limit_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config([*OPTIONS, "--model.options", "{channels: 8}"]).config
    finder, _ = find_batch_size(config, 4, 4096, 60 * 2**20)
    assert 4 <= finder.largest_batch_size < 4096
    assert all(one.memory_bytes <= 60 * 2**20 for one in finder.measurements if one.fits)
    assert any(not one.fits for one in finder.measurements)
    command = ["find-batch-size", *OPTIONS, "--min_batch_size", "16", "--memory_limit_gib", "0.001"]
    assert main(command) == 1
    assert "not even a batch of 16 fits into memory (limit 1.0 MiB)" in capsys.readouterr().err
