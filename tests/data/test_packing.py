"""Packing from folders, lists and archives; kills and resuming; bad files and unsafe names."""

import io
import itertools
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile

import numpy as np
import pytest

from speakernet.cli import main
from speakernet.corpora.archives import ArchiveError
from speakernet.corpora.pack_inputs import FolderInput, open_inputs
from speakernet.data import packing as packed_writer
from speakernet.data.audio import AudioError, write_audio
from speakernet.data.lists import StringTable
from speakernet.data.packed import PackedError, PackedSource, verify
from speakernet.data.packing import pack

NAMES = [f"id{row // 4}/v/{row:05d}.wav" for row in range(12)]
ALL = StringTable.from_strings(NAMES)
SOME = StringTable.from_strings(NAMES[:9])


@pytest.fixture
def folder(tmp_path, random):
    root = tmp_path / "audio"
    for row, name in enumerate(NAMES):
        write_audio(root / name, 0.1 * random.standard_normal(1000 + 10 * row))
    (root / "notes.txt").write_text("not audio")
    (root / ".hidden.wav").write_bytes(b"x")
    return root


@pytest.fixture
def corpus(tmp_path):
    """Where the corpus will be."""
    return tmp_path / "corpus"


def content_of(corpus):
    source = PackedSource(corpus)
    return {name: source.read(name).tobytes() for name in source.index.names}


@pytest.fixture
def expected(folder, tmp_path):
    """Name -> samples of the packed folder."""
    pack(FolderInput(folder), tmp_path / "expected")
    return content_of(tmp_path / "expected")


def make_zip(path, folder):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("wav/", b"")
        archive.writestr("readme.txt", b"hello")
        for name in NAMES:
            archive.write(folder / name, "wav/" + name)
    return path


def test_list(folder, tmp_path, corpus):
    listed = tmp_path / "list.txt"
    listed.write_text(f"id1 {NAMES[5]}\nid0 {NAMES[2]}\nid1 {NAMES[5]}\n")
    trials = tmp_path / "trials.txt"
    trials.write_text(f"1 {NAMES[2]} {NAMES[3]}\n")
    command = f"pack {corpus} --source {folder} --list {listed} --trials {trials} --verify"
    assert main(command.split()) == 0
    assert list(PackedSource(corpus).index.names) == [NAMES[5], NAMES[2], NAMES[3]]


MODES = {"tar": "w", "tar.gz": "w:gz", "tar.xz": "w:xz"}


def make_archive(kind, root, folder):
    path = root / f"a.{kind}"
    if kind == "zip":
        return make_zip(path, folder)
    with tarfile.open(path, MODES[kind]) as archive:
        archive.add(folder, arcname="corpus/dev")
    return path


@pytest.mark.parametrize("kind", ["zip", *MODES])
def test_archives(kind, folder, tmp_path, expected):
    archive = make_archive(kind, tmp_path, folder)
    names = StringTable.from_strings(NAMES[::-1])
    pack(open_inputs([archive], names), tmp_path / "by_list", num_threads=3)
    assert content_of(tmp_path / "by_list") == expected
    depth = 1 if kind == "zip" else 2
    pack(open_inputs([archive], strip=depth), tmp_path / "by_depth")
    assert content_of(tmp_path / "by_depth") == expected
    pack(open_inputs([archive]), tmp_path / "as_it_is")
    whole = PackedSource(tmp_path / "as_it_is").index.names
    assert sorted(whole) == [("wav/" if kind == "zip" else "corpus/dev/") + name for name in NAMES]


def test_archives_in_parts(folder, tmp_path, corpus, expected):
    content = make_zip(tmp_path / "whole.zip", folder).read_bytes()
    edges = [0, 3000, 6000, len(content)]
    parts = [tmp_path / f"dev_part{letters}" for letters in ("aa", "ab", "ac")]
    for part, (start, end) in zip(parts, itertools.pairwise(edges), strict=True):
        part.write_bytes(content[start:end])
    write_audio(folder / "extra/one.wav", np.ones(500) / 4)
    with zipfile.ZipFile(tmp_path / "test.zip", "w") as archive:
        archive.write(folder / "extra/one.wav", "extra/one.wav")
    names = StringTable.from_strings([*NAMES, "extra/one.wav"])
    pack(open_inputs([parts[1], tmp_path / "test.zip", parts[0], parts[2]], names), corpus)
    found = content_of(corpus)
    assert len(found.pop("extra/one.wav")) == 2000
    assert found == expected
    with pytest.raises(ArchiveError, match="parts"):
        open_inputs(parts[:2], names)


def failing(source):
    """The source, failing at the eighth row as with a full disk or a kill."""
    decode = source.decode

    def decode_some(row, content, sample_rate):
        if row == 7:
            raise RuntimeError("stopped")
        return decode(row, content, sample_rate)

    source.decode = decode_some
    return source


@pytest.mark.parametrize("kind", ["folder", "tar.gz", "zip"])
def test_resuming(kind, folder, tmp_path, corpus, expected):
    path = folder if kind == "folder" else make_archive(kind, tmp_path, folder)
    with pytest.raises(RuntimeError):
        pack(failing(open_inputs([path], ALL)), corpus, num_threads=1)
    # A kill between two flushes leaves samples without a record, and half a record.
    for name in ("samples.npy", "journal.bin"):
        with (tmp_path / "corpus.partial" / name).open("ab") as file:
            file.write(b"rest!")
    summary = pack(open_inputs([path], ALL), corpus)
    assert summary.num_resumed == 7 and summary.num_utterances == 12
    assert content_of(corpus) == expected and verify(corpus) == []
    assert not (tmp_path / "corpus.partial").exists()
    assert {path.name for path in corpus.iterdir()} == {"corpus.json", "index.npz", "samples.npy"}
    for name in ("samples.npy", "index.npz"):
        is_equal = (corpus / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
        assert is_equal or kind != "folder"


SLOW_PACK = """
import sys, time
from speakernet.data import packing as packed_writer
from speakernet.corpora.pack_inputs import FolderInput
packed_writer.FLUSH_BYTES = 4000

class Slow(FolderInput):
    def decode(self, row, content, sample_rate):
        time.sleep(0.1)
        return super().decode(row, content, sample_rate)

packed_writer.pack(Slow(sys.argv[1]), sys.argv[2], num_threads=1)
"""


def test_kill(folder, tmp_path, corpus, expected):
    journal = tmp_path / "corpus.partial" / "journal.bin"
    process = subprocess.Popen([sys.executable, "-c", SLOW_PACK, str(folder), str(corpus)])
    deadline = time.monotonic() + 60
    while not (journal.exists() and journal.stat().st_size >= 4 * packed_writer.RECORD.itemsize):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not corpus.exists()
    summary = pack(FolderInput(folder), corpus)
    assert 4 <= summary.num_resumed < 12
    assert content_of(corpus) == expected
    assert verify(corpus) == []


def test_another_list_starts_over(folder, tmp_path, corpus):
    with pytest.raises(RuntimeError):
        pack(failing(FolderInput(folder)), corpus)
    with pytest.raises(PackedError, match="different utterances, a different rate"):
        pack(FolderInput(folder), corpus, sample_rate=8000)
    with pytest.raises(PackedError, match="different utterances, a different rate"):
        pack(FolderInput(folder, SOME), corpus)
    os.truncate(tmp_path / "corpus.partial" / "samples.npy", 1000)
    with pytest.raises(PackedError, match=r"1000 bytes .* journal"):
        pack(FolderInput(folder), corpus)


def test_existing_corpus(folder, corpus):
    first = pack(FolderInput(folder), corpus)
    before = (corpus / "samples.npy").stat().st_mtime_ns
    again = pack(FolderInput(folder), corpus)
    assert (again.num_samples, again.num_resumed) == (first.num_samples, 12)
    assert (corpus / "samples.npy").stat().st_mtime_ns == before
    with pytest.raises(PackedError, match="exists with different utterances"):
        pack(FolderInput(folder, SOME), corpus)
    with pytest.raises(PackedError, match="is not a packed corpus"):
        pack(FolderInput(folder), folder)


@pytest.mark.parametrize("where", ["{}/corpus", "file://{}/corpus"])
@pytest.mark.parametrize("rate", [10, 1_000_000_000])
def test_impossible_rates(folder, tmp_path, capsys, where, rate):
    corpus = where.format(tmp_path)
    assert main(f"pack {corpus} --source {folder} --sample-rate {rate}".split()) == 1
    assert f"{rate} Hz; expected 1000 to 768000 Hz" in capsys.readouterr().err
    assert not list(tmp_path.glob("corpus*"))


def test_archive_of_a_mac(tmp_path, corpus):
    with zipfile.ZipFile(tmp_path / "people.zip", "w") as archive:
        write_audio(tmp_path / "1.wav", np.ones(100) / 2)
        for name in ("people/Jose\u0301/1.wav", "people/b/1.wav"):
            archive.write(tmp_path / "1.wav", name)
            archive.writestr(f"__MACOSX/{name.replace('/1', '/._1')}", b"\0\5\x16\7")
            archive.writestr(f"__MACOSX/{name}", b"\0\5\x16\7")
    inputs = open_inputs([tmp_path / "people.zip"])
    assert list(inputs.names) == ["people/Jose\u0301/1.wav", "people/b/1.wav"]
    wanted = StringTable.from_strings(["Jos\u00e9/1.wav", "b/1.wav"])
    pack(open_inputs([tmp_path / "people.zip"], wanted), corpus)
    assert list(PackedSource(corpus).index.names) == list(wanted)


def test_bad_files(folder, corpus):
    (folder / NAMES[3]).write_bytes(b"RIFF\0\0\0\0WAVE")
    (folder / NAMES[8]).unlink()
    with pytest.raises(AudioError, match=r"00003\.wav.*--skip-bad"):
        pack(FolderInput(folder, ALL), corpus)
    summary = pack(FolderInput(folder, ALL), corpus, skip_bad=True)
    assert (summary.num_utterances, summary.num_skipped, summary.num_resumed) == (10, 2, 3)
    skipped = (corpus / "skipped.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in skipped] == [NAMES[3], NAMES[8]]
    assert PackedSource(corpus).missing(ALL).tolist() == [3, 8]
    assert pack(FolderInput(folder, ALL), corpus).num_skipped == 2


@pytest.mark.parametrize(
    "name", ["../evil.wav", "a/../../evil.wav", "/evil.wav", "..\\evil.wav", "C:/evil.wav"]
)
def test_names_outside_the_folder(name, folder, tmp_path):
    content = (folder / NAMES[0]).read_bytes()
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), content)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    for path in ("a.zip", "a.tar"):
        with pytest.raises(ArchiveError, match="refused"):
            open_inputs([tmp_path / path])
    with pytest.raises(AudioError, match="refused"):
        FolderInput(folder, StringTable.from_strings([name]))


def test_broken_archives(folder, tmp_path, corpus):
    path = make_zip(tmp_path / "flipped.zip", folder)
    with pytest.raises(ArchiveError, match="twice"):
        open_inputs([path, make_zip(tmp_path / "b.zip", folder)])
    for name, content in (("half.zip", path.read_bytes()[:9000]), ("text.zip", b"hello")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ArchiveError, match=name):
            open_inputs([tmp_path / name])
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 255
    path.write_bytes(content)
    summary = pack(open_inputs([path], strip=1), corpus, skip_bad=True)
    assert (summary.num_utterances, summary.num_skipped) == (11, 1)
