"""MUSAN: music, speech and noise for augmentation: download, verify, unpack, cut into five-second pieces.

    speakernet prepare musan --save_path data             everything
    speakernet prepare musan --save_path data --split     only cut what is unpacked

Give --noise_path data/musan_split (pieces, the fastest) or data/musan (whole files) to training. A folder musan_split
that voxceleb_trainer made is completed, not made again: pieces have the classic tools' names.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from speakernet.corpora.commands import (
    STEPS,
    add_common_arguments,
    add_download_arguments,
    add_step_arguments,
    fetch,
    steps_of,
)
from speakernet.corpora.conversion import audio_seconds
from speakernet.corpora.safe_paths import Folder
from speakernet.corpora.summary import StepSummary, finish
from speakernet.corpora.walking import READABLE_SUFFIXES, walk_files
from speakernet.data.audio import SAMPLE_RATE, AudioError, audio_info, read_audio, write_audio
from speakernet.files import exclusive, parallel_map

PIECE_SECONDS = 5.0
# Pieces overlap by two seconds, as the classic tools cut them.
HOP_SECONDS = 3.0
SPLIT_FOLDER = "musan_split"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options of this part."""
    add_common_arguments(parser)
    add_step_arguments(parser, "split", f"cut musan/ into {SPLIT_FOLDER}/")
    parser.add_argument("--piece_seconds", type=float, default=PIECE_SECONDS, help="length of a piece")
    parser.add_argument(
        "--hop_seconds", type=float, default=HOP_SECONDS, help="from one piece's beginning to the next's"
    )
    add_download_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """The steps asked for, in order."""
    _check_lengths(arguments.piece_seconds, arguments.hop_seconds)
    with exclusive(arguments.save_path):
        summaries = prepare(arguments, steps_of(arguments), arguments.piece_seconds, arguments.hop_seconds)
        return finish(summaries, arguments.save_path / "summary.txt")


def _check_lengths(piece_seconds: float, hop_seconds: float) -> None:
    if not piece_seconds > 0:
        raise ValueError(f"--piece_seconds {piece_seconds:g}: expected more than 0")
    # Pieces are named for the second that they begin at, as the classic tools name them: two must not share one.
    if not (hop_seconds >= 1 and hop_seconds.is_integer()):
        raise ValueError(f"--hop_seconds {hop_seconds:g}: expected a whole number of seconds, at least 1")


def prepare(
    arguments: argparse.Namespace,
    steps: Sequence[str] = STEPS,
    piece_seconds: float = PIECE_SECONDS,
    hop_seconds: float = HOP_SECONDS,
) -> list[StepSummary]:
    """`musan/` and, cut into pieces, `musan_split/` below the target folder."""
    summaries = fetch("musan", arguments, steps)
    save_path: Path = arguments.save_path
    if "prepare" in steps:
        if not (save_path / "musan").is_dir():
            raise ValueError(f"{save_path} holds no folder musan; run with --download and --extract, or put it there")
        with StepSummary("split_musan", save_path) as summary:
            split_noise(
                save_path / "musan", save_path / SPLIT_FOLDER, arguments.num_jobs, summary, piece_seconds, hop_seconds
            )
        summaries.append(summary)
    return summaries


def split_noise(
    source_root: Path,
    target_root: Path,
    num_jobs: int,
    summary: StepSummary,
    piece_seconds: float,
    hop_seconds: float,
) -> None:
    """Cut every file below `source_root` into pieces `NAME/SSSSS.wav`, SSSSS being the second that a piece begins at.

    Pieces overlap as the classic tools cut them; a file shorter than a piece becomes one piece. Pieces that are there,
    whole, are left alone.
    """
    target = Folder(target_root)

    def cut(name: str) -> tuple[str, int, int, str | None]:
        try:
            made, skipped = _cut_file(source_root / name, target, name, piece_seconds, hop_seconds)
        except AudioError as error:
            return name, 0, 0, str(error)
        return name, made, skipped, None

    names = walk_files(source_root, READABLE_SUFFIXES)
    for name, made, skipped, problem in parallel_map(cut, names, num_jobs, "split"):
        summary.add_made(made)
        summary.add_skipped(skipped)
        if problem is not None:
            summary.add_broken(name, problem)


def piece_starts(num_samples: int, piece_samples: int, hop_samples: int) -> list[int]:
    """Where pieces begin; the last one ends within the file.

    >>> piece_starts(16, 5, 3)
    [0, 3, 6, 9]
    >>> piece_starts(3, 5, 3)
    [0]
    """
    # The classic tool's range ends before a piece that reaches the file's end, and has none for a shorter file: both
    # are kept here.
    return list(range(0, max(1, num_samples - piece_samples + 1), hop_samples))


def _cut_file(path: Path, target: Folder, name: str, piece_seconds: float, hop_seconds: float) -> tuple[int, int]:
    """(made, skipped) pieces of one file; it is decoded only if a piece is missing."""
    num_samples = audio_info(path).num_samples_at(SAMPLE_RATE)
    piece, hop = int(piece_seconds * SAMPLE_RATE), int(hop_seconds * SAMPLE_RATE)
    stem = name.rsplit(".", 1)[0]
    wanted = []
    starts = piece_starts(num_samples, piece, hop)
    for start in starts:
        piece_path = target.path(f"{stem}/{start // SAMPLE_RATE:05d}.wav")
        expected = min(piece, num_samples - start) / SAMPLE_RATE
        # Exact, since WAV headers count samples: a piece that was cut short is made again.
        if audio_seconds(piece_path, SAMPLE_RATE) != expected:
            wanted.append((start, piece_path))
    if wanted:
        # Decoded once for all its pieces; a minute of music is 4 MB.
        waveform = read_audio(path, sample_rate=SAMPLE_RATE)
        for start, piece_path in wanted:
            write_audio(piece_path, waveform[start : start + piece], SAMPLE_RATE)
    return len(wanted), len(starts) - len(wanted)
