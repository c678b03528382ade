"""Tables and scores that people and other tools write: an error with file and line, or what they say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speakernet.corpora.utterances import read_table
from speakernet.data.lists import read_trials
from speakernet.evaluation.files import read_scores, scores_for
from speakernet.evaluation.slices import read_metadata
from speakernet.evaluation.speakers import read_speaker_table

READERS: dict[str, Callable[[Path], Any]] = {
    "speakers": read_speaker_table,
    "metadata": lambda path: read_metadata(path, ["a"]),
    "utterances": lambda path: list(read_table(path)),
    "scores": read_scores,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"path,speaker\ncaf\xe9,x\n", r"not UTF-8|expected 'enrol"),
        (b"path,speaker\na," + b"x" * 200_000 + b"\n", r"field larger|longer than|expected 'enrol"),
        (b"", "no column|no scores"),
        (b"\x00" * 50, "NUL|no column|not text|expected 'enrol|line contains|not UTF-8"),
    ],
)
def test_a_table_that_is_none_is_an_error_that_names_it(reader, content, message, tmp_path):
    path = tmp_path / "my.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"my\.csv.*({message})"):
        READERS[reader](path)


@pytest.mark.parametrize("reader", ["speakers", "metadata"])
def test_rows_of_another_length_are_named(reader, tmp_path):
    path = tmp_path / "my.csv"
    for row in ("a", "a,b,c"):
        path.write_text(f"path,speaker\na,b\n{row}\n")
        with pytest.raises(ValueError, match=r"my\.csv, line 3: "):
            READERS[reader](path)


def test_infinite_and_huge_scores_are_refused_with_their_lines(tmp_path):
    (tmp_path / "trials.txt").write_text("1 a b\n0 a c\n0 b c\n")
    (tmp_path / "scores.txt").write_text("a b 1.0\na c inf\nb c -1e308\n")
    with pytest.raises(ValueError, match=r"scores\.txt: 2 of 3 scores .*: lines 2, 3"):
        scores_for(read_trials(tmp_path / "trials.txt"), tmp_path / "scores.txt")


def test_lines_of_windows_are_lines(tmp_path):
    for number, end in enumerate(("\r\n", "\n")):
        path = tmp_path / f"{number}.txt"
        path.write_bytes(f"\ufeffa b 1{end}{end}a c 2{end}".encode())
        trials, scores = read_scores(path)
        assert list(trials.names) == ["a", "b", "c"] and np.array_equal(scores, [1.0, 2.0])
