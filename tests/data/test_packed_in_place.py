"""A packed corpus named in place of the folder: the same training batches, bit for bit, and the same embeddings."""

from pathlib import Path

import numpy as np
import pytest
import torch

from speakernet.assembly.data import build_augmenter, build_training_loader, choose_placement
from speakernet.assembly.inputs import Inputs
from speakernet.config import load_config
from speakernet.config.schema import Config, replaced
from speakernet.corpora.pack_inputs import FolderInput
from speakernet.data.audio import write_audio
from speakernet.data.augment.banks import bytes_of_banks
from speakernet.data.packed import load_into_ram
from speakernet.data.packing import pack


@pytest.fixture(scope="module")
def corpus(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny corpus, packed."""
    packed = tmp_path_factory.mktemp("packed") / "corpus"
    pack(FolderInput(tiny_corpus), packed)
    return packed


def config_of(root: Path, tiny_corpus: Path, num_workers: int) -> Config:
    options = {
        "data.train_list": tiny_corpus / "train_list.txt",
        "data.train_path": root,
        "data.batch_size": 8,
        "data.crop_frames": 120,  # some utterances are shorter and wrap around
        "data.num_workers": num_workers,
        "data.device_resident": "off",
        "augment.enabled": "false",
        "model.name": "ResNet",
        "model.embedding_dim": 8,
    }
    return load_config([part for name, value in options.items() for part in (f"--{name}", str(value))]).config


@pytest.mark.parametrize("num_workers", [0, 1])
def test_training_batches(corpus: Path, tiny_corpus: Path, num_workers: int) -> None:
    epochs = []
    for root in (tiny_corpus, corpus):
        config = config_of(root, tiny_corpus, num_workers)
        loader = build_training_loader(config, Inputs(config, torch.device("cpu")))
        loader.set_epoch(1)
        epochs.append([(batch.waveforms.clone(), batch.labels.clone()) for batch in loader])
        loader.close()
    assert len(epochs[0]) == len(epochs[1]) > 1
    for (waveforms, labels), (packed_waveforms, packed_labels) in zip(*epochs, strict=True):
        assert torch.equal(waveforms, packed_waveforms) and torch.equal(labels, packed_labels)
        assert waveforms.dtype == torch.float32


def test_noise_and_rooms_are_counted_before_the_corpus(
    tiny_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte: with one less than both take, the corpus stays where it is."""
    for kind in ("noise", "speech"):
        (tmp_path / "musan" / kind / "x").mkdir(parents=True)
        write_audio(tmp_path / "musan" / kind / "x" / "0.wav", np.full(900, 0.1), 16000)
    (tmp_path / "rirs").mkdir()
    write_audio(tmp_path / "rirs" / "0.wav", np.eye(1, 300)[0], 16000)
    config = replaced(
        Config(),
        data={"train_list": str(tiny_corpus / "train_list.txt"), "ram_corpus": "on", "crop_frames": 50},
        augment={"noise_path": str(tmp_path / "musan"), "rir_path": str(tmp_path / "rirs")},
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    inputs = Inputs(config, torch.device("cuda"))
    given = inputs.training
    reader = load_into_ram(given.source, given.rows.paths, given.table)
    augmenter = build_augmenter(config, reader, given.table, np.arange(len(given.rows)))
    # Two clips of 16-bit samples; a room in 32 bits, and once more at the end.
    banks, corpus = 2 * 2 * 900, 2 * int(given.table.num_samples.sum())
    assert bytes_of_banks(augmenter.banks, augmenter.rirs, reader) == banks + 2 * 4 * 300
    both = banks + 2 * 4 * 300 + corpus
    for allowed, is_there in ((both, True), (both - 1, False)):
        asked = replaced(config, data={"device_gigabytes": allowed / (1 << 30)})
        found = choose_placement(asked, reader, inputs, augmenter)
        assert (found.banks, found.corpus) == (True, is_there)


@pytest.mark.parametrize(("reserved", "is_there"), [(0, True), (1 << 30, False)])
def test_what_training_takes_is_left_to_it(
    corpus: Path, tiny_corpus: Path, reserved: int, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision comes before anything is moved: no GPU is needed to see it."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    config = replaced(config_of(corpus, tiny_corpus, 0), data={"device_resident": "auto"})
    inputs = Inputs(config, torch.device("cuda"))
    given = inputs.training
    reader = given.source.rows(given.rows.paths, given.table)
    assert choose_placement(config, reader, inputs, None, reserved).corpus is is_there
