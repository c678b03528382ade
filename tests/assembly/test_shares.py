"""A batch over several processes: what each gets is said, and that one gets nothing is refused."""

import logging
from pathlib import Path

import pytest
import torch

from speakernet.assembly.data import build_training_loader
from speakernet.assembly.inputs import Inputs
from speakernet.config.loading import load_config
from speakernet.parallel import distributed


def build(corpus: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, rank: int, *options: str):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(distributed, "world_size", lambda: world_size)
    monkeypatch.setattr(distributed, "rank", lambda: rank)
    lists = ["--data.train_list", f"{corpus}/train_list.txt", "--data.train_path", str(corpus)]
    machine = ["--data.num_workers", "0", "--data.crop_frames", "20", "--augment.enabled", "false"]
    config = load_config([*lists, *machine, *options]).config
    return build_training_loader(config, Inputs(config, torch.device("cpu")))


def test_a_batch_that_does_not_divide_is_said_and_shared(
    tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    whole = list(build(tiny_corpus, monkeypatch, 1, 0, "--data.batch_size", "8"))
    ranks = [list(build(tiny_corpus, monkeypatch, 3, rank, "--data.batch_size", "8")) for rank in range(3)]
    assert "a batch of 8 utterances over 3 processes: 2 or 3 each" in caplog.text
    for parts in zip(whole, *ranks, strict=True):
        assert torch.equal(parts[0].waveforms, torch.cat([one.waveforms for one in parts[1:]]))
        assert torch.equal(parts[0].labels, torch.cat([one.labels for one in parts[1:]]))
        assert {one.shares for one in parts[1:]} == {(2, 3, 3)}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--data.batch_size", "2"], "data.batch_size is 2 utterances, and there are 3 processes"),
        (
            ["--data.batch_size", "4", "--data.crop_frames_max", "40"],
            r"data.batch_size is 4 utterances \(crops of 40 frames come in batches of 2\), and there are 3 processes",
        ),
        (
            ["--data.batch_size", "2", "--data.utterances_per_speaker", "3", "--loss.name", "angleproto"],
            "data.batch_size is 2 speakers, and there are 3 processes",
        ),
    ],
)
def test_fewer_utterances_than_processes_are_refused(
    tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    with pytest.raises(ValueError, match=f"{said}, each of which needs at least one; raise data.batch_size, or start"):
        build(tiny_corpus, monkeypatch, 3, 0, *options)
