"""Tables that users bring as CSV, with a column `path`: speakers of utterances, and facts about them."""

import csv
from collections.abc import Sequence
from pathlib import Path

from speakernet.files import FileError, open_text, reading


def read_csv(path: str | Path, needed: Sequence[str]) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of a CSV file with a line of headings.

    Raises:
        ValueError: not such a file, a column that is needed is missing, or a row of another length than the headings
            (named with its line).
    """
    expected = f"a CSV table in UTF-8 with the columns {', '.join(needed)}"
    with reading(path, expected), open_text(path) as file:
        reader = csv.DictReader(file)
        columns = list(reader.fieldnames or [])
        missing = [name for name in needed if name not in columns]
        if missing:
            raise FileError(f"{path}: no column {missing[0]!r}; its columns are {', '.join(columns)[:500] or 'none'}")
        rows = []
        for row in reader:
            # Under None stands what is too much, and None stands for what is missing.
            if None in row or None in row.values():
                raise FileError(
                    f"{path}, line {reader.line_num}: another number of values than the {len(columns)} columns"
                )
            rows.append(row)
    return columns, rows
