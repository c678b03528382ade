"""The walk through folders: links, hidden files, what is left out; the other Unicode form."""

import unicodedata
from pathlib import Path

import numpy as np
import pytest

from speakernet.data.audio import AudioError, write_audio
from speakernet.data.folders import LeftOut, walk_files, walk_recordings
from speakernet.data.lists import ListError, StringTable
from speakernet.data.opening import open_source
from speakernet.inference.recordings import audio_inputs

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def touch(root, *names):
    for name in names:
        path = Path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def link(place, target):
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    Path(place).symlink_to(Path(target).absolute(), target_is_directory=True)


def test_links_are_followed_once():
    touch("root", "a/1.wav", "b/2.wav")
    touch("store", "x/3.wav", "y/4.wav")
    link("root/c", "store")
    # Back to a folder above, to a folder that is searched anyway, and through another link.
    link("root/a/up", ".")
    link("root/d", "root/b")
    link("root/e", "store/x")
    link("store/y/loop", "store")
    left_out = LeftOut()
    names = list(walk_files("root", {".wav"}, left_out))
    # `up` leads to the folder that contains `root` and `store`; what it reaches first has its name.
    assert names == ["a/1.wav", "a/up/store/x/3.wav", "a/up/store/y/4.wav", "b/2.wav"]
    assert sum(left_out.counts.values()) == 4
    Path("root/a/up").unlink()
    assert list(walk_files("root", {".wav"})) == ["a/1.wav", "b/2.wav", "c/x/3.wav", "c/y/4.wav"]


def test_many_links_to_each_other_end():
    """Without a guard, the number of paths doubles with each folder."""
    for number in range(40):
        touch(f"outside{number}", "1.wav")
        for name in "ab":
            link(f"outside{number}/{name}", f"outside{number + 1}")
    Path("outside40").mkdir()
    link("root/in", "outside0")
    assert len(list(walk_files("root", {".wav"}))) == 40


def test_broken_links(caplog):
    caplog.set_level("INFO")
    link("self", "self")
    link("gone", "nothing")
    link("gone.wav", "nothing.wav")
    # A recording that cannot be read is named by its reader.
    assert walk_recordings(".") == ["gone.wav"]
    assert "2 links to nothing (first: gone)" in caplog.text


def test_a_link_into_a_hidden_folder_is_followed():
    touch(".", ".store/rooms/1.wav")
    link("rooms", ".store/rooms")
    assert walk_recordings(".") == ["rooms/1.wav"]


def test_what_is_left_out_is_counted_and_named(caplog):
    caplog.set_level("INFO")
    touch(".", "1.wav", "a/notes.txt", "a/2.TXT", "b/LICENSE")
    touch(".", "._1.wav", ".DS_Store", "__MACOSX/._1.wav", "a/__MACOSX/3.wav")
    assert walk_recordings(".") == ["1.wav"]
    assert "2 .txt (first: a/2.TXT), 1 without a suffix (first: b/LICENSE)" in caplog.text
    assert "._" not in caplog.text and "MACOSX" not in caplog.text


def test_a_folder_without_recordings_says_what_it_has():
    touch("texts", "1.txt", "2.txt")
    with pytest.raises(AudioError, match=r"texts: .*2 \.txt .*1\.txt"):
        audio_inputs(["texts"], 16000)
    touch("kaldi", "utt2spk")
    with pytest.raises(AudioError, match=r"utt2spk but no wav\.scp"):
        audio_inputs(["kaldi"], 16000)


NAME = "José/é ガ.wav"


@pytest.mark.parametrize(("in_list", "on_disk"), [("NFC", "NFD"), ("NFD", "NFC"), ("NFC", "NFC")])
def test_names_in_the_other_unicode_form(random, in_list, on_disk):
    sound = (0.1 * random.standard_normal(500)).astype(np.float32)
    write_audio("ä/" + unicodedata.normalize(on_disk, NAME), sound)
    given = unicodedata.normalize(in_list, NAME)
    source, names = open_source("ä"), StringTable.from_strings([given, "José/2.wav", "plain.wav"])
    table = source.lookup_table(names)
    assert table.num_samples.tolist() == [500, 0, 0] and sorted(table.problems) == [1, 2]
    assert source.missing(names).tolist() == [1, 2]
    np.testing.assert_allclose(source.read(given), sound, atol=1e-4)
    out = np.zeros((1, 400), dtype=np.float32)
    assert source.rows(names, table).fill(np.zeros(1, np.int64), np.zeros(1, np.int64), out) == {}
    np.testing.assert_allclose(out[0], sound[:400], atol=1e-4)


def test_lists_of_files_in_the_other_unicode_form(random):
    write_audio(unicodedata.normalize("NFD", NAME), 0.1 * random.standard_normal(500))
    Path("list.txt").write_text(f"{NAME}\nanna {NAME}\n", encoding="utf-8")
    _, names = audio_inputs(["list.txt"], 16000)
    assert list(names) == [unicodedata.normalize("NFD", NAME)]
    Path("list.txt").write_text("anna a\\1.wav\n")
    with pytest.raises(ListError, match=r"line 1: .*backslashes"):
        audio_inputs(["list.txt"], 16000)
