"""VCTK 0.92: download, unpack, make a speaker-disjoint split and balanced trials.

    speakernet prepare vctk --save_path data --download
    speakernet prepare vctk --save_path data            lists only

Lists go to data/vctk_lists, with paths relative to data. Files are 48 kHz: pack them (speakernet
pack) to train faster. Every speaker was recorded in one session, so error rates are optimistic.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from speakernet.corpora.listing import CORPUS_ARGUMENTS, DOWNLOAD_ARGUMENTS, prepare_public
from speakernet.corpora.utterances import Row
from speakernet.data.folders import walk_files

AUDIO = "wav48_silence_trimmed"


ARGUMENTS = {
    **CORPUS_ARGUMENTS,
    "--download": {"action": "store_true", "help": "fetch and unpack it unless it is there"},
    "--microphone": {
        "choices": ("mic1", "mic2"),
        "default": "mic1",
        "help": "which of the two recordings to use",
    },
    **DOWNLOAD_ARGUMENTS,
}


def run(arguments: argparse.Namespace) -> int:
    return prepare_public("vctk", arguments, lambda root: vctk_rows(root, arguments.microphone))


def vctk_rows(root: Path, microphone: str) -> Iterator[Row]:
    """wav48_silence_trimmed/SPEAKER/SPEAKER_TEXT_MIC.flac of one microphone, genders from
    speaker-info.txt.
    """
    prefix = next((one for one in ("", "VCTK-Corpus-0.92/") if (root / one / AUDIO).is_dir()), None)
    if prefix is None:
        raise ValueError(f"{root} has no folder {AUDIO} (VCTK 0.92); fetch it with --download")
    facts = root / prefix / "speaker-info.txt"
    # ID AGE GENDER ACCENTS REGION; the first line is the header.
    lines = (
        facts.read_text(encoding="utf-8", errors="replace").splitlines()[1:]
        if facts.is_file()
        else []
    )
    genders = {fields[0]: fields[2] for fields in map(str.split, lines) if len(fields) > 2}
    for name in walk_files(root / prefix / AUDIO, {".flac", ".wav"}):
        speaker = name.split("/")[0]
        # p280 and p315 have only the first microphone; s5 has no recordings of the second.
        if "/" in name and name.rsplit(".", 1)[0].endswith(f"_{microphone}"):
            yield Row(speaker, f"{prefix}{AUDIO}/{name}", "", genders.get(speaker, ""))
