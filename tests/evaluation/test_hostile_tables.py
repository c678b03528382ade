"""Tables and scores that people and other tools write: an error with file and line, or what they say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speakernet.corpora.utterances import read_table
from speakernet.evaluation.files import read_scores
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
