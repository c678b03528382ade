"""Common Voice, one language: a speaker-disjoint split and balanced trials from its validated clips.

    speakernet prepare common_voice --save_path cv-corpus-21.0/de --min_utterances 5

--save_path is the folder of one language (with clips/ and validated.tsv), unpacked by you: Common Voice is handed out
at https://commonvoice.mozilla.org/datasets only. Lists go to common_voice_lists in it; their paths start from it.
Clips are MP3: pack them (speakernet pack) to train fast. Speakers are known by browser, so some are several people.
"""

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

from speakernet.corpora.commands import add_corpus_arguments, finish_corpus, list_options
from speakernet.corpora.listing import prepare_corpus
from speakernet.corpora.utterances import Row
from speakernet.files import FileError, exclusive, open_text, reading

#: Common Voice names speakers by 128 hexadecimal digits; this many tell a million of them apart.
CLIENT_ID_LENGTH = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options of this part."""
    add_corpus_arguments(parser)
    parser.add_argument("--table", default="validated.tsv", help="table of the clips to take")


def run(arguments: argparse.Namespace) -> int:
    """Write the lists."""
    options = list_options(arguments, "common_voice")
    with exclusive(options.root):
        rows = at_least(common_voice_rows(options.root, arguments.table), options.min_utterances)
        lists, summary = prepare_corpus(rows, options)
        return finish_corpus(lists, [summary], options)


def common_voice_rows(root: Path, table: str) -> Iterator[Row]:
    """One language of Common Voice: clips/*.mp3, speakers by client_id from `validated.tsv` (or another table).

    Raises:
        ValueError: there is no such table, or two speakers share the first digits of their identity.
    """
    path = root / table
    if not path.is_file() or not (root / "clips").is_dir():
        raise ValueError(
            f"{root} holds no {table} beside a folder clips; give the folder of one language, as cv-corpus-21.0/en "
            "(Common Voice is handed out on request at https://commonvoice.mozilla.org/datasets)"
        )
    identities: dict[str, str] = {}
    with reading(path, "a table of Common Voice in UTF-8, with client_id and path"), open_text(path) as file:
        # Sentences hold quotation marks that open and never close.
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            identity = row["client_id"]
            speaker = identity[:CLIENT_ID_LENGTH]
            if identities.setdefault(speaker, identity) != identity:
                raise FileError(f"{path}: two speakers begin with {speaker}; they cannot be told apart")
            yield Row(speaker, f"clips/{row['path']}", "", row.get("gender") or "")


def at_least(rows: Iterator[Row], min_utterances: int) -> Iterator[Row]:
    """The rows of speakers that have at least so many."""
    listed = list(rows)
    counts: dict[str, int] = {}
    for row in listed:
        counts[row.speaker] = counts.get(row.speaker, 0) + 1
    return (row for row in listed if counts[row.speaker] >= min_utterances)
