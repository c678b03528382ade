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
from speakernet.corpora.utterances import Row, read_genders, rows_of_corpus

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
    """The recordings of one microphone: p280 and p315 lack the second, and s5 does too."""
    folder = f"VCTK-Corpus-0.92/{AUDIO}"
    if not (root / folder).is_dir():
        # The user may also give the folder of the corpus itself.
        folder = AUDIO
    audio = root / folder
    if not audio.is_dir():
        raise ValueError(f"{root} has no folder {AUDIO} (VCTK 0.92); fetch it with --download")
    # ID AGE GENDER ACCENTS REGION
    genders = read_genders(audio.with_name("speaker-info.txt"), 2)
    # SPEAKER/SPEAKER_TEXT_MIC.flac
    pattern = rf"^(?P<speaker>[^/]+)/.*_{microphone}\.[^.]+$"
    return rows_of_corpus(root, folder, pattern, genders)
