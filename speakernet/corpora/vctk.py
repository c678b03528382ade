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

ARGUMENTS = PUBLIC_ARGUMENTS


def run(arguments: argparse.Namespace) -> int:
    return prepare_public("vctk", arguments, vctk_rows)


def vctk_rows(root: Path) -> Iterator[Row]:
    """The recordings of the first of two microphones."""
    folder = f"VCTK-Corpus-0.92/{AUDIO}"
    if not (root / folder).is_dir():
        folder = AUDIO
    audio = root / folder
    if not audio.is_dir():
        raise ValueError(f"{root} has no folder {AUDIO} (VCTK 0.92); fetch it with --download")
    # ID AGE GENDER ACCENTS REGION
    genders = read_genders(audio.with_name("speaker-info.txt"), 2)
    # SPEAKER/SPEAKER_TEXT_MIC.flac
    # Both microphones recorded the same sentences at once, so of each only one recording is taken;
    # p280, p315 and s5 lack the second.
    pattern = r"^(?P<speaker>[^/]+)/.*_mic1\.[^.]+$"
    return rows_of_corpus(root, folder, pattern, genders)
