"""Packing data of wespeaker's users: raw.list, shards, Kaldi folders; hostile files are refused."""

import io
import json
import tarfile

import numpy as np
import pytest

from speakernet.corpora.archives import ArchiveError
from speakernet.corpora.pack_inputs import open_inputs
from speakernet.data.audio import AudioError, read_audio, write_audio
from speakernet.data.lists import ListError, StringTable, read_training_list
from speakernet.data.packed import PackedSource
from speakernet.data.packing import pack
from tests.commands import run_command

KEYS = [f"id{row // 3}/video/{row:05d}.wav" for row in range(7)]


@pytest.fixture
def audio(tmp_path, random, monkeypatch):
    """Key -> file, in the working directory."""
    monkeypatch.chdir(tmp_path)
    files = {}
    for row, key in enumerate(KEYS):
        files[key] = tmp_path / "wav" / f"{row}.wav"
        write_audio(files[key], 0.1 * random.standard_normal(1000 + 10 * row))
    return files


def raw_list(path, audio):
    """As tools/make_raw_list.py writes it; every other path is relative to the working
    directory.
    """
    rows = []
    for row, (key, file) in enumerate(audio.items()):
        wav = str(file) if row % 2 else f"wav/{file.name}"
        rows.append(json.dumps({"key": key, "wav": wav, "spk": key.split("/")[0]}) + "\n")
    path.write_text("".join(rows))
    return path


def add(archive, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def shards(root, audio, mode="w"):
    """Shards of three utterances and their list, as tools/make_shard_list.py writes them."""
    root.mkdir(exist_ok=True)
    paths = []
    for first in range(0, len(KEYS), 3):
        paths.append(root / f"shards_{first:09d}.tar")
        with tarfile.open(paths[-1], mode) as archive:
            for key in KEYS[first : first + 3]:
                add(archive, f"{key}.spk", key.split("/")[0].encode())
                add(archive, f"{key}.wav", audio[key].read_bytes())
    (root / "shard.list").write_text("".join(f"{path}\n" for path in paths))
    return root / "shard.list"


def web_dataset(path, audio):
    """A tar of WebDataset: the speaker in a JSON object beside each utterance."""
    with tarfile.open(path, "w") as archive:
        for key in KEYS:
            add(
                archive,
                f"{key}.json",
                json.dumps({"duration": 1.5, "speaker": key.split("/")[0]}).encode(),
            )
            add(archive, f"{key}.wav", audio[key].read_bytes())
    return path


def kaldi_folder(root, audio):
    root.mkdir(exist_ok=True)
    (root / "wav.scp").write_text("".join(f"{key} {file}\n" for key, file in audio.items()))
    (root / "utt2spk").write_text("".join(f"{key} {key.split('/')[0]}\n" for key in audio))
    return root


SOURCES = {
    "raw.list": lambda root, audio: raw_list(root / "raw.list", audio),
    "shard.list": lambda root, audio: shards(root / "shards", audio),
    "compressed shards": lambda root, audio: shards(root / "shards", audio, "w:gz"),
    "WebDataset": lambda root, audio: web_dataset(root / "train-0000.tar", audio),
    "Kaldi folder": lambda root, audio: kaldi_folder(root / "kaldi", audio),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_packing(kind, audio, tmp_path):
    source = SOURCES[kind](tmp_path, audio)
    corpus = tmp_path / "corpus"
    listed = tmp_path / "train.txt"
    command = f"pack {corpus} --source {source} --write-list {listed} --verify"
    run_command(command)
    packed = PackedSource(corpus)
    assert list(packed.index.names) == KEYS
    for key, file in audio.items():
        np.testing.assert_array_equal(packed.read(key), read_audio(file))
    found = read_training_list(listed)
    assert list(found.paths) == KEYS
    assert [found.speakers[label] for label in found.labels] == [key.split("/")[0] for key in KEYS]
    # A list selects utterances.
    pack(open_inputs([source], StringTable.from_strings([KEYS[5], KEYS[1]])), tmp_path / "some")
    assert sorted(PackedSource(tmp_path / "some").index.names) == [KEYS[1], KEYS[5]]
    with pytest.raises(AudioError, match=r"id9/absent: "):
        pack(
            open_inputs([source], StringTable.from_strings([KEYS[0], "id9/absent"])),
            tmp_path / "absent",
        )


def test_written_list_replaces_nothing_else(audio, tmp_path):
    def pack_again(status=0, corpus="corpus", listed="train.txt", more=""):
        run_command(f"pack {corpus} --source raw.list --write-list {listed} {more}", status)

    raw_list(tmp_path / "raw.list", audio)
    listed = tmp_path / "train.txt"
    pack_again()
    written = listed.read_text()
    pack_again()
    for content in (written.splitlines()[0] + "\n", "notes of mine\n"):
        listed.write_text(content)
        pack_again(1)
        assert listed.read_text() == content
    # Refused before hours of packing.
    pack_again(1, "other")
    assert not (tmp_path / "other").exists()
    # An input.
    pack_again(1, listed="raw.list", more="--force")
    pack_again(more="--force")
    assert listed.read_text() == written


GOOD = '{"key": "a", "wav": "a.wav", "spk": "s"}'


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"key": "b", "wav": "sox b.wav -t wav - |", "spk": "s"}', "line 2: wav: .* is a command"),
        ('{"key": "b", "wav": "b.wav"}', "line 2: expected"),
        (
            '{"key": "b", "wav": "b.wav", "spk": "s", "vad": [[0, 1]]}',
            "line 2: vad: .* make_shard_list",
        ),
        ('{"key": "b\\nc", "wav": "b.wav", "spk": "s"}', "line 2: key"),
        ('{"key": "b", "wav": "b.wav", "spk": "two words"}', "line 2: spk"),
        ('{"key": "b", "wav": "b\\u0000.wav", "spk": "s"}', "line 2: wav"),
        ('{"key": "b", "wav": "b.wav"', "line 2: expected a JSON object"),
        ("[" * 60_000, "line 2: expected a JSON object"),
        (GOOD, "'a' appears twice"),
    ],
)
def test_bad_raw_lists(tmp_path, row, message):
    (tmp_path / "raw.list").write_text(f"{GOOD}\n{row}\n")
    with pytest.raises(ListError, match=message):
        open_inputs([tmp_path / "raw.list"])


def test_bad_shard_lists(audio, tmp_path):
    listed = shards(tmp_path / "shards", audio)
    listed.write_text(listed.read_text() + "https://host/shards_9.tar\n")
    with pytest.raises(
        ListError, match=r"shard\.list, line 4: 'https://host/shards_9\.tar' is an address"
    ):
        open_inputs([listed])
    listed.write_text(f"{tmp_path}/absent.tar\n")
    with pytest.raises(AudioError, match=r"absent\.tar: no such folder or archive"):
        open_inputs([listed])
    with pytest.raises(AudioError, match="expected one folder, one list"):
        open_inputs(
            [raw_list(tmp_path / "raw.list", audio), tmp_path / "shards" / "shards_000000000.tar"]
        )


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"../a.spk": b"s", "../a.wav": b"x"}, "refused"),
        ({"a.spk": b"s", "b.wav": b"x"}, r"b\.wav: no b\.spk in the shard"),
        ({"a.spk": b"two words", "a.wav": b"x"}, r"a\.spk: .*expected one word"),
        ({"a.spk": b"s" * 10_000_000, "a.wav": b"x"}, r"a\.spk: .*expected one word"),
        ({"a.spk": b"s", "a.wav": b"x", "a.flac": b"x"}, "'a' occurs twice"),
    ],
)
def test_bad_shards(tmp_path, members, message):
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        for name, content in members.items():
            add(archive, name, content)
    with pytest.raises(ArchiveError, match=message):
        open_inputs([tmp_path / "shard.tar"])
    assert not (tmp_path.parent / "a.wav").exists()
