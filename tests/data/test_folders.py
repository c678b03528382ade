"""The walk through folders: links, hidden files, what is left out; the other Unicode form."""

import unicodedata

import numpy as np
import pytest

from speakernet.data.audio import AudioError, write_audio
from speakernet.data.folders import LeftOut, walk_files, walk_recordings
from speakernet.data.lists import ListError, StringTable
from speakernet.data.opening import open_source
from speakernet.inference.recordings import audio_inputs


def touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")


def link(place, target):
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target, target_is_directory=True)


def test_links_are_followed_once(tmp_path):
    root, store = tmp_path / "root", tmp_path / "store"
    touch(root, "a/1.wav", "b/2.wav")
    touch(store, "x/3.wav", "y/4.wav")
    link(root / "c", store)
    # Back to a folder above, to a folder that is searched anyway, and through another link.
    link(root / "a" / "up", tmp_path)
    link(root / "d", root / "b")
    link(root / "e", store / "x")
    link(store / "y" / "loop", store)
    left_out = LeftOut()
    names = list(walk_files(root, {".wav"}, left_out))
    # `up` leads to the folder that contains `root` and `store`; what it reaches first has its name.
    assert names == ["a/1.wav", "a/up/store/x/3.wav", "a/up/store/y/4.wav", "b/2.wav"]
    assert sum(left_out.counts.values()) == 4
    (root / "a" / "up").unlink()
    assert list(walk_files(root, {".wav"})) == ["a/1.wav", "b/2.wav", "c/x/3.wav", "c/y/4.wav"]


def test_many_links_to_each_other_end(tmp_path):
    """Without a guard, the number of paths doubles with each folder."""
    for number in range(40):
        touch(tmp_path / f"outside{number}", "1.wav")
        for name in "ab":
            link(tmp_path / f"outside{number}" / name, tmp_path / f"outside{number + 1}")
    (tmp_path / "outside40").mkdir()
    link(tmp_path / "root" / "in", tmp_path / "outside0")
    assert len(list(walk_files(tmp_path / "root", {".wav"}))) == 40


def test_broken_links(tmp_path, caplog):
    caplog.set_level("INFO")
    link(tmp_path / "self", tmp_path / "self")
    link(tmp_path / "gone", tmp_path / "nothing")
    link(tmp_path / "gone.wav", tmp_path / "nothing.wav")
    # A recording that cannot be read is named by its reader.
    assert walk_recordings(tmp_path) == ["gone.wav"]
    assert "2 links to nothing (first: gone)" in caplog.text


def test_a_link_into_a_hidden_folder_is_followed(tmp_path):
    touch(tmp_path, ".store/rooms/1.wav")
    link(tmp_path / "rooms", tmp_path / ".store" / "rooms")
    assert walk_recordings(tmp_path) == ["rooms/1.wav"]


def test_what_is_left_out_is_counted_and_named(tmp_path, caplog):
    caplog.set_level("INFO")
    touch(tmp_path, "1.wav", "a/notes.txt", "a/2.TXT", "b/LICENSE")
    touch(tmp_path, "._1.wav", ".DS_Store", "__MACOSX/._1.wav", "a/__MACOSX/3.wav")
    assert walk_recordings(tmp_path) == ["1.wav"]
    assert "2 .txt (first: a/2.TXT), 1 without a suffix (first: b/LICENSE)" in caplog.text
    assert "._" not in caplog.text and "MACOSX" not in caplog.text


def test_a_folder_without_recordings_says_what_it_has(tmp_path):
    touch(tmp_path / "texts", "1.txt", "2.txt")
    with pytest.raises(AudioError, match=r"texts: .*2 \.txt .*1\.txt"):
        audio_inputs([str(tmp_path / "texts")], 16000)
    touch(tmp_path / "kaldi", "utt2spk")
    with pytest.raises(AudioError, match=r"utt2spk but no wav\.scp"):
        audio_inputs([str(tmp_path / "kaldi")], 16000)


NAME = "José/é ガ.wav"


@pytest.mark.parametrize(("in_list", "on_disk"), [("NFC", "NFD"), ("NFD", "NFC"), ("NFC", "NFC")])
def test_names_in_the_other_unicode_form(tmp_path, random, in_list, on_disk):
    root = tmp_path / "ä"
    sound = (0.1 * random.standard_normal(500)).astype(np.float32)
    write_audio(root / unicodedata.normalize(on_disk, NAME), sound, 16000)
    given = unicodedata.normalize(in_list, NAME)
    source, names = open_source(root), StringTable.from_strings([given, "José/2.wav", "plain.wav"])
    table = source.lookup_table(names)
    assert table.num_samples.tolist() == [500, 0, 0] and sorted(table.problems) == [1, 2]
    assert source.missing(names).tolist() == [1, 2]
    np.testing.assert_allclose(source.read(given), sound, atol=1e-4)
    out = np.zeros((1, 400), dtype=np.float32)
    assert source.rows(names, table).fill(np.zeros(1, np.int64), np.zeros(1, np.int64), out) == {}
    np.testing.assert_allclose(out[0], sound[:400], atol=1e-4)


def test_lists_of_files_in_the_other_unicode_form(tmp_path, random):
    write_audio(
        tmp_path / unicodedata.normalize("NFD", NAME), 0.1 * random.standard_normal(500), 16000
    )
    (tmp_path / "list.txt").write_text(f"{NAME}\nanna {NAME}\n", encoding="utf-8")
    _, names = audio_inputs([str(tmp_path / "list.txt")], 16000)
    assert list(names) == [str(tmp_path / unicodedata.normalize("NFD", NAME))]
    (tmp_path / "list.txt").write_text("anna a\\1.wav\n")
    with pytest.raises(ListError, match=r"line 1: .*backslashes"):
        audio_inputs([str(tmp_path / "list.txt")], 16000)
