"""LibriSpeech: download, unpack, write lists for its own splits (train-*, dev-*, test-*) and
balanced trials.

    speakernet prepare librispeech --save_path data --download --parts train-clean-100 dev-clean
    speakernet prepare librispeech --save_path data            lists only, of the archives on disk

Lists go to data/librispeech_lists, with paths relative to data. A chapter counts as a session.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from speakernet.corpora.listing import PUBLIC_ARGUMENTS, prepare_public
from speakernet.corpora.utterances import Row, read_genders, rows_of_corpus

PARTS = (
    "train-clean-100",
    "train-clean-360",
    "train-other-500",
    "dev-clean",
    "dev-other",
    "test-clean",
    "test-other",
)
#: PART/SPEAKER/CHAPTER/FILE; a chapter is a session.
RECORDING = r"^[^/]+/(?P<speaker>[^/]+)/(?P<session>[^/]+)/[^/]+$"
SPLITS = {"dev": "validation", "test": "test", "train": "train"}

ARGUMENTS = PUBLIC_ARGUMENTS | {
    "--parts": {
        "nargs": "+",
        "choices": PARTS,
        # 7 GB instead of 61.
        "default": ["train-clean-100", "dev-clean", "test-clean"],
        "help": "archives to download",
    }
}


def run(arguments: argparse.Namespace) -> int:
    archives = [f"{part}.tar.gz" for part in arguments.parts]
    return prepare_public(
        "librispeech", arguments, librispeech_rows, split_of=librispeech_split, archives=archives
    )


def librispeech_rows(root: Path) -> Iterator[Row]:
    """The recordings of all parts; READMEs and transcripts are elsewhere."""
    corpus = root / "LibriSpeech"
    if not corpus.is_dir():
        raise ValueError(
            f"{root} has no folder LibriSpeech; give its parent folder, or fetch it with --download"
        )
    # ID | SEX | SUBSET | MINUTES | NAME
    genders = read_genders(corpus / "SPEAKERS.TXT", 1, "|")
    return rows_of_corpus(root, "LibriSpeech", RECORDING, genders)


def librispeech_split(name: str) -> str:
    """The published split of a path LibriSpeech/PART/…; PART begins with its name."""
    return SPLITS[name.split("/")[1].split("-")[0]]
