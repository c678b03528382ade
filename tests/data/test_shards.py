"""A packed corpus at an address: several writers, streaming through a bounded cache, resuming; also
over real S3.
"""

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from numpy.testing import assert_array_equal

from speakernet.corpora.pack_inputs import open_inputs
from speakernet.data import packing, sampling, stores
from speakernet.data.lists import read_training_list
from speakernet.data.opening import open_source
from speakernet.data.options import DataOptions
from speakernet.data.packed import PackedError
from speakernet.data.sampling import BalancedSampler, ShuffledSampler, rank_share
from speakernet.data.shards import HEADER_BYTES, plan_streams
from speakernet.data.stores import ShardError, Store
from speakernet.files import hold_lock
from tests.commands import run_command
from tests.data.loaders import is_cut_from, make_loader
from tests.data.object_store import object_store
from tests.tiny_recipe import write_recipe

NUM_SHARDS = 5
STREAMED = {"shuffle_buffer": 6, "shard_cache_gigabytes": 600_000 / 2**30}


@pytest.fixture(autouse=True)
def fast_and_private(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("SPEAKERNET_CACHE", str(tmp_path / "cache"))


def pack_to(address, corpus, more=""):
    lists = f"--source {corpus} --list {corpus}/train_list.txt"
    run_command(f"pack {address} {lists} --shards {NUM_SHARDS} {more}")


@pytest.fixture(scope="module")
def packed(tiny_corpus, tmp_path_factory):
    root = tmp_path_factory.mktemp("store") / "corpus"
    for writer in ("2/2", "1/2"):
        # Incomplete until the last writer has written its description.
        assert not (root / "corpus.json").exists()
        pack_to(f"file://{root}", tiny_corpus, f"--part {writer}")
    return root


@pytest.fixture
def store(packed, tmp_path):
    shutil.copytree(packed, tmp_path / "store")
    return tmp_path / "store"


def held(source):
    return sorted(path.stem for path in (source._folder / "samples").glob("*.npy"))


def test_writers_and_reader(store, tiny_corpus, tmp_path):
    address = f"file://{store}"
    files = open_source(tiny_corpus)
    source = open_source(address)
    names = read_training_list(tiny_corpus / "train_list.txt").paths
    assert source.shards_of(source.lookup_table(names)).tolist() == [
        row % NUM_SHARDS for row in range(len(names))
    ]
    for name in names:
        assert_array_equal(source.read(name), files.read(name))
    pack_to(address, tiny_corpus)  # it exists
    run_command(f"pack {address} --verify")
    rows = [f"spk0{speaker} spk0{speaker}/utt0.wav\n" for speaker in range(6)]
    (tmp_path / "other.txt").write_text("".join(rows))
    with pytest.raises(PackedError, match="part-0001-of-0005"):
        pack_to_raising(address, tiny_corpus, tmp_path / "other.txt")


def test_cache_is_bounded(store, tiny_corpus):
    largest = max(path.stat().st_size for path in store.glob("part-*/samples.npy"))
    # Six utterances lie in two shards of seven, eight in three.
    for buffer, shards in ((6, 1.9), (8, 2.9)):
        with pytest.raises(
            ValueError, match=f"data.shuffle_buffer: {buffer} .*shard_cache_gigabytes"
        ):
            make_loader(
                tiny_corpus,
                train_path=f"file://{store}",
                shuffle_buffer=buffer,
                shard_cache_gigabytes=shards * largest / 2**30,
            )
    source = open_source(f"file://{store}", shard_cache_gigabytes=2.1 * largest / 2**30)
    for shard in (0, 1, 0, 2):
        source.shards.hold(shard)
    assert held(source) == ["0", "2"]
    assert len(source.samples[0 : len(source.samples)]) == source.index.num_samples
    assert len(held(source)) == 2


def test_leftovers_of_a_killed_process(store):
    largest = max(path.stat().st_size for path in store.glob("part-*/samples.npy"))
    source = open_source(f"file://{store}", shard_cache_gigabytes=2.1 * largest / 2**30)
    folder = source._folder / "samples"
    (folder / "4.npy.partial").touch()
    for shard in (0, 1):
        source.shards.hold(shard)
    assert held(source) == ["0", "1"] and not (folder / "4.npy.partial").exists()
    # Another process is fetching this shard.
    (folder / "4.npy.partial").touch()
    with hold_lock(folder / "4.lock", ""):
        source.shards.hold(2)
    assert held(source) == ["2"] and (folder / "4.npy.partial").exists()


def test_missing_and_altered_shards(store, caplog):
    samples = sorted(store.glob("part-*/samples.npy"))
    source = open_source(f"file://{store}")
    content = bytearray(samples[3].read_bytes())
    content[HEADER_BYTES + 8] ^= 1
    samples[3].write_bytes(content)
    samples[4].unlink()
    with pytest.raises(
        ShardError, match=r"part-0004-of-0005/samples.npy: 6 attempts .*altered .*spk"
    ):
        source.shards.hold(3)
    with pytest.raises(ShardError, match=r"part-0005-of-0005/samples.npy: missing"):
        source.shards.hold(4)
    assert held(source) == [] and caplog.text.count("attempt") == 5
    index = sorted(store.glob("part-*/index.npz"))[0]
    shutil.rmtree(source._folder)
    index.write_bytes(index.read_bytes()[:-1] + b"x")
    with pytest.raises(ShardError, match=r"part-0001-of-0005/index.npz: 6 attempts .*altered"):
        open_source(f"file://{store}")


@pytest.mark.parametrize(
    "damage", ["lost samples", "cut samples", "cut index", "lost description", "cut corpus"]
)
def test_packing_again_repairs(packed, store, tiny_corpus, damage):
    address, shard = f"file://{store}", store / "part-0002-of-0005"
    kind, name = damage.split()
    path = {
        "samples": shard / "samples.npy",
        "index": shard / "index.npz",
        "description": shard / "corpus.json",
        "corpus": store / "corpus.json",
    }[name]
    untouched = store / "part-0001-of-0005" / "samples.npy"
    before = untouched.stat().st_ino
    if kind == "lost":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-20])
    # A writer that was killed while it wrote.
    (shard / "samples.npy.123.partial").write_bytes(b"x")
    pack_to(address, tiny_corpus)
    for whole in packed.rglob("*.*"):
        assert (store / whole.relative_to(packed)).read_bytes() == whole.read_bytes()
    assert (shard / "samples.npy.123.partial").exists() == (name == "corpus")
    assert untouched.stat().st_ino == before, "whole shards are left alone"
    run_command(f"pack {address} --verify")


def test_repair_refuses_what_is_not_the_same(store, tiny_corpus, tmp_path):
    address, shard = f"file://{store}", store / "part-0002-of-0005"
    (shard / "samples.npy").unlink()
    other = tmp_path / "corpus"
    shutil.copytree(tiny_corpus, other)
    for path in other.glob("*/*.wav"):
        path.write_bytes(path.read_bytes()[:-2000])
    before = (store / "corpus.json").read_bytes()
    with pytest.raises(PackedError, match=r"part-0002-of-0005: the recordings have changed"):
        pack_to_raising(address, other)
    assert (store / "corpus.json").read_bytes() == before and not (shard / "samples.npy").exists()
    for path in (store / "corpus.json", shard / "corpus.json"):
        path.write_text('{"format": "of somebody else"}')
        with pytest.raises(PackedError, match=r"corpus\.json"):
            pack_to_raising(address, tiny_corpus)
        assert path.read_text() == '{"format": "of somebody else"}'


def pack_to_raising(address, corpus, listed="train_list.txt"):
    source = open_inputs([corpus], read_training_list(corpus / listed).paths)
    return stores.pack_to_address(
        source, address, stores.WorkPart(1, 1), NUM_SHARDS, sample_rate=16000
    )


def test_interrupted_writes(store, tiny_corpus, tmp_path, monkeypatch):
    """A file at the address appears whole; a shard that was packed but not yet written is not
    packed again.
    """
    shutil.rmtree(store / "part-0003-of-0005")
    real, calls = LocalFileSystem.put_file, []

    def put_half(self, source, target, **options):
        calls.append(target)
        Path(target).write_bytes(Path(source).read_bytes()[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalFileSystem, "put_file", put_half)
    with pytest.raises(KeyboardInterrupt):
        pack_to_raising(f"file://{store}", tiny_corpus)
    assert len(calls) == 1 and list((store / "part-0003-of-0005").iterdir()) == []
    monkeypatch.setattr(LocalFileSystem, "put_file", real)
    monkeypatch.setattr(packing, "_Writer", None)
    pack_to_raising(f"file://{store}", tiny_corpus)
    run_command(f"pack file://{store} --verify")
    assert list((tmp_path / "cache" / "packing").iterdir()) == [], (
        "nothing is left in the scratch folder"
    )


def test_damaged_cache_is_fetched_again(store, tiny_corpus):
    address = f"file://{store}"
    source = open_source(address)
    names = read_training_list(tiny_corpus / "train_list.txt").paths
    whole = source.read(names[0])
    for path in (source.shards.path(0), source._folder / "part-0001-of-0005" / "index.npz"):
        path.write_bytes(path.read_bytes()[:-10])
    assert_array_equal(open_source(address).read(names[0]), whole)


def test_repacked_corpus(store, tiny_corpus, tmp_path):
    first = open_source(f"file://{store}")
    first.shards.hold(0)
    shutil.rmtree(store)
    (tmp_path / "list.txt").write_text("spk00 spk00/utt0.wav\nspk00 spk00/utt1.wav\n")
    words = f"pack file://{store} --source {tiny_corpus} --list {tmp_path}/list.txt"
    run_command(words)
    second = open_source(f"file://{store}")
    assert len(second) == 2 and held(second) == []


@pytest.mark.parametrize("num_streams", [1, 3])
def test_order_of_a_stream(num_streams):
    labels = np.arange(4000, dtype=np.int32) % 7
    shards = np.arange(4000) % 20
    sampler = ShuffledSampler(labels, DataOptions(batch_size=12, shuffle_buffer=600), seed=1)
    sampler.divide(lambda number: plan_streams(sampler, shards, num_streams, number))
    plans = [sampler.epoch(number) for number in (0, 0, 1)]
    assert np.array_equal(plans[0].rows, plans[1].rows) and not np.array_equal(
        plans[0].rows, plans[2].rows
    )
    plan = plans[0]
    assert len(np.unique(plan.rows)) == len(plan.rows) == 4000 - plan.num_left_out >= 3984
    theirs = []
    for rank in range(num_streams):
        mine = [
            plan.rows[rank_share(plan, batch, 1, rank, num_streams)] for batch in range(len(plan))
        ]
        theirs.append(set(shards[np.concatenate(mine)].tolist()))
        # A shard has 200 rows, so a block of 600 / streams rows spans 600 / streams / 200 shards,
        # and two at its edges.
        at_once = [
            len(np.unique(shards[np.concatenate(mine[first : first + 2])]))
            for first in range(len(plan) - 1)
        ]
        assert max(at_once) <= 2 * (600 // num_streams // 200 + 2)
    assert all(len(left & right) <= 1 for left, right in itertools.combinations(theirs, 2))
    assert set.union(*theirs) == set(range(20))


@pytest.mark.parametrize("exact_work", [sampling.EXACT_WORK, 0])
@pytest.mark.parametrize("unit", [1, 2])
def test_balanced_batches(store, tiny_corpus, monkeypatch, unit, exact_work):
    """No speaker is twice in a batch of all processes, which read one stream."""
    monkeypatch.setattr(sampling, "EXACT_WORK", exact_work)
    source = open_source(f"file://{store}")
    listed = read_training_list(tiny_corpus / "train_list.txt")
    options = DataOptions(batch_size=3, utterances_per_speaker=unit, shuffle_buffer=19)
    sampler = BalancedSampler(listed.labels, options, seed=1)
    source.order(sampler, listed, source.lookup_table(listed.paths), 2)
    for plan in map(sampler.epoch, range(10)):
        assert len(plan) >= 3 - unit
        for batch in range(len(plan)):
            shares = [plan.rows[rank_share(plan, batch, unit, rank, 2)] for rank in range(2)]
            speakers = listed.labels[np.concatenate(shares)].reshape(3, unit)
            assert (speakers == speakers[:, :1]).all() and len(np.unique(speakers)) == 3


def test_resuming(packed, tiny_corpus):
    options = {"train_path": f"file://{packed}", **STREAMED}
    straight = list(make_loader(tiny_corpus, **options))
    first = make_loader(tiny_corpus, **options, num_workers=2)
    begun = list(itertools.islice(first, 3))
    state = first.state_dict()
    first.close()
    resumed = make_loader(tiny_corpus, **options)
    resumed.load_state_dict(state)
    after = [*begun, *resumed]
    assert len(after) == len(straight) == 8
    files = open_source(tiny_corpus)
    for left, right in zip(straight, after, strict=True):
        assert torch.equal(left.waveforms, right.waveforms) and torch.equal(
            left.indices, right.indices
        )
        for row, crop in zip(left.indices.tolist(), left.waveforms.numpy(), strict=True):
            assert is_cut_from(files.read(first.training.paths[row]), crop)


def faulty(kinds, source, faults):
    shutil.rmtree(source._folder / "samples")
    (source._folder / "samples").mkdir()
    faults.kinds = list(kinds)
    faults.fetched = []


@pytest.mark.slow
def test_real_object_storage(tiny_corpus, tmp_path, monkeypatch):
    import s3fs

    names = read_training_list(tiny_corpus / "train_list.txt").paths
    files = open_source(tiny_corpus)
    address = "s3://bucket/corpus"
    with object_store(monkeypatch) as faults:
        for writer in ("1/2", "2/2"):
            pack_to(address, tiny_corpus, f"--part {writer}")
        source = open_source(address)
        for kinds in ([], ["503", "503"], ["cut"], ["slow"], ["wrong"], ["503", "cut", "wrong"]):
            faulty(kinds, source, faults)
            for name in names:
                assert_array_equal(source.read(name), files.read(name))
            assert not faults.kinds and len(faults.fetched) >= NUM_SHARDS
        with pytest.raises(ShardError, match=r"foo://bucket.*unknown kind of address"):
            Store("foo://bucket").size("corpus.json")
        faulty(["wrong"] * 100, source, faults)
        with pytest.raises(ShardError, match=r"part-0001-of-0005/samples.npy: 6 attempts"):
            source.shards.hold(0)
        faults.kinds = []

        def train(name, status=0):
            changes = {
                "data": {"train_path": address, **STREAMED},
                "training": {"max_epochs": 2, "test_interval": 2},
                "runtime": {"deterministic": True},
            }
            recipe = write_recipe(tmp_path / f"{name}.yaml", tiny_corpus, tmp_path / name, changes)
            run_command(f"train --config {recipe}", status)

        train("straight")
        system = s3fs.S3FileSystem()
        system.invalidate_cache()
        gone = "bucket/corpus/part-0002-of-0005/samples.npy"
        system.copy(gone, "bucket/kept")
        system.rm(gone)
        shutil.rmtree(source._folder / "samples")
        train("resumed", 1)
        assert {"last.pt", "log.txt"} <= {path.name for path in (tmp_path / "resumed").iterdir()}
        system.copy("bucket/kept", gone)
        train("resumed")
    weights = [
        torch.load(tmp_path / name / "last.pt", weights_only=True)["weights"]
        for name in ("straight", "resumed")
    ]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
