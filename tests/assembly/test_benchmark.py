"""`speakernet benchmark` and `find-batch-size`, with fake memory limits and clocks."""

import json
from types import SimpleNamespace

import pytest
import torch

from speakernet.assembly.data import build_training_loader
from speakernet.assembly.inputs import Inputs
from speakernet.cli import main
from speakernet.config import load_config
from speakernet.data.batches import ReadyCrops

OPTIONS = [
    "--model.name=ResNet",
    "--model.embedding_dim=8",
    "--data.crop_frames=50",
    "--runtime.device=cpu",
]
QUICK = ["--data.batch_size", "4", "--data.num_workers", "0", "--augment.enabled", "false"]


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("options", "sizes", "batch_sizes"),
    [
        ("--data.batch_size 6 --min_batch_size 2 --max_batch_size 4", [2, 4, 6], (2, 4, 6)),
        (
            "--loss.name angleproto --data.utterances_per_speaker 3 --data.batch_size 2 "
            "--min_batch_size 4 --max_batch_size 8",
            [3, 6],
            (1, 2),
        ),
    ],
    ids=["utterances", "whole speakers"],
)
def test_the_command(options, sizes, batch_sizes, capsys):
    assert main(["find-batch-size", *OPTIONS, *options.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines[: len(sizes)]] == sizes
    assert len(lines) == len(sizes) + 2 and any(
        f"--batch_size {size}" in lines[-1] for size in batch_sizes
    )


def test_ready_crops_cost_the_same(tiny_corpus):
    config = load_config([*OPTIONS, *QUICK, f"--train_list={tiny_corpus}/train_list.txt"]).config
    loader = build_training_loader(config, Inputs(config, CPU))
    first = next(iter(loader))
    made = []
    augmented = []
    maker = loader.maker
    read = maker.run
    maker.run = lambda requests: (made.append(1) or one for one in read(requests))
    loader.augmenter = lambda waveforms, **keys: (
        augmented.append(keys["rows"].tolist()) or waveforms.mul_(2)
    )
    loader.maker = ReadyCrops(maker)
    loader.set_epoch(0)
    batches = list(loader)
    assert len(made) == 1 and len(augmented) == len(batches) > 1
    # Augmentation works in place, and must not change the crops of the next batch.
    assert all(torch.equal(batch.waveforms, 2 * first.waveforms) for batch in batches)
    assert all(torch.equal(batch.labels, first.labels) for batch in batches)


def test_waiting_and_mfu(tiny_corpus, tmp_path, capsys):
    figures = tmp_path / "figures.json"
    words = f"--train_list {tiny_corpus}/train_list.txt --num_batches 2 --json {figures}"
    assert main(["benchmark", *OPTIONS, *QUICK, *words.split()]) == 0
    found = SimpleNamespace(**json.loads(figures.read_text(encoding="utf-8"))["training"])
    assert found.mfu == pytest.approx(found.step_flop / found.step_seconds / found.peak_flops)
    waited = max(0.0, 1 - found.ready_step_seconds / found.step_seconds)
    assert found.data_wait_share == pytest.approx(waited) and 0 < found.mfu < 2
    assert "MFU" in capsys.readouterr().out
