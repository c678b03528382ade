"""A packed corpus that memory does not hold: the same samples read from the file, the next batches' read ahead."""

import logging
import pickle
import shutil
import threading
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from speakernet.assembly.data import build_training_loader, loading_facts
from speakernet.assembly.inputs import Inputs
from speakernet.config.loading import load_config
from speakernet.corpora.pack_inputs import FolderInput
from speakernet.data import packed as packed
from speakernet.data.audio import AudioError, write_audio
from speakernet.data.batches import BatchMaker, BatchReport, BatchRequest
from speakernet.data.lists import StringTable
from speakernet.data.packed import SAMPLES, FileSamples, PackedRows, PackedSource
from speakernet.data.packing import pack, pack_part
from speakernet.data.workers import BATCHES_AHEAD, ReadAhead
from speakernet.files import WorkPart

NAMES = [f"id{speaker}/{utterance}.wav" for speaker in range(4) for utterance in range(3)]
SPEEDS = (Fraction(1), Fraction(9, 10))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve utterances, some shorter than a crop, packed by one machine (`whole`) and by two (`parts`)."""
    root = tmp_path_factory.mktemp("ahead")
    random = np.random.default_rng(5)
    for row, name in enumerate(NAMES):
        (root / "audio" / name).parent.mkdir(parents=True, exist_ok=True)
        write_audio(root / "audio" / name, 0.1 * random.standard_normal(900 + 200 * row))
    pack(FolderInput(root / "audio"), root / "whole")
    for number in (1, 2):
        pack_part(FolderInput(root / "audio"), root / "parts", WorkPart(number, 2))
    (root / "train.txt").write_text("".join(f"{name.split('/')[0]} {name}\n" for name in NAMES))
    return root


@pytest.fixture()
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose memory is full."""
    monkeypatch.setattr(packed, "usable_memory_bytes", lambda: 0)


def planner_of(corpus: Path, names: list[str] = NAMES) -> BatchMaker:
    source, table = PackedSource(corpus), StringTable.from_strings(names)
    lookup = source.lookup_table(table)
    return BatchMaker(source.rows(table, lookup), lookup.num_samples, seed=3, speeds=SPEEDS)


def requests_of(num_batches: int, rows: int = 8) -> list[BatchRequest]:
    random = np.random.default_rng(1)
    return [
        BatchRequest(2, random.permutation(len(NAMES))[:rows], random.integers(0, 2, rows), 1600, batch)
        for batch in range(num_batches)
    ]


def made_by(maker: object, requests: list[BatchRequest]) -> list[torch.Tensor]:
    return [crops.clone() for _, crops, _ in maker.run(requests)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["whole", "parts"])
def test_batches_are_those_of_a_corpus_in_memory(corpora: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    mapped = planner_of(corpora / kind)
    assert isinstance(mapped.reader, PackedRows) and mapped.reader.is_mapped
    monkeypatch.setattr(packed, "usable_memory_bytes", lambda: 0)
    planner = planner_of(corpora / kind)
    assert isinstance(planner.reader, PackedRows) and not planner.reader.is_mapped
    again = pickle.loads(pickle.dumps(planner.reader))
    assert not again.is_mapped and np.array_equal(again.samples[100:200], mapped.reader.samples[100:200])
    requests = requests_of(9)
    wanted = made_by(mapped, requests)
    for maker in (planner, ReadAhead(planner, planner)):
        assert all(torch.equal(left, right) for left, right in zip(made_by(maker, requests), wanted, strict=True))
    assert not [one for one in threading.enumerate() if one.name.startswith("read-ahead")]


class Watched:
    """Samples that remember which of them were asked for."""

    def __init__(self, samples: FileSamples) -> None:
        self.samples, self.asked = samples, set[tuple[int, int]]()

    def __getitem__(self, some: slice) -> np.ndarray:
        self.asked.add((some.start, some.stop))
        return self.samples[some]


class Recording(BatchMaker):
    """A maker that makes nothing."""

    def run(self, requests: list[BatchRequest]) -> Iterator[tuple[BatchRequest, torch.Tensor, BatchReport]]:
        for request in requests:
            yield request, torch.empty(0), BatchReport(request.rows)


@pytest.mark.parametrize("num_asked", [0, 3])
def test_the_samples_of_a_batch_are_read_before_it_is_made(corpora: Path, no_memory: None, num_asked: int) -> None:
    planner, requests = planner_of(corpora / "whole"), requests_of(12)
    # What each batch reads, found out by making it.
    needs = []
    for request in requests:
        planner.reader.samples = watched = Watched(planner_of(corpora / "whole").reader.samples)
        planner.make(request, np.empty((len(request.rows), planner.width(request.num_samples)), np.float32))
        needs.append(watched.asked)
    planner.reader.samples = watched = Watched(planner_of(corpora / "whole").reader.samples)
    for number, _ in enumerate(
        ReadAhead(Recording(planner.reader, planner.lengths, planner.seed, speeds=SPEEDS), planner, num_asked).run(
            requests
        )
    ):
        # The batch that is asked for next; those before were asked for when nothing was read yet.
        if number:
            before = needs[number + num_asked] if number + num_asked < len(needs) else set()
            assert {first for first, _ in before} <= {first for first, _ in watched.asked}
        assert len(watched.asked) <= sum(map(len, needs[1 + num_asked : number + 1 + num_asked + BATCHES_AHEAD]))
    # A short utterance is read whole by its maker, to be wrapped around, and as far as it goes ahead of it.
    assert {first for first, _ in watched.asked} == {first for one in needs[1 + num_asked :] for first, _ in one}


def test_what_the_disk_does_not_give_is_the_makers_to_tell(corpora: Path, no_memory: None, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    shutil.copytree(corpora / "whole", corpus)
    planner, request = planner_of(corpus, [*NAMES[:11], "nobody.wav"]), requests_of(3, len(NAMES))
    with (corpus / SAMPLES).open("r+b") as file:
        file.truncate(20_000)
    reader = planner.reader
    problems = reader.fill(np.arange(12), np.zeros(12, dtype=np.int64), np.empty((12, 1000), np.float32))
    assert 0 not in problems and "became shorter while it was being read" in problems[10]
    assert "holds no utterance for row 11" in problems[11]
    with pytest.raises(AudioError, match=r"became shorter|holds no utterance"):
        made_by(ReadAhead(planner, planner), request)


def test_training_chooses_it_by_itself(
    corpora: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    lists = ["--data.train_list", str(corpora / "train.txt"), "--data.train_path", str(corpora / "parts")]
    config = load_config([*lists, "--data.batch_size", "4", "--data.crop_frames", "10"]).config
    fits = build_training_loader(config, Inputs(config, torch.device("cpu")))
    assert isinstance(fits.maker, BatchMaker) and "read its crops ahead" not in caplog.text
    monkeypatch.setattr(packed, "usable_memory_bytes", lambda: 1000)
    ahead = build_training_loader(config, Inputs(config, torch.device("cpu")))
    assert isinstance(ahead.maker, ReadAhead) and isinstance(ahead.maker.maker, BatchMaker)
    assert "is larger than the memory that is free" in caplog.text
    assert loading_facts(ahead).is_on_disk and not loading_facts(fits).is_on_disk
    for left, right in zip(fits, ahead, strict=True):
        assert torch.equal(left.waveforms, right.waveforms) and torch.equal(left.labels, right.labels)
