"""`speakernet find-batch-size`: real steps of a configuration, within a memory limit; no figure is a matter of time."""

import pytest

from speakernet.assembly.batch_size import find_batch_size
from speakernet.cli import main
from speakernet.config import load_config

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


def test_the_command_prints_every_size_and_the_option_to_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["find-batch-size", *OPTIONS, "--min_batch_size", "2", "--max_batch_size", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines[:2]] == [2, 4]
    best = int(lines[2].split()[1])
    assert best in (2, 4) and lines[2].endswith("the largest tried that fits: 4")
    assert lines[3] == f"use it with --batch_size {best}"


def test_sizes_of_metric_losses_are_whole_speakers(capsys: pytest.CaptureFixture[str]) -> None:
    metric = ["--loss.name", "angleproto", "--data.utterances_per_speaker", "3"]
    assert main(["find-batch-size", *OPTIONS, *metric, "--min_batch_size", "4", "--max_batch_size", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines[:2]] == [3, 6]
    assert lines[-1].endswith("(3 utterances a speaker)")


def test_a_memory_limit_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config([*OPTIONS, "--model.options", "{channels: 32}"]).config
    finder, _ = find_batch_size(config, 4, 4096, 200 * 2**20)
    assert 4 <= finder.largest_batch_size < 4096
    assert all(one.memory_bytes <= 200 * 2**20 for one in finder.measurements if one.fits)
    assert any(not one.fits for one in finder.measurements)
    with pytest.raises(ValueError, match="not even a batch of 64 fits"):
        find_batch_size(config, 64, 128, 2**20)
    command = ["find-batch-size", *OPTIONS, "--min_batch_size", "64", "--memory_limit_gib", "0.001"]
    assert main(command) == 1
    assert "not even a batch of 64 fits into memory (limit 1.0 MiB)" in capsys.readouterr().err
