"""Lists as wespeaker's tools write them: `raw.list` (a JSON object a line) and `shard.list` (a tar archive a line)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speakernet.data.lists import (
    BYTE_ORDER_MARK,
    KALDI_ARCHIVE,
    ListError,
    ListFile,
    NameIndex,
    Recordings,
    StringTable,
    not_a_file,
)

RAW_LIST, SHARD_LIST = "raw.list", "shard.list"
RAW_FIELDS = ("key", "wav", "spk")
SHARD_SUFFIXES = (b".tar", b".tar.gz", b".tgz")
HEAD_BYTES = 65_536
SHOWN_CHARACTERS = 120  # of a malformed value


def list_kind(path: Path) -> str:
    """`RAW_LIST` or `SHARD_LIST` by the first line of a file, empty for anything else."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    first = head.removeprefix(BYTE_ORDER_MARK).lstrip().split(b"\n", 1)[0].strip()
    # Archives hold zero bytes from the start, text none.
    if b"\0" in head:
        return ""
    return RAW_LIST if first.startswith(b"{") else SHARD_LIST if first.lower().endswith(SHARD_SUFFIXES) else ""


def read_raw_list(path: Path) -> Recordings:
    """Names, files and speakers of a `raw.list`; files are absolute or from the working directory.

    Raises:
        ListError: empty, not UTF-8, a malformed line (named with its number), a key twice.
    """
    file = ListFile(path, None)
    columns: tuple[list[str], list[str], list[str]] = ([], [], [])
    for line, text in _lines(file):
        for column, value in zip(columns, _raw_row(file, line, text), strict=True):
            column.append(value)
    if not columns[0]:
        raise ListError(f"{path}: the list is empty; expected a JSON object with {', '.join(RAW_FIELDS)} a line")
    names, files, speakers = map(StringTable.from_strings, columns)
    NameIndex(names).refuse_repeated(path)
    return Recordings(names, files, speakers)


def read_shard_list(path: Path) -> list[Path]:
    """The archives of a `shard.list`, absolute or from the working directory.

    Raises:
        ListError: not UTF-8, an address in place of a path (named with its line).
    """
    file, found = ListFile(path, None), []
    for line, text in _lines(file):
        if "://" in text:
            file.refuse(line, f"{text[:SHOWN_CHARACTERS]!r} is an address; fetch the shard and name the file")
        found.append(Path(text))
    return found


def _lines(file: ListFile) -> Iterator[tuple[int, str]]:
    """Number and text of every line that is not blank."""
    for lines in file.blocks(tabs_only_where_present=False):
        for place, content in enumerate(lines.content.tobytes().split(b"\n")):
            if content.strip():
                yield lines.number(place), content.decode("utf-8").strip()


def _raw_row(file: ListFile, line: int, text: str) -> Iterator[str]:
    """key, wav and spk of a line, or the reason why it has none."""
    expected = ", ".join(RAW_FIELDS[:-1]) + f" and {RAW_FIELDS[-1]}"
    try:
        row: Any = json.loads(text)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        file.refuse(line, f"expected a JSON object with {expected}, found {text[:SHOWN_CHARACTERS]!r}")
        return
    if "vad" in row:
        file.refuse(line, "vad: pieces are not cut out here; let make_shard_list.py do it (--vad_file) and pack shards")
    if not set(RAW_FIELDS) <= set(row):
        file.refuse(line, f"expected {expected}, found {', '.join(map(str, row))}")
        return
    for field in RAW_FIELDS:
        value = row[field]
        if not _is_one_line(value):
            file.refuse(line, f"{field}: {repr(value)[:SHOWN_CHARACTERS]}; expected text of one line")
        elif field == "spk" and value.split() != [value]:
            file.refuse(line, f"{field}: {value[:SHOWN_CHARACTERS]!r}; expected one word")
        elif field == "wav" and (value.endswith("|") or KALDI_ARCHIVE.search(value.encode())):
            file.refuse(line, not_a_file(value))
        yield str(value)


def _is_one_line(value: Any) -> bool:
    # JSON can spell half of a surrogate pair, which no file name and no list can hold.
    is_text = isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)
    return is_text and bool(value.strip()) and len(value.splitlines()) == 1 and "\0" not in value
