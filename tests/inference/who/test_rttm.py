"""RTTM, CTM and UEM: names with spaces stay apart or are refused with their line."""

import itertools
from urllib.parse import unquote

import pytest

from speakernet.files import FileError
from speakernet.inference.who.conversation import Turn
from speakernet.inference.who.rttm import read_regions, read_turns, rttm_lines, rttm_name


def read(tmp_path, text, suffix=".rttm", reader=read_turns):
    path = tmp_path / f"m{suffix}"
    path.write_text(text)
    return reader(path)


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (
            ".rttm",
            "SPEAKER m 1 0 5 <NA> <NA> John Smith <NA> <NA>\nSPEAKER m 1 5 5 <NA> <NA> John Doe "
            "<NA> <NA>",
        ),
        (
            ".rttm",
            "SPEAKER m 1 0 5 <NA> <NA> John Smith <NA>\nSPEAKER m 1 5 5 <NA> <NA> John Doe 0.5",
        ),
        (
            ".rttm",
            "SPEAKER\tm\t1\t0\t5\t<NA>\t<NA>\tJohn Smith\nSPEAKER\tm\t1\t5\t5\t<NA>\t<NA>\tJohn "
            "Doe\t1\t1",
        ),
        (".ctm", "m 1 0 5 a 1.0 lex John Smith\nm 1 5 5 b NA lex John Doe"),
    ],
)
def test_speakers_with_spaces(tmp_path, suffix, text):
    (speakers,) = read(tmp_path, text, suffix).values()
    assert {name: turns.tolist() for name, turns in speakers.items()} == {
        "John Smith": [[0, 5]],
        "John Doe": [[5, 10]],
    }


def test_columns(tmp_path):
    # 8, 9 and 10 columns, a confidence, other types, comments, empty lines, Windows line ends.
    text = (
        ";; comment\r\nSPKR-INFO m 1 <NA> <NA> <NA> unknown a <NA>\r\n\r\nSPEAKER m 1 0 1 <NA> "
        "<NA> a\r\nSPEAKER m 1 1 1 x y a 0.5\r\nSPEAKER m 1 3 0.5 <NA> <NA> 7 <NA> <NA>\r\nSPEAKER "
        "m 1 4 0 <NA> <NA> b 3 2\r\n"
    )
    assert {name: turns.tolist() for name, turns in read(tmp_path, text)["m", "1"].items()} == {
        "a": [[0, 1], [1, 2]],
        "7": [[3, 3.5]],
    }


def test_recordings_with_spaces(tmp_path):
    turns = read(tmp_path, "SPEAKER\tcall 12\t1\t0\t5\t<NA>\t<NA>\tann\t<NA>\t<NA>\n")
    assert list(turns) == [("call 12", "1")]
    assert list(read(tmp_path, "call 12\t1\t0\t5\n", ".uem", read_regions)) == [("call 12", "1")]
    good = "SPEAKER m 1 0 5 <NA> <NA> ann <NA> <NA>\n"
    for name in ("call 12", "a b c", "1 2 3"):
        for tail in ("<NA> <NA>", "<NA>"):
            with pytest.raises(FileError, match="line 2"):
                read(tmp_path, f"{good}SPEAKER {name} 1 0.0 5.0 <NA> <NA> ann {tail}\n")
        with pytest.raises(FileError, match="line 2"):
            read(tmp_path, f"m 1 0 5 word 1.0 lex ann\n{name} 1 0.0 5.0 word 1.0 lex ann\n", ".ctm")
        with pytest.raises(FileError, match="line 2"):
            read(tmp_path, f"m 1 0 5\n{name} 1 0.0 5.0\n", ".uem", read_regions)


@pytest.mark.parametrize(
    "line",
    [
        "SPEAKER m 1 zero 1 <NA> <NA> a <NA> <NA>",
        "SPEAKER m 1 0 nan <NA> <NA> a <NA> <NA>",
        "SPEAKER m 1 -1 1 <NA> <NA> a <NA> <NA>",
        "SPEAKER m 1 0 -1 <NA> <NA> a <NA> <NA>",
        "SPEAKER m 1 0 1e999 <NA> <NA> a <NA> <NA>",
        "SPEAKER m 1 0 1 <NA>",
        "SPEAKER\tm\t1\t0\t1\t<NA>\t<NA>\t\t<NA>\t<NA>",
        "0.0 1.0 speaker",
        '{"turns": []}',
    ],
)
def test_bad_lines(tmp_path, line):
    with pytest.raises(FileError, match="line 2"):
        read(tmp_path, f"SPEAKER m 1 0 5 <NA> <NA> ann <NA> <NA>\n{line}\n")


def test_names_never_merge(tmp_path):
    names = [
        "Ann Lee",
        "Ann_Lee",
        "Ann  Lee",
        "Ann%5FLee",
        "Ann%20Lee",
        "Ann\u00a0Lee",
        "speaker 2",
        "speaker_2",
        "Zoë",
    ]
    for first, second in itertools.combinations(names, 2):
        assert rttm_name(first) != rttm_name(second)
    for name in names:
        assert (
            len(rttm_name(name).split()) == 1 and unquote(rttm_name(name).replace("_", " ")) == name
        )
    turns = [Turn(float(row), row + 0.5, name) for row, name in enumerate(names)]
    (speakers,) = read(tmp_path, "\n".join(rttm_lines("m", turns))).values()
    assert [unquote(word.replace("_", " ")) for word in speakers] == names
    assert [stretches.tolist() for stretches in speakers.values()] == [
        [[turn.start, turn.stop]] for turn in turns
    ]
