"""LibriSpeech: download, unpack, write lists for its own splits (train-*, dev-*, test-*) and
balanced trials.

    speakernet prepare librispeech --save_path data --download --parts train-clean-100 dev-clean
    test-clean speakernet prepare librispeech --save_path data            lists only, of the
    archives on disk

Lists go to data/librispeech_lists, with paths relative to data. A chapter counts as a session.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from speakernet.corpora.listing import CORPUS_ARGUMENTS, DOWNLOAD_ARGUMENTS, prepare_public
from speakernet.corpora.utterances import Row
from speakernet.data.folders import walk_files

PARTS = (
    "train-clean-100",
    "train-clean-360",
    "train-other-500",
    "dev-clean",
    "dev-other",
    "test-clean",
    "test-other",
)


ARGUMENTS = {
    **CORPUS_ARGUMENTS,
    "--download": {"action": "store_true", "help": "fetch and unpack what is missing"},
    "--parts": {
        "nargs": "+",
        "choices": PARTS,
        "default": ["train-clean-100", "dev-clean", "test-clean"],
        "help": "archives to download",
    },
    **DOWNLOAD_ARGUMENTS,
}


def run(arguments: argparse.Namespace) -> int:
    files = [f"{part}.tar.gz" for part in arguments.parts]
    return prepare_public(
        "librispeech", arguments, librispeech_rows, split_of=librispeech_split, files=files
    )


def librispeech_rows(root: Path) -> Iterator[Row]:
    """LibriSpeech/PART/SPEAKER/CHAPTER/*.flac; a chapter is a session, genders come from
    SPEAKERS.TXT.
    """
    corpus = root / "LibriSpeech"
    if not corpus.is_dir():
        raise ValueError(
            f"{root} has no folder LibriSpeech; give its parent folder, or fetch it with --download"
        )
    facts = corpus / "SPEAKERS.TXT"
    lines = (
        facts.read_text(encoding="utf-8", errors="replace").splitlines() if facts.is_file() else []
    )
    # ID | SEX | SUBSET | MINUTES | NAME; comments begin with a semicolon.
    rows = (
        [field.strip() for field in line.split("|")] for line in lines if not line.startswith(";")
    )
    genders = {row[0]: row[1] for row in rows if len(row) > 2}
    for name in walk_files(corpus, {".flac", ".wav"}):
        folders = name.split("/")
        # PART/SPEAKER/CHAPTER/FILE; READMEs and transcripts are elsewhere.
        if len(folders) == 4:
            yield Row(folders[1], f"LibriSpeech/{name}", folders[2], genders.get(folders[1], ""))


def librispeech_split(name: str) -> str:
    """The published split of a path."""
    return {"dev": "validation", "test": "test"}.get(name.split("/")[1].split("-")[0], "train")
