"""MUSAN: music, speech and noise for augmentation: download, verify, unpack, cut into five-second pieces.

    python data_prep/musan.py --save_path data             everything
    python data_prep/musan.py --save_path data --split     only cut what is unpacked

Give --noise_path data/musan_split (pieces, the fastest) or data/musan (whole files) to training. A folder musan_split
that voxceleb_trainer made is completed, not made again.
"""

import argparse
import sys

from speakernet.corpora.augmentation_corpora import ALL_STEPS, prepare_musan
from speakernet.corpora.augmentation_sets import HOP_SECONDS, PIECE_SECONDS
from speakernet.corpora.scripts import (
    add_common_arguments,
    add_download_arguments,
    download_options,
    new_parser,
    run_script,
)
from speakernet.corpora.summary import finish
from speakernet.files import exclusive


def build_parser() -> argparse.ArgumentParser:
    """All options of the script."""
    parser = new_parser(__doc__ or "")
    add_common_arguments(parser)
    steps = parser.add_argument_group("steps (all of them when none is named)")
    steps.add_argument("--download", action="store_true", help="fetch the archive unless it is there")
    steps.add_argument("--extract", action="store_true", help="unpack it")
    steps.add_argument("--split", action="store_true", dest="prepare", help="cut musan/ into musan_split/")
    parser.add_argument("--piece_seconds", type=float, default=PIECE_SECONDS, help="length of a piece")
    parser.add_argument(
        "--hop_seconds", type=float, default=HOP_SECONDS, help="from one piece's beginning to the next's"
    )
    add_download_arguments(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """The steps asked for, in order."""
    steps = [step for step in ALL_STEPS if getattr(arguments, step)] or ALL_STEPS
    with exclusive(arguments.save_path):
        summaries = prepare_musan(
            arguments.save_path,
            download_options(arguments),
            arguments.jobs,
            steps,
            piece_seconds=arguments.piece_seconds,
            hop_seconds=arguments.hop_seconds,
            base_url=arguments.base_url,
            catalogue_path=arguments.catalogue,
        )
        return finish(summaries, arguments.save_path / "summary.txt")


if __name__ == "__main__":
    sys.exit(run_script(build_parser(), run))
