"""VCTK 0.92: download, unpack, make a speaker-disjoint split and balanced trials.

    speakernet prepare vctk --save_path data --download
    speakernet prepare vctk --save_path data            lists only

Lists go to data/vctk_lists, with paths relative to data. Files are 48 kHz: pack them (speakernet
pack) to train faster. Every speaker was recorded in one session, so error rates are optimistic.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from speakernet.corpora.listing import PUBLIC_ARGUMENTS, prepare_public
from speakernet.corpora.utterances import Row, read_genders
from speakernet.data.folders import walk_files

AUDIO = "wav48_silence_trimmed"

ARGUMENTS = PUBLIC_ARGUMENTS | {
    "--microphone": {
        "choices": ("mic1", "mic2"),
        "default": "mic1",
        "help": "which of the two recordings to use",
    }
}


def run(arguments: argparse.Namespace) -> int:
    return prepare_public("vctk", arguments, lambda root: vctk_rows(root, arguments.microphone))


def vctk_rows(root: Path, microphone: str) -> Iterator[Row]:
    """wav48_silence_trimmed/SPEAKER/SPEAKER_TEXT_MIC.flac of one microphone."""
    corpus = root / "VCTK-Corpus-0.92"
    if not corpus.is_dir():
        corpus = root
    if not (corpus / AUDIO).is_dir():
        raise ValueError(f"{root} has no folder {AUDIO} (VCTK 0.92); fetch it with --download")
    # ID AGE GENDER ACCENTS REGION
    genders = read_genders(corpus / "speaker-info.txt", 2)
    for name in walk_files(corpus / AUDIO, {".flac", ".wav"}):
        speaker = name.split("/")[0]
        # p280 and p315 have only the first microphone; s5 has no recordings of the second.
        if "/" in name and Path(name).stem.endswith(f"_{microphone}"):
            path = (corpus / AUDIO / name).relative_to(root).as_posix()
            yield Row(speaker, path, "", genders.get(speaker, ""))
