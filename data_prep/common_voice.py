"""Common Voice, one language: a speaker-disjoint split and balanced trials from its validated clips.

    python data_prep/common_voice.py --save_path cv-corpus-21.0/de --min_utterances 5

--save_path is the folder of one language (with clips/ and validated.tsv), unpacked by you: Common Voice is handed out
at https://commonvoice.mozilla.org/datasets only. Lists go to common_voice_lists in it; their paths start from it.
Clips are MP3: pack them (speakernet pack) to train fast. Speakers are known by browser, so some are several people.
"""

import argparse
import sys

from speakernet.corpora.corpora import at_least, common_voice_rows, prepare_corpus
from speakernet.corpora.corpus_scripts import add_corpus_arguments, corpus_options, finish_corpus
from speakernet.corpora.scripts import add_common_arguments, new_parser, run_script
from speakernet.files import exclusive


def build_parser() -> argparse.ArgumentParser:
    """All options of the script."""
    parser = new_parser(__doc__ or "")
    add_common_arguments(parser)
    add_corpus_arguments(parser)
    parser.add_argument("--table", default="validated.tsv", help="table of the clips to take")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Write the lists."""
    options = corpus_options(arguments, "common_voice")
    with exclusive(options.root):
        rows = at_least(common_voice_rows(options.root, arguments.table), options.min_utterances)
        lists, summary = prepare_corpus(rows, options)
        return finish_corpus(lists, [summary], options)


if __name__ == "__main__":
    sys.exit(run_script(build_parser(), run))
