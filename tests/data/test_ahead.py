"""A corpus larger than memory: the same samples read from the file, the next batches read ahead."""

import logging
import os
import pickle
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from speakernet.assembly.data import loading_facts
from speakernet.corpora.pack_inputs import FolderInput
from speakernet.data import packed, sources
from speakernet.data.audio import AudioError, write_audio
from speakernet.data.batches import BatchMaker, BatchRequest
from speakernet.data.lists import StringTable, write_training_list
from speakernet.data.packed import SAMPLES, PackedSource
from speakernet.data.packing import pack, pack_part
from speakernet.data.parts import WorkPart
from speakernet.data.workers import ReadAhead
from tests.data.loaders import make_loader

NAMES = [f"id{speaker}/{utterance}.wav" for speaker in range(4) for utterance in range(3)]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Twelve utterances, some shorter than a crop, packed by one machine (`whole`) and by two
    (`parts`).
    """
    root = tmp_path_factory.mktemp("ahead")
    random = np.random.default_rng(5)
    for row, name in enumerate(NAMES):
        write_audio(root / "audio" / name, 0.1 * random.standard_normal(900 + 200 * row))
    pack(FolderInput(root / "audio"), root / "whole")
    for number in (1, 2):
        pack_part(FolderInput(root / "audio"), root / "parts", WorkPart(number, 2))
    write_training_list(root / "train_list.txt", [(name[:3], name) for name in NAMES])
    return root


def test_read_errors(corpora, monkeypatch, tmp_path):
    monkeypatch.setattr(packed, "usable_memory_bytes", lambda: 0)
    corpus = shutil.copytree(corpora / "whole", tmp_path / "corpus")
    source = PackedSource(corpus)
    names = StringTable.from_strings([*NAMES[:11], "nobody.wav"])
    lookup = source.lookup_table(names)
    reader = source.rows(names, lookup)
    os.truncate(corpus / SAMPLES, 20_000)
    zeros = np.zeros(12, dtype=np.int64)
    problems = reader.fill(np.arange(12), zeros, np.empty((12, 1000), np.float32))
    assert 0 not in problems and "became shorter while it was being read" in problems[10]
    assert "row 11" in problems[11]
    maker = ReadAhead(BatchMaker(reader, lookup.num_samples, seed=3))
    with pytest.raises(AudioError, match=r"became shorter|row \d+"):
        list(maker.run([BatchRequest(2, np.arange(12), zeros, 1600)]))


def loader_of(corpora, folder):
    return make_loader(corpora, train_path=f"{corpora}/{folder}", crop_frames=10, ram_corpus="off")


@pytest.mark.parametrize("kind", ["whole", "parts"])
def test_automatic_choice(corpora, monkeypatch, caplog, kind):
    caplog.set_level(logging.INFO)
    fits = loader_of(corpora, kind)
    assert isinstance(fits.maker, BatchMaker) and "read its crops ahead" not in caplog.text
    assert fits.maker.reader.is_mapped
    monkeypatch.setattr(packed, "usable_memory_bytes", lambda: 1000)
    ahead = loader_of(corpora, kind)
    assert isinstance(ahead.maker, ReadAhead) and not ahead.maker.reader.is_mapped
    assert "is larger than" in caplog.text
    again = pickle.loads(pickle.dumps(ahead.maker.reader))
    assert not again.is_mapped
    assert np.array_equal(again.samples[100:200], fits.maker.reader.samples[100:200])
    assert loading_facts(ahead).is_on_disk and not loading_facts(fits).is_on_disk
    for left, right in zip(fits, ahead, strict=True):
        assert torch.equal(left.waveforms, right.waveforms)
        assert torch.equal(left.labels, right.labels)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_folders(corpora, monkeypatch):
    """A folder of files larger than memory is read ahead too: the crops of the next batches, of all
    files of a list, also of one that has to be resampled and of one that vanished.
    """
    audio = shutil.copytree(corpora / "audio", corpora / "more")
    write_audio(audio / NAMES[0], 0.1 * np.ones(4000), sample_rate=8000)
    fits = loader_of(corpora, "more")
    assert isinstance(fits.maker, BatchMaker)
    monkeypatch.setattr(sources, "usable_memory_bytes", lambda: 1000)
    ahead = loader_of(corpora, "more")
    assert isinstance(ahead.maker, ReadAhead)
    reads = []
    read = sources.os.pread

    def noted(file, size, offset):
        samples = read(file, size, offset)
        reads.append((str(Path(f"/proc/self/fd/{file}").readlink()), len(samples), offset))
        return samples

    monkeypatch.setattr(sources.os, "pread", noted)
    for left, right in zip(fits, ahead, strict=True):
        assert torch.equal(left.waveforms, right.waveforms)
    # Twelve utterances in batches of four; the first batch is read by the maker itself.
    assert len(reads) == 8
    size = 10 * 160 + 240
    for path, num_bytes, offset in reads:
        whole = (audio / NAMES[0]).samefile(path)
        assert offset == 0 if whole else offset >= 44
        assert num_bytes <= (Path(path).stat().st_size if whole else 2 * size)
    rows = np.array([3, 4])
    (audio / NAMES[3]).unlink()
    ahead.maker.reader.touch(rows, np.array([0, 0]), np.array([800, 800]))
    assert len(reads) == 9
