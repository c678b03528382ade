"""Lists: every form, refusals and their messages; blocks do not change the result."""

from pathlib import Path

import numpy as np
import pytest

from speakernet.data.lists import (
    ListError,
    StringTable,
    normal_names,
    read_training_list,
    read_trials,
    repeated_rows,
    write_training_list,
    write_trials,
)
from speakernet.data.lookup import map_training_list

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def write(content):
    Path("list.txt").write_bytes(content.encode() if isinstance(content, str) else content)
    return "list.txt"


def test_training_list():
    path = write("\ufeffbea  b/1 with space.wav \r\n\n  al\ta/1.wav\nbea b/2.wav\ncé c/é.wav")
    found = read_training_list(path)
    assert list(found.paths) == ["b/1 with space.wav", "a/1.wav", "b/2.wav", "c/é.wav"]
    assert list(found.speakers) == ["al", "bea", "cé"]
    assert found.labels.tolist() == [1, 0, 1, 2]
    assert found.labels.dtype == np.int32


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a 1.wav\nb\nc 2.wav\n", r"line 2: found 'b'; expected 'speaker path'"),
        ("", "the list is empty"),
        (b"a 1.wav\nb \x00.wav\n", "line 2: not text"),
        (b"RIFF\x24\x00\x00\x00WAVE\n", "is not a text file"),
        ("x" * 300 + " a.wav\n", "speaker name of 300 bytes"),
        (
            '{"key": "u", "wav": "a.wav", "spk": "a"}\n',
            r"wespeaker's raw\.list.*pack .*--source raw\.list",
        ),
        ('{"audio_filepath": "a.wav", "label": "a"}\n', r"--csv"),
        ('{\n "u": {"wav": "a.wav", "spk_id": "a"}\n}\n', r"--csv"),
        ("ID,duration,wav,start,stop,spk_id\nu,1.0,a.wav,0,1,a\n", r"headings.*--csv"),
    ],
)
def test_bad_training_lists(content, message):
    with pytest.raises(ListError, match=message):
        read_training_list(write(content))


def test_malformed_rows_are_collected():
    rows = b"a 1.wav\nlonely\n\nb \xff.wav\n" + b"x" * 300 + b" 2.wav\nb 2.wav"
    malformed = []
    found = read_training_list(write(rows), malformed)
    assert list(found.paths) == ["1.wav", "2.wav"] and found.labels.tolist() == [0, 1]
    assert len(malformed) == 3
    assert [sentence.split(":")[0] for sentence in malformed] == ["line 2", "line 4", "line 5"]


def test_forms_of_trials():
    found = read_trials(write("1 a b\n0 a c\n\n0 c b\n"))
    assert list(found.names) == ["a", "b", "c"]
    columns = np.stack([found.enrol, found.test, found.labels])
    assert columns.tolist() == [[0, 0, 2], [1, 2, 1], [1, 0, 0]]
    kaldi = read_trials(write("a b target\na c nontarget\n"))
    assert kaldi.labels.tolist() == [1, 0]
    pairs = read_trials(write("a b\nb c\n"))
    assert pairs.labels is None and len(pairs) == 2
    tabs = read_trials(write("1\tmy file.wav\tother file.wav\n0\tmy file.wav\tc\n"))
    assert list(tabs.names) == ["my file.wav", "other file.wav", "c"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1 a b\n2 a b\n", "line 2: found .*; expected '1 enrol test' or '0 enrol test'"),
        ("a b target\na b maybe\n", "line 2: found .*; expected 'enrol test target'"),
        ("a b\na\n", "line 2: found .*; expected 'enrol test'"),
        ("a b c d\n", "line 1: found .*; expected '1 enrol test'"),
        ("\t1\t \tb\n", r"line 1: found .*; expected '1 enrol test'"),
        ("a.wav*b.wav 1\na.wav*c.wav 0\n", r"line 1: .*ESPnet.*label enrol test"),
        ("", "empty"),
    ],
)
def test_bad_trials(content, message):
    with pytest.raises(ListError, match=message):
        read_trials(write(content))


@pytest.mark.parametrize("read", [read_training_list, read_trials])
def test_endless_line(read):
    for tail in ("", "\na b\n"):
        path = write("a b\na " + "x" * 70_000 + tail)
        with pytest.raises(ListError, match="line 2: longer than 65,536 bytes; expected "):
            read(path, [])


def test_written_lists():
    write_training_list("train.txt", [("b", "b/1 x.wav"), ("a", "a/1.wav")])
    assert Path("train.txt").read_text() == "b b/1 x.wav\na a/1.wav\n"
    write_trials("trials.txt", [(1, "a x", "b"), (0, "b", "c")])
    assert Path("trials.txt").read_text() == "1\ta x\tb\n0 b c\n"
    assert list(read_trials("trials.txt").names) == ["a x", "b", "c"]
    with pytest.raises(ListError):
        write_training_list("bad.txt", [("two words", "a.wav")])
    assert not Path("bad.txt").exists()
    with pytest.raises(ListError):
        write_trials("bad.txt", [(1, "a\tb", "c")])


def test_names_in_one_form():
    plain = StringTable.from_strings(["a/1.wav", "a/b./1.wav"])
    assert normal_names(plain).equals(plain) and len(repeated_rows(plain)) == 0
    names = StringTable.from_strings(
        ["é/1.wav", "./é//1.wav", "e\u0301/1.wav", "/a.wav", "a.wav", "a/../a.wav"]
    )
    assert list(normal_names(names)) == [*["é/1.wav"] * 3, "/a.wav", "a.wav", "a/../a.wav"]
    assert repeated_rows(names).tolist() == [1, 2]


def test_malformed_trials():
    for form, (yes, no) in {"{2} {0} {1}": "10", "{0} {1} {2}": ("target", "nontarget")}.items():
        rows = [
            "nothing here at all",
            form.format("a", "b", yes),
            "a b",
            form.format("b", "c", "2"),
        ]
        rows += [form.format("b", "c", no), "a", ""]
        notes = []
        trials = read_trials(write("\n".join(rows)), notes)
        assert trials.labels.tolist() == [1, 0]
        assert list(trials.names) == ["a", "b", "c"] and trials.enrol.tolist() == [0, 1]
        assert [note.split(":")[0] for note in notes] == ["line 1", "line 3", "line 4", "line 6"]


def test_cache_of_a_long_list(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEAKERNET_CACHE", str(tmp_path / "cache"))
    for text in ("b b/1.wav\na a/1 1.wav\nb b/2.wav\n", "c c/1.wav\n"):
        path = write(text)
        plain = read_training_list(path)
        kept = map_training_list(path)
        again = map_training_list(path)
        for other in (kept, again):
            assert other.paths.equals(plain.paths) and other.speakers.equals(plain.speakers)
            assert other.labels.tolist() == plain.labels.tolist() and other.sha256 == plain.sha256
            assert isinstance(other.labels.base, np.memmap) and other.labels.base.mode == "c"
    assert len(list((tmp_path / "cache" / "tables").iterdir())) == 2
