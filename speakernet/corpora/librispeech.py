"""LibriSpeech: download, unpack, lists by its own parts (train-*, dev-*, test-*), balanced trials.

    speakernet prepare librispeech --save_path data --download --parts train-clean-100 dev-clean test-clean
    speakernet prepare librispeech --save_path data            lists only, of the parts that are there

Lists go to data/librispeech_lists, their paths start from data. A chapter counts as a session.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from speakernet.corpora.commands import (
    add_corpus_arguments,
    add_download_arguments,
    fetch,
    finish_corpus,
    list_options,
)
from speakernet.corpora.listing import prepare_corpus
from speakernet.corpora.summary import StepSummary
from speakernet.corpora.utterances import Row
from speakernet.corpora.walking import walk_files
from speakernet.files import exclusive

PARTS = (
    "train-clean-100",
    "train-clean-360",
    "train-other-500",
    "dev-clean",
    "dev-other",
    "test-clean",
    "test-other",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options of this part."""
    add_corpus_arguments(parser)
    parser.add_argument("--download", action="store_true", help="fetch and unpack what is not there")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=["train-clean-100", "dev-clean", "test-clean"],
        help="parts to download",
    )
    add_download_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Fetch what is missing, then write the lists."""
    options = list_options(arguments, "librispeech")
    with exclusive(options.root):
        summaries: list[StepSummary] = []
        if arguments.download:
            summaries += fetch("librispeech", arguments, files=[f"{part}.tar.gz" for part in arguments.parts])
        lists, summary = prepare_corpus(librispeech_rows(options.root), options, librispeech_part)
        return finish_corpus(lists, [*summaries, summary], options)


def librispeech_rows(root: Path) -> Iterator[Row]:
    """LibriSpeech/PART/SPEAKER/CHAPTER/*.flac; a chapter is a session, genders come from SPEAKERS.TXT.

    Raises:
        ValueError: there is no folder LibriSpeech.
    """
    corpus = root / "LibriSpeech"
    if not corpus.is_dir():
        raise ValueError(f"{root} holds no folder LibriSpeech; give the folder that holds it, or --download fetches it")
    genders = {}
    facts = corpus / "SPEAKERS.TXT"
    if facts.is_file():
        for line in facts.read_text(encoding="utf-8", errors="replace").splitlines():
            # ID | SEX | SUBSET | MINUTES | NAME; comments begin with a semicolon.
            fields = [field.strip() for field in line.split("|")]
            if len(fields) > 2 and not line.startswith(";"):
                genders[fields[0]] = fields[1]
    for name in walk_files(corpus, {".flac", ".wav"}):
        parts = name.split("/")
        # PART/SPEAKER/CHAPTER/FILE; READMEs and transcripts lie elsewhere.
        if len(parts) == 4:
            yield Row(parts[1], f"LibriSpeech/{name}", parts[2], genders.get(parts[1], ""))


def librispeech_part(name: str) -> str:
    """The part that LibriSpeech publishes a path in."""
    part = name.split("/")[1]
    if part.startswith("dev"):
        return "validation"
    return "test" if part.startswith("test") else "train"
