"""MUSAN (music, speech and noise for augmentation): download, verify, unpack, cut into five-second
pieces.

    speakernet prepare musan --save_path data             everything
    speakernet prepare musan --save_path data --split     only cut what is unpacked

Train with --musan_path data/musan_split (pieces, the fastest) or data/musan (whole files). A folder
musan_split made by voxceleb_trainer is completed, not made again: pieces have the same names as in
the classic tools.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from speakernet.corpora.listing import COMMON_ARGUMENTS
from speakernet.corpora.public_archives import (
    DOWNLOAD_ARGUMENTS,
    STEP_ARGUMENTS,
    STEPS,
    fetch,
    requested_steps,
)
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

PIECE_SECONDS = 5.0
# Pieces overlap by two seconds, as in the classic tools.
HOP_SECONDS = 3.0
SPLIT_FOLDER = "musan_split"

ARGUMENTS = {
    **COMMON_ARGUMENTS,
    **STEP_ARGUMENTS,
    "--split": {
        "action": "store_true",
        "dest": "prepare",
        "help": f"cut musan/ into {SPLIT_FOLDER}/",
    },
    "--piece_seconds": {"type": float, "default": PIECE_SECONDS, "help": "length of a piece"},
    "--hop_seconds": {
        "type": float,
        "default": HOP_SECONDS,
        "help": "from the start of one piece to the next",
    },
    **DOWNLOAD_ARGUMENTS,
}


def run(arguments: argparse.Namespace) -> int:
    piece = arguments.piece_seconds
    hop = arguments.hop_seconds
    # As in the classic tools, pieces are named after the second at which they start, so two must
    # not share one.
    if not piece > 0 or not (hop >= 1 and hop.is_integer()):
        raise ValueError(
            f"--piece_seconds {piece:g}, --hop_seconds {hop:g}: expected more than 0 and a whole "
            "number of at least 1"
        )
    with exclusive(arguments.save_path):
        summaries = prepare(arguments, requested_steps(arguments), piece, hop)
        return finish(summaries, arguments.save_path / "summary.txt")


def prepare(
    arguments: argparse.Namespace,
    steps: Sequence[str] = STEPS,
    piece_seconds: float = PIECE_SECONDS,
    hop_seconds: float = HOP_SECONDS,
) -> list[StepSummary]:
    """Make `musan/` and, cut into pieces, `musan_split/` below the target folder."""
    summaries = fetch("musan", arguments, steps)
    if "prepare" not in steps:
        return summaries
    root: Path = arguments.save_path
    if not (root / "musan").is_dir():
        raise ValueError(
            f"{root} has no folder musan; run with --download and --extract, or put it there"
        )
    target = Folder(root / SPLIT_FOLDER)
    piece = int(piece_seconds * SAMPLE_RATE)
    hop = int(hop_seconds * SAMPLE_RATE)

    def cut(name: str) -> tuple[int, int]:
        return _cut_file(root / "musan" / name, target, name, piece, hop)

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


def _cut_file(path: Path, target: Folder, name: str, piece: int, hop: int) -> tuple[int, int]:
    """Cut a file into pieces `NAME/SSSSS.wav`, SSSSS being the second at which a piece starts;
    (made, skipped).
    """
    num_samples = audio_info(path).num_samples_at(SAMPLE_RATE)
    starts = piece_starts(num_samples, piece, hop)
    missing = []
    for start in starts:
        piece_path = target.path(f"{name.rsplit('.', 1)[0]}/{start // SAMPLE_RATE:05d}.wav")
        # An exact comparison, because WAV headers count samples: a truncated piece is made again.
        if audio_seconds(piece_path, SAMPLE_RATE) != min(piece, num_samples - start) / SAMPLE_RATE:
            missing.append((start, piece_path))
    if missing:
        # Decoded once for all its pieces; a minute of music is 4 MB.
        waveform = read_audio(path, sample_rate=SAMPLE_RATE)
        for start, piece_path in missing:
            write_audio(piece_path, waveform[start : start + piece], SAMPLE_RATE)
    return len(missing), len(starts) - len(missing)
