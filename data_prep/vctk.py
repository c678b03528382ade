"""VCTK 0.92: download, unpack, a speaker-disjoint split, balanced trials.

    python data_prep/vctk.py --save_path data --download
    python data_prep/vctk.py --save_path data            lists only

Lists go to data/vctk_lists, their paths start from data. Files are 48 kHz: pack them (speakernet pack) to train fast.
Every speaker was recorded in one session, so its error rates are flattered by the room.
"""

import argparse
import sys

from speakernet.corpora.corpora import prepare_corpus, vctk_rows
from speakernet.corpora.corpus_scripts import (
    add_corpus_arguments,
    corpus_options,
    download_corpus,
    finish_corpus,
)
from speakernet.corpora.scripts import add_common_arguments, add_download_arguments, new_parser, run_script
from speakernet.files import exclusive


def build_parser() -> argparse.ArgumentParser:
    """All options of the script."""
    parser = new_parser(__doc__ or "")
    add_common_arguments(parser)
    add_corpus_arguments(parser)
    parser.add_argument("--download", action="store_true", help="fetch and unpack it unless it is there")
    parser.add_argument("--microphone", choices=("mic1", "mic2"), default="mic1", help="which of the two recordings")
    add_download_arguments(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Fetch what is missing, then write the lists."""
    options = corpus_options(arguments, "vctk")
    with exclusive(options.root):
        summaries = []
        if arguments.download:
            summaries += download_corpus("vctk", arguments, options, None)
        lists, summary = prepare_corpus(vctk_rows(options.root, arguments.microphone), options)
        return finish_corpus(lists, [*summaries, summary], options)


if __name__ == "__main__":
    sys.exit(run_script(build_parser(), run))
