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
from pathlib import Path

import numpy as np
import pytest

from speakernet.corpora.archives import ArchiveError
from speakernet.corpora.pack_inputs import FolderInput, open_inputs
from speakernet.data import packing as packed_writer
from speakernet.data.audio import AudioError, write_audio
from speakernet.data.lists import StringTable
from speakernet.data.packed import PackedError, PackedSource, verify
from speakernet.data.packing import pack
from tests.commands import run_command

NAMES = [f"id{row // 4}/v/{row:05d}.wav" for row in range(12)]
ALL = StringTable.from_strings(NAMES)
SOME = StringTable.from_strings(NAMES[:9])
CORPUS = Path("corpus")
PARTIAL = Path("corpus.partial")
pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.fixture
def folder(in_tmp_path, random):
    root = Path("audio")
    for row, name in enumerate(NAMES):
        write_audio(root / name, 0.1 * random.standard_normal(1000 + 10 * row))
    (root / "notes.txt").write_text("not audio")
    (root / ".hidden.wav").write_bytes(b"x")
    return root


def content_of(corpus):
    source = PackedSource(corpus)
    return {name: source.read(name).tobytes() for name in source.index.names}


@pytest.fixture
def expected(folder):
    """Name -> samples of the packed folder."""
    pack(FolderInput(folder), "expected")
    return content_of("expected")


def make_zip(name, folder):
    with zipfile.ZipFile(name, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("wav/", b"")
        archive.writestr("readme.txt", b"hello")
        for recording in NAMES:
            archive.write(folder / recording, f"wav/{recording}")
    return Path(name)


def test_list(folder):
    Path("list.txt").write_text(f"id1 {NAMES[5]}\nid0 {NAMES[2]}\nid1 {NAMES[5]}\n")
    Path("trials.txt").write_text(f"1 {NAMES[2]} {NAMES[3]}\n")
    command = f"pack corpus --source {folder} --list list.txt --trials trials.txt --verify"
    run_command(command)
    assert list(PackedSource(CORPUS).index.names) == [NAMES[5], NAMES[2], NAMES[3]]


MODES = {"tar": "w", "tar.gz": "w:gz", "tar.xz": "w:xz"}


def make_archive(kind, folder):
    path = f"a.{kind}"
    if kind == "zip":
        return make_zip(path, folder)
    with tarfile.open(path, MODES[kind]) as archive:
        archive.add(folder, arcname="corpus/dev")
    return path


@pytest.mark.parametrize("kind", ["zip", *MODES])
def test_archives(kind, folder, expected):
    archive = make_archive(kind, folder)
    names = StringTable.from_strings(NAMES[::-1])
    pack(open_inputs([archive], names), "by_list", num_threads=3)
    assert content_of("by_list") == expected
    depth = 1 if kind == "zip" else 2
    pack(open_inputs([archive], strip=depth), "by_depth")
    assert content_of("by_depth") == expected
    pack(open_inputs([archive]), "as_it_is")
    whole = PackedSource("as_it_is").index.names
    assert sorted(whole) == [("wav/" if kind == "zip" else "corpus/dev/") + name for name in NAMES]


def test_archives_in_parts(folder, expected):
    content = make_zip("whole.zip", folder).read_bytes()
    edges = [0, 3000, 6000, len(content)]
    parts = [Path(f"dev_part{letters}") for letters in ("aa", "ab", "ac")]
    for part, (start, end) in zip(parts, itertools.pairwise(edges), strict=True):
        part.write_bytes(content[start:end])
    write_audio(folder / "extra/one.wav", np.ones(500) / 4)
    with zipfile.ZipFile("test.zip", "w") as archive:
        archive.write(folder / "extra/one.wav", "extra/one.wav")
    names = StringTable.from_strings([*NAMES, "extra/one.wav"])
    pack(open_inputs([parts[1], "test.zip", parts[0], parts[2]], names), CORPUS)
    found = content_of(CORPUS)
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
def test_resuming(kind, folder, expected):
    path = folder if kind == "folder" else make_archive(kind, folder)
    with pytest.raises(RuntimeError):
        pack(failing(open_inputs([path], ALL)), CORPUS, num_threads=1)
    # A kill between two flushes leaves samples without a record, and half a record.
    for name in ("samples.npy", "journal.bin"):
        with (PARTIAL / name).open("ab") as file:
            file.write(b"rest!")
    summary = pack(open_inputs([path], ALL), CORPUS)
    assert summary.num_resumed == 7 and summary.num_utterances == 12
    assert content_of(CORPUS) == expected and verify(CORPUS) == []
    assert not PARTIAL.exists()
    assert {path.name for path in CORPUS.iterdir()} == {"corpus.json", "index.npz", "samples.npy"}
    for name in ("samples.npy", "index.npz"):
        is_equal = (CORPUS / name).read_bytes() == Path("expected", name).read_bytes()
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


def test_kill(folder, expected):
    journal = PARTIAL / "journal.bin"
    process = subprocess.Popen([sys.executable, "-c", SLOW_PACK, str(folder), str(CORPUS)])
    deadline = time.monotonic() + 60
    while not (journal.exists() and journal.stat().st_size >= 4 * packed_writer.RECORD.itemsize):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not CORPUS.exists()
    summary = pack(FolderInput(folder), CORPUS)
    assert 4 <= summary.num_resumed < 12
    assert content_of(CORPUS) == expected
    assert verify(CORPUS) == []


def test_another_list_starts_over(folder):
    with pytest.raises(RuntimeError):
        pack(failing(FolderInput(folder)), CORPUS)
    with pytest.raises(PackedError, match="different utterances, a different rate"):
        pack(FolderInput(folder), CORPUS, sample_rate=8000)
    with pytest.raises(PackedError, match="different utterances, a different rate"):
        pack(FolderInput(folder, SOME), CORPUS)
    os.truncate(PARTIAL / "samples.npy", 1000)
    with pytest.raises(PackedError, match=r"1000 bytes .* journal"):
        pack(FolderInput(folder), CORPUS)


def test_existing_corpus(folder):
    first = pack(FolderInput(folder), CORPUS)
    before = (CORPUS / "samples.npy").stat().st_mtime_ns
    again = pack(FolderInput(folder), CORPUS)
    assert (again.num_samples, again.num_resumed) == (first.num_samples, 12)
    assert (CORPUS / "samples.npy").stat().st_mtime_ns == before
    with pytest.raises(PackedError, match="exists with different utterances"):
        pack(FolderInput(folder, SOME), CORPUS)
    with pytest.raises(PackedError, match="is not a packed corpus"):
        pack(FolderInput(folder), folder)


@pytest.mark.parametrize("where", ["{}/corpus", "file://{}/corpus"])
@pytest.mark.parametrize("rate", [10, 1_000_000_000])
def test_impossible_rates(folder, tmp_path, capsys, where, rate):
    corpus = where.format(tmp_path)
    run_command(f"pack {corpus} --source {folder} --sample-rate {rate}", 1)
    assert f"{rate} Hz; expected 1000 to 768000 Hz" in capsys.readouterr().err
    assert not list(tmp_path.glob("corpus*"))


def test_archive_of_a_mac():
    with zipfile.ZipFile("people.zip", "w") as archive:
        write_audio("1.wav", np.ones(100) / 2)
        for name in ("people/Jose\u0301/1.wav", "people/b/1.wav"):
            archive.write("1.wav", name)
            archive.writestr(f"__MACOSX/{name.replace('/1', '/._1')}", b"\0\5\x16\7")
            archive.writestr(f"__MACOSX/{name}", b"\0\5\x16\7")
    inputs = open_inputs(["people.zip"])
    assert list(inputs.names) == ["people/Jose\u0301/1.wav", "people/b/1.wav"]
    wanted = StringTable.from_strings(["Jos\u00e9/1.wav", "b/1.wav"])
    pack(open_inputs(["people.zip"], wanted), CORPUS)
    assert list(PackedSource(CORPUS).index.names) == list(wanted)


def test_bad_files(folder):
    (folder / NAMES[3]).write_bytes(b"RIFF\0\0\0\0WAVE")
    (folder / NAMES[8]).unlink()
    with pytest.raises(AudioError, match=r"00003\.wav.*--skip-bad"):
        pack(FolderInput(folder, ALL), CORPUS)
    summary = pack(FolderInput(folder, ALL), CORPUS, skip_bad=True)
    assert (summary.num_utterances, summary.num_skipped, summary.num_resumed) == (10, 2, 3)
    skipped = (CORPUS / "skipped.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in skipped] == [NAMES[3], NAMES[8]]
    assert PackedSource(CORPUS).missing(ALL).tolist() == [3, 8]
    assert pack(FolderInput(folder, ALL), CORPUS).num_skipped == 2


def test_a_file_without_its_end_is_named(folder, caplog):
    file = folder / NAMES[2]
    file.write_bytes(file.read_bytes()[:1044])
    for source in (FolderInput(folder), open_inputs([make_zip("a.zip", folder)])):
        caplog.clear()
        pack(source, source.names[0])
        (warning,) = caplog.messages
        assert NAMES[2] in warning and "cut off" in warning
        assert len(PackedSource(source.names[0]).read(source.names[2])) == 500


@pytest.mark.parametrize(
    "name", ["../evil.wav", "a/../../evil.wav", "/evil.wav", "..\\evil.wav", "C:/evil.wav"]
)
def test_names_outside_the_folder(name, folder):
    content = (folder / NAMES[0]).read_bytes()
    with zipfile.ZipFile("a.zip", "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), content)
    with tarfile.open("a.tar", "w") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    for path in ("a.zip", "a.tar"):
        with pytest.raises(ArchiveError, match="refused"):
            open_inputs([path])
    with pytest.raises(AudioError, match="refused"):
        FolderInput(folder, StringTable.from_strings([name]))


def test_broken_archives(folder):
    path = make_zip("flipped.zip", folder)
    with pytest.raises(ArchiveError, match="twice"):
        open_inputs([path, make_zip("b.zip", folder)])
    for name, content in (("half.zip", path.read_bytes()[:9000]), ("text.zip", b"hello")):
        Path(name).write_bytes(content)
        with pytest.raises(ArchiveError, match=name):
            open_inputs([name])
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 255
    path.write_bytes(content)
    summary = pack(open_inputs([path], strip=1), CORPUS, skip_bad=True)
    assert (summary.num_utterances, summary.num_skipped) == (11, 1)
