"""Common Voice, one language: make a speaker-disjoint split and balanced trials from its validated
clips.

    speakernet prepare common_voice --save_path cv-corpus-21.0/de --min_utterances 5

--save_path is the folder of one language (with clips/ and validated.tsv), which you download from
https://commonvoice.mozilla.org/datasets and unpack. Lists go to common_voice_lists in it, with
paths relative to it. Clips are MP3: pack them (speakernet pack) to train faster. The corpus
identifies a speaker by browser, so some speakers are several people.
"""

import argparse
import collections
import csv
from collections.abc import Iterator
from pathlib import Path

from speakernet.corpora.listing import CORPUS_ARGUMENTS, prepare_public
from speakernet.corpora.utterances import Row
from speakernet.files import FileError, open_text, reading

CLIENT_ID_LENGTH = 24
"""Common Voice identifies speakers by 128 hexadecimal digits; this many distinguish a million of
them."""

ARGUMENTS = CORPUS_ARGUMENTS | {
    "--table": {"default": "validated.tsv", "help": "table of the clips to use"}
}


def run(arguments: argparse.Namespace) -> int:
    def rows(root: Path) -> list[Row]:
        listed = list(common_voice_rows(root, arguments.table))
        # Rare speakers are left out of trials too: one with a single clip has no target trial.
        counts = collections.Counter(row.speaker for row in listed)
        return [row for row in listed if counts[row.speaker] >= arguments.min_utterances]

    return prepare_public("common_voice", arguments, rows)


def common_voice_rows(root: Path, table: str) -> Iterator[Row]:
    """clips/*.mp3 of one language, speakers by client_id from `validated.tsv` (or a different
    table).
    """
    path = root / table
    if not path.is_file() or not (root / "clips").is_dir():
        raise ValueError(
            f"{root} lacks {table} or a folder clips; give the folder of one language, such as "
            "cv-corpus-21.0/en (Common Voice is available on request at "
            "https://commonvoice.mozilla.org/datasets)"
        )
    identities: dict[str, str] = {}
    expected = "a table of Common Voice in UTF-8, with client_id and path"
    with reading(path, expected), open_text(path) as file:
        # Sentences contain unbalanced quotation marks.
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            identity = row["client_id"]
            speaker = identity[:CLIENT_ID_LENGTH]
            if identities.setdefault(speaker, identity) != identity:
                raise FileError(
                    f"{path}: the client_ids of two speakers start with {speaker}; expected unique "
                    "ones"
                )
            yield Row(speaker, f"clips/{row['path']}", gender=row.get("gender") or "")
