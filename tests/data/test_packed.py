"""Packed corpora: the same audio as the folder, by row and by name; damage is found and refused."""

import json

import numpy as np
import pytest
import soundfile
from numpy.testing import assert_allclose, assert_array_equal

from speakernet.corpora.pack_inputs import FolderInput
from speakernet.data import packed as packed_module
from speakernet.data.audio import AudioError, write_audio
from speakernet.data.lists import NameIndex, StringTable
from speakernet.data.lookup import COLUMNS
from speakernet.data.opening import open_source
from speakernet.data.packed import PackedError, PackedSource, verify
from speakernet.data.packing import pack
from speakernet.data.sources import FolderSource
from speakernet.files import sha256_of
from tests.commands import run_command

NAMES = ["a/plain.wav", "a/b c.flac", "ü/stereo.wav", "short.wav", "wide.wav"]


@pytest.fixture
def folder(tmp_path, random):
    """A plain WAV, FLAC with a space in its name, stereo at 8 kHz, one shorter than any crop, 24
    bits.
    """
    root = tmp_path / "audio"
    (root / NAMES[2]).parent.mkdir(parents=True)
    write_audio(root / NAMES[0], 0.1 * random.standard_normal(8000))
    write_audio(root / NAMES[1], 0.1 * random.standard_normal(9000))
    soundfile.write(root / NAMES[2], 0.1 * random.standard_normal((4000, 2)), 8000)
    write_audio(root / NAMES[3], 0.1 * random.standard_normal(700))
    soundfile.write(root / NAMES[4], 0.1 * random.standard_normal(8000), 16000, subtype="PCM_24")
    return root


@pytest.fixture
def corpus(folder, tmp_path):
    pack(FolderInput(folder), tmp_path / "corpus")
    return tmp_path / "corpus"


def test_utterances(folder, corpus):
    files = FolderSource(folder)
    packed = open_source(corpus)
    assert isinstance(packed, PackedSource) and len(packed) == len(NAMES)
    for name in NAMES:
        assert_allclose(packed.read(name), files.read(name), atol=0.51 / 32768)
        assert_array_equal(packed.read(name, 100, 300), packed.read(name)[100:400])
    assert_array_equal(packed.read(NAMES[0]), files.read(NAMES[0]))  # 16-bit samples are exact
    with pytest.raises(AudioError, match=r"samples 9000"):
        packed.read(NAMES[0], 9000)
    with pytest.raises(AudioError, match=r"absent\.wav"):
        packed.read("absent.wav")


def test_flipped_bit(corpus):
    assert verify(corpus) == []
    index = PackedSource(corpus).index
    row = list(index.names).index("short.wav")
    samples = np.memmap(corpus / "samples.npy", np.uint8, "r+")
    samples[128 + 2 * (index.sample_offsets[row] + 350)] ^= 4
    samples.flush()
    problems = verify(corpus)
    assert len(problems) == 1 and problems[0].startswith("short.wav: ")
    run_command(f"pack {corpus} --verify", 1)


def _cut(path):
    path.write_bytes(path.read_bytes()[:-10])


def _edit(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _header(path, text):
    content = path.read_bytes()
    path.write_bytes(content[:10] + text.ljust(118) + content[128:])


def _index(root, **columns):
    """Change columns and update the checksum, which a program could do but a flipped bit could
    not.
    """
    with np.load(root / "index.npz") as stored:
        kept = dict(stored)
    np.savez(root / "index.npz", **{**kept, **columns})
    _edit(root / "corpus.json", index_sha256=sha256_of(root / "index.npz"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: _cut(root / "samples.npy"), r"samples\.npy: damaged"),
        (lambda root: (root / "samples.npy").unlink(), r"samples\.npy: there is no such file"),
        (lambda root: _cut(root / "index.npz"), r"index\.npz: the checksum"),
        (
            lambda root: _cut(root / "corpus.json"),
            r"corpus\.json: damaged .*expected the description",
        ),
        (lambda root: _edit(root / "corpus.json", version=99), r"format version 99"),
        (lambda root: _edit(root / "corpus.json", num_utterances=3), r"does not match corpus"),
        (
            lambda root: _header(root / "samples.npy", b"{'descr': '<i2', ("),
            r"samples\.npy: damaged .*pack it again",
        ),
        (
            lambda root: _index(root, sample_offsets=np.array([0, 5, 3, 9, 9, 9])),
            r"offsets do not increase",
        ),
        (lambda root: _index(root, checksums=np.array("text")), r"index\.npz: damaged .*'text'"),
    ],
)
def test_damage(corpus, damage, message):
    damage(corpus)
    with pytest.raises(PackedError, match=message):
        open_source(corpus)


def test_incomplete_corpus(corpus):
    half = corpus.rename(corpus.with_name("corpus.partial"))
    for root in (corpus, half):
        with pytest.raises(PackedError, match=r"run the same `speakernet pack` again"):
            open_source(root)


def test_names_in_the_other_unicode_form(tmp_path, random):
    write_audio(tmp_path / "audio" / "Jose\u0301" / "1.wav", 0.1 * random.standard_normal(500))
    write_audio(tmp_path / "audio" / "b" / "1.wav", 0.1 * random.standard_normal(600))
    pack(FolderInput(tmp_path / "audio"), tmp_path / "corpus")
    names = StringTable.from_strings(["b/1.wav", "Jos\u00e9/1.wav", "Jos\u00e9/2.wav"])
    source = PackedSource(tmp_path / "corpus")
    assert source.find(names).tolist() == [1, 0, -1]
    assert source.lookup_table(names).num_samples.tolist() == [600, 500, 0]


def test_names_among_many(random):
    texts = [f"id{row % 97:05d}/ü{row}/{row:07d}.wav" for row in range(70_000)] + ["", "a", "b\0c"]
    table = StringTable.from_strings(texts)
    rows = random.permutation(len(texts))
    index = NameIndex(table)
    assert index.find(table.take(rows)).tolist() == rows.tolist()
    others = StringTable.from_strings(["id00000/ü0/000000.wav", "", "aa"])
    assert index.find(others).tolist() == [-1, 70_000, -1]
    empty = NameIndex(StringTable.from_strings([]))
    assert empty.find(others).tolist() == [-1] * 3


def test_large_corpus_is_mapped(corpus, tmp_path, monkeypatch):
    names = StringTable.from_strings([NAMES[2], "absent.wav", NAMES[0]])
    small = PackedSource(corpus).lookup_table(names)
    monkeypatch.setenv("SPEAKERNET_CACHE", str(tmp_path))
    monkeypatch.setattr(packed_module, "LONG_ROWS", 1)
    for _ in range(2):
        source = PackedSource(corpus)
        table = source.lookup_table(names)
        assert isinstance(source.index.checksums.base, np.memmap) and isinstance(
            table.data_offsets.base, np.memmap
        )
        assert table.problems == small.problems and list(table.problems) == [1]
        for column in COLUMNS:
            assert_array_equal(getattr(table, column), getattr(small, column))
