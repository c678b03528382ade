"""Voices through real parts: classes, batches and the network's front end agree, whoever makes them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from speakernet.assembly.data import build_training_loader
from speakernet.assembly.inputs import Inputs
from speakernet.assembly.training import build_model, refuse_impossible
from speakernet.config import Config, ConfigError
from speakernet.config.schema import replaced
from speakernet.data.batches import Batch
from speakernet.data.loader import TrainingLoader

CPU = torch.device("cpu")
VOICES = {"speed_factors": [0.9, 1.0], "warp_factors": [1.1, 1.0, 0.9], "real_share": 0.25}


def voiced_config(corpus: Path, *, augment: dict | None = None, **sections: dict) -> Config:
    values = {
        "data": {"train_list": str(corpus / "train_list.txt"), "crop_frames": 50, "batch_size": 8, "num_workers": 0},
        "augment": {**VOICES, **(augment or {})},
        "loss": {"name": "softmax"},
        "model": {"name": "ResNet", "embedding_dim": 8},
        "training": {"max_epochs": 4},
    }
    return replaced(
        Config(), **{name: {**values.get(name, {}), **sections.get(name, {})} for name in {**values, **sections}}
    )


def loader(corpus: Path, **sections: dict) -> TrainingLoader:
    config = voiced_config(corpus, **sections)
    return build_training_loader(config, Inputs(config, CPU))


def epoch(made: TrainingLoader, number: int = 0) -> list[Batch]:
    made.set_epoch(number)
    return list(made)


def test_labels_speeds_and_warps_of_a_batch_belong_together(tiny_corpus: Path) -> None:
    made = loader(tiny_corpus)
    assert made.num_classes == 8 * 6
    as_recorded = epoch(loader(tiny_corpus, augment={"enabled": False}))
    for batch, plain in zip(epoch(made), as_recorded, strict=True):
        voices = batch.labels.numpy() // 8
        np.testing.assert_array_equal(batch.labels.numpy() % 8, plain.labels.numpy())
        np.testing.assert_array_equal(voices // 2, batch.warps)
        assert (voices == 0).sum() == 2
        # Warps leave the samples as they are; other speeds do not.
        same = [torch.equal(one, other) for one, other in zip(batch.waveforms, plain.waveforms, strict=True)]
        assert same == (voices % 2 == 0).tolist()


def test_workers_ranks_and_resident_corpora_give_the_same_voices(tiny_corpus: Path) -> None:
    alone = epoch(loader(tiny_corpus))
    resident = loader(tiny_corpus, data={"ram_corpus": "on", "device_resident": "on"})
    shares = []
    for rank in range(2):
        shares.append(loader(tiny_corpus))
        shares[rank]._rank, shares[rank]._world_size = rank, 2
    for whole, other, *parts in zip(alone, epoch(resident), *map(epoch, shares), strict=True):
        assert torch.equal(whole.labels, other.labels) and np.array_equal(whole.warps, other.warps)
        assert torch.equal(whole.labels, torch.cat([part.labels for part in parts]))
        np.testing.assert_array_equal(whole.warps, np.concatenate([part.warps for part in parts]))


def test_the_last_epochs_are_as_recorded_with_the_head_of_all_voices(tiny_corpus: Path) -> None:
    made = loader(tiny_corpus, augment={"real_epochs": 1})
    assert made.num_classes == 48
    assert any(batch.labels.max() >= 8 for batch in epoch(made, 2))
    assert all(batch.labels.max() < 8 and not batch.warps.any() for batch in epoch(made, 3))


def test_wishes_that_cannot_be_fulfilled_are_refused(tiny_corpus: Path) -> None:
    too_long = voiced_config(tiny_corpus, augment={"real_epochs": 4})
    with pytest.raises(ConfigError, match=r"real_epochs: 4 of training\.max_epochs: 4: "):
        refuse_impossible(too_long, build_model(too_long), CPU)
    stage = voiced_config(
        tiny_corpus,
        augment={"warp_factors": [0.9, 1.1], "real_share": "auto"},
        loss={"name": "aamsoftmax"},
        training={"large_margin_epochs": 1},
    )
    with pytest.raises(ConfigError, match=r"warp_factors: \[0\.9, 1\.1\].*add 1\.0 to the factors"):
        refuse_impossible(stage, build_model(stage), CPU)
    samples = {"name": "RawNet3", "options": {"channels": 64}}
    with pytest.raises(ValueError, match=r"augment\.warp_factors: .* no mel bands"):
        build_model(replaced(voiced_config(tiny_corpus), model=samples, frontend={"name": "raw"}))
