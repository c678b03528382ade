"""Speakers in transcripts: each word and cue gets who speaks most in it, and nothing is half
labelled.
"""

import json

import pytest

from speakernet.files import FileError
from speakernet.inference.who.conversation import Turn
from speakernet.inference.who.transcripts import label_transcript, read_transcript

TURNS = [Turn(0.0, 2.0, "Ada"), Turn(2.5, 4.0, "Bo"), Turn(5.0, 6.0, "Ada")]


@pytest.fixture
def labelled(tmp_path):
    """Labels a transcript, given as the text of a .srt or of a JSON file."""

    def label(text, turns=TURNS):
        is_json = text[0] in "[{"
        path = tmp_path / ("a.json" if is_json else "a.srt")
        path.write_text(text)
        found = label_transcript(read_transcript(path), turns)
        return json.loads(found) if is_json else found

    return label


def speakers_of(elements):
    return [element["speaker"] for element in elements]


def test_subtitles(labelled):
    text = labelled(
        "1\r\n00:00:00,500 --> 00:00:01,000\r\nhello\r\n\r\n2\r\n00:00:03,000 --> "
        "00:00:03,500\r\nyes\r\n"
    )
    assert "Ada: hello" in text and "Bo: yes" in text and text.count("-->") == 2
    # Ada speaks 3 s in two turns, Bo 1.5 s in one.
    assert "Ada: all" in labelled("1\n00:00:00,000 --> 00:00:06,000\nall\n")
    # `,5` is half a second: 2.1 to 2.5 s is nearest to Bo, 2.1 to 2.05 to Ada.
    assert "Bo: short" in labelled("1\n00:00:02,4 --> 00:00:02,5\nshort\n")
    assert "nobody: x" in labelled("1\n00:00:00,000 --> 00:00:06,000\nx\n", [])


def test_words(labelled):
    words = """[{"word": "most", "start": 0.5, "end": 6.0},
    {"word": "pause", "start": 2.3, "end": 2.4}, {"word": "moment", "start": 3.0, "end": 3.0},
    {"word": "later", "start": 60, "end": 61}]"""
    assert speakers_of(labelled(words)) == ["Ada", "Bo", "Bo", "Ada"]
    assert speakers_of(labelled(words, [])) == [None] * 4
    assert labelled("[]") == []


def test_words_without_times(labelled):
    content = """{"segments": [{"start": 0, "end": 4, "words": [{"word": "1"},
    {"word": "a", "start": 0, "end": 1}, {"word": "2", "start": null, "end": null},
    {"word": "b", "start": 3, "end": 4}]}, {"start": 2.6, "end": 3, "words": [{"word": "3"}]}]}"""
    first, second = labelled(content)["segments"]
    assert speakers_of([first, second]) == ["Ada", "Bo"]
    assert speakers_of(first["words"]) == ["Ada", "Ada", "Ada", "Bo"]
    assert speakers_of(second["words"]) == ["Bo"]


WORDS = """[{"word": "hi", "start": 0.8, "end": 1.2}, {"word": "you", "start": 3.5, "end": 4.0}]"""
SEGMENT = """{"start": 0.0, "end": 3.0, "text": "hi you"}"""


@pytest.mark.parametrize("name", ["words", "word_segments"])
@pytest.mark.parametrize(
    ("segments", "speakers"), [("null", []), ("[]", []), (f"[{SEGMENT}]", ["Ada"])]
)
def test_every_list_is_labelled(labelled, name, segments, speakers):
    found = labelled(f'{{"segments": {segments}, "{name}": {WORDS}}}')
    assert speakers_of(found[name]) == ["Ada", "Bo"]
    assert speakers_of(found["segments"] or []) == speakers


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100000 + "]" * 100000,
        '[{"word": "a", "start": 2}]',
        '[{"word": "a", "start": 2, "end": 1}]',
        '[{"word": "a", "start": NaN, "end": 1}]',
        '[{"word": "a", "start": 1e999, "end": 1e999}]',
        '[{"word": "a"}]',
        '{"text": "hi"}',
        '{"segments": [3]}',
        '{"chunks": [{"timestamp": [0.8, 1.2], "text": "hi"}]}',
        "3",
        "",
    ],
)
def test_other_json(tmp_path, text):
    path = tmp_path / "words.json"
    path.write_text(text)
    with pytest.raises(FileError, match=r"words\.json"):
        read_transcript(path)


@pytest.mark.parametrize(
    "cue", ["hello", f"{'1' * 20}:00:00,000 --> {'1' * 20}:00:01,000\nhello", "00:01 --> 00:02\nhi"]
)
def test_other_subtitles(tmp_path, cue):
    path = tmp_path / "words.srt"
    path.write_text(f"1\n00:00:00,500 --> 00:00:01,000\nhello\n\n2\n{cue}\n")
    with pytest.raises(FileError, match=r"words\.srt.*block 2"):
        read_transcript(path)
