"""VCTK 0.92: download, unpack, a speaker-disjoint split, balanced trials.

    speakernet prepare vctk --save_path data --download
    speakernet prepare vctk --save_path data            lists only

Lists go to data/vctk_lists, their paths start from data. Files are 48 kHz: pack them (speakernet pack) to train fast.
Every speaker was recorded in one session, so its error rates are flattered by the room.
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
from speakernet.corpora.utterances import Row
from speakernet.corpora.walking import walk_files
from speakernet.files import exclusive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options of this part."""
    add_corpus_arguments(parser)
    parser.add_argument("--download", action="store_true", help="fetch and unpack it unless it is there")
    parser.add_argument("--microphone", choices=("mic1", "mic2"), default="mic1", help="which of the two recordings")
    add_download_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Fetch what is missing, then write the lists."""
    options = list_options(arguments, "vctk")
    with exclusive(options.root):
        summaries = fetch("vctk", arguments) if arguments.download else []
        lists, summary = prepare_corpus(vctk_rows(options.root, arguments.microphone), options)
        return finish_corpus(lists, [*summaries, summary], options)


def vctk_rows(root: Path, microphone: str) -> Iterator[Row]:
    """VCTK 0.92: wav48_silence_trimmed/SPEAKER/SPEAKER_TEXT_MIC.flac of one microphone, genders from speaker-info.txt.

    Raises:
        ValueError: there is no such folder.
    """
    found = [path for path in (root, root / "VCTK-Corpus-0.92") if (path / "wav48_silence_trimmed").is_dir()]
    if not found:
        raise ValueError(f"{root} holds no folder wav48_silence_trimmed (VCTK 0.92); --download fetches it")
    corpus = found[0]
    prefix = "" if corpus == root else f"{corpus.name}/"
    genders = {}
    facts = corpus / "speaker-info.txt"
    if facts.is_file():
        # ID AGE GENDER ACCENTS REGION; the first line names them.
        for line in facts.read_text(encoding="utf-8", errors="replace").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 2:
                genders[fields[0]] = fields[2]
    for name in walk_files(corpus / "wav48_silence_trimmed", {".flac", ".wav"}):
        speaker = name.split("/")[0]
        # p280 and p315 have a first microphone only; s5 none of the second.
        if "/" in name and name.rsplit(".", 1)[0].endswith(f"_{microphone}"):
            yield Row(speaker, f"{prefix}wav48_silence_trimmed/{name}", "", genders.get(speaker, ""))
