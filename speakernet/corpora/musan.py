"""MUSAN (music, speech and noise for augmentation): download, verify, unpack, cut into five-second
pieces.

    speakernet prepare musan --save_path data             everything
    speakernet prepare musan --save_path data --split     only cut what is unpacked

Train with --musan_path data/musan_split (pieces, the fastest) or data/musan (whole files). A folder
musan_split made by voxceleb_trainer is completed, not made again: pieces have the same names as in
the classic tools.
"""

import argparse
from pathlib import Path

from speakernet.corpora.listing import COMMON_ARGUMENTS
from speakernet.corpora.public_archives import DOWNLOAD_ARGUMENTS, fetch
from speakernet.corpora.steps import Folder, StepSummary, audio_seconds, finish
from speakernet.data.audio import (
    READABLE_SUFFIXES,
    SAMPLE_RATE,
    audio_info,
    read_audio,
    write_audio,
)
from speakernet.data.folders import walk_files
from speakernet.files import exclusive

# Pieces of five seconds overlap by two, as in the classic tools.
PIECE_SAMPLES = 5 * SAMPLE_RATE
HOP_SAMPLES = 3 * SAMPLE_RATE
SPLIT_FOLDER = "musan_split"

ARGUMENTS = {
    **COMMON_ARGUMENTS,
    "--split": {"action": "store_true", "help": "only cut musan/, which is already unpacked"},
    **DOWNLOAD_ARGUMENTS,
}


def run(arguments: argparse.Namespace) -> int:
    with exclusive(arguments.save_path):
        return finish(prepare(arguments), arguments.save_path / "summary.txt")


def prepare(arguments: argparse.Namespace) -> list[StepSummary]:
    """Make `musan/` and, cut into pieces, `musan_split/` below the target folder."""
    summaries = []
    if not arguments.split:
        summaries = fetch("musan", arguments)
    root: Path = arguments.save_path
    if not (root / "musan").is_dir():
        raise ValueError(
            f"{root} has no folder musan; leave out --split to fetch it, or put it there"
        )
    target = Folder(root / SPLIT_FOLDER)

    def cut(name: str) -> tuple[int, int]:
        return _cut_file(root / "musan" / name, target, name)

    summary = StepSummary("split_musan", root)
    names = walk_files(root / "musan", READABLE_SUFFIXES)
    summary.count_each(cut, names, arguments.num_jobs, "split")
    return [*summaries, summary]


def piece_starts(num_samples: int, piece_samples: int, hop_samples: int) -> range:
    """Where pieces begin; the last one ends within the file, and a shorter file is one piece.

    >>> list(piece_starts(16, 5, 3))
    [0, 3, 6, 9]
    >>> list(piece_starts(3, 5, 3))
    [0]
    """
    # The classic tool leaves out a piece that reaches the file's end, and makes none of a shorter
    # file.
    return range(0, max(1, num_samples - piece_samples + 1), hop_samples)


def _cut_file(path: Path, target: Folder, name: str) -> tuple[int, int]:
    """Cut a file into pieces `NAME/SSSSS.wav`, SSSSS being the second at which a piece starts;
    (made, skipped).
    """
    num_samples = audio_info(path).num_samples_at(SAMPLE_RATE)
    starts = piece_starts(num_samples, PIECE_SAMPLES, HOP_SAMPLES)
    missing = []
    for start in starts:
        piece_path = target.path(f"{name.rsplit('.', 1)[0]}/{start // SAMPLE_RATE:05d}.wav")
        piece_samples = min(PIECE_SAMPLES, num_samples - start)
        # An exact comparison, because WAV headers count samples: a truncated piece is made again.
        if audio_seconds(piece_path, SAMPLE_RATE) != piece_samples / SAMPLE_RATE:
            missing.append((start, piece_path))
    if missing:
        # Decoded once for all its pieces; a minute of music is 4 MB.
        # Why pieces at all: a crop of noise from an hour of music costs a seek and a decoder's
        # start, a piece of five seconds one short read.
        waveform = read_audio(path, sample_rate=SAMPLE_RATE)
        for start, piece_path in missing:
            write_audio(piece_path, waveform[start : start + PIECE_SAMPLES], SAMPLE_RATE)
    return len(missing), len(starts) - len(missing)
