"""LibriSpeech: download, unpack, lists by its own parts (train-*, dev-*, test-*), balanced trials.

    python data_prep/librispeech.py --save_path data --download --parts train-clean-100 dev-clean test-clean
    python data_prep/librispeech.py --save_path data            lists only, of the parts that are there

Lists go to data/librispeech_lists, their paths start from data. A chapter counts as a session.
"""

import argparse
import sys

from speakernet.corpora.corpora import librispeech_part, librispeech_rows, prepare_corpus
from speakernet.corpora.corpus_scripts import (
    add_corpus_arguments,
    corpus_options,
    download_corpus,
    finish_corpus,
)
from speakernet.corpora.scripts import add_common_arguments, add_download_arguments, new_parser, run_script
from speakernet.files import exclusive

PARTS = (
    "train-clean-100",
    "train-clean-360",
    "train-other-500",
    "dev-clean",
    "dev-other",
    "test-clean",
    "test-other",
)


def build_parser() -> argparse.ArgumentParser:
    """All options of the script."""
    parser = new_parser(__doc__ or "")
    add_common_arguments(parser)
    add_corpus_arguments(parser)
    parser.add_argument("--download", action="store_true", help="fetch and unpack what is not there")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=["train-clean-100", "dev-clean", "test-clean"],
        help="parts to download",
    )
    add_download_arguments(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Fetch what is missing, then write the lists."""
    options = corpus_options(arguments, "librispeech")
    with exclusive(options.root):
        summaries = []
        if arguments.download:
            files = [f"{part}.tar.gz" for part in arguments.parts]
            summaries += download_corpus("librispeech", arguments, options, files)
        lists, summary = prepare_corpus(librispeech_rows(options.root), options, librispeech_part)
        return finish_corpus(lists, [*summaries, summary], options)


if __name__ == "__main__":
    sys.exit(run_script(build_parser(), run))
