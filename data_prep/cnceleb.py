"""CN-Celeb 1 and 2: download, unpack, join short utterances by session, lists, and the published trials.

    python data_prep/cnceleb.py --save_path data --download --join
    python data_prep/cnceleb.py --save_path data         lists only

Lists go to data/cnceleb_lists, their paths start from data; cnceleb_trials.txt are the published ones (CNC-Eval).
"""

import argparse
import sys

from speakernet.corpora.cnceleb import (
    DEFAULT_JOIN_SECONDS,
    cnceleb_rows,
    join_short,
    write_published_trials,
)
from speakernet.corpora.corpora import prepare_corpus
from speakernet.corpora.corpus_scripts import (
    add_corpus_arguments,
    corpus_options,
    download_joined,
    finish_corpus,
)
from speakernet.corpora.scripts import add_common_arguments, add_download_arguments, new_parser, run_script
from speakernet.corpora.summary import StepSummary
from speakernet.files import exclusive


def build_parser() -> argparse.ArgumentParser:
    """All options of the script."""
    parser = new_parser(__doc__ or "")
    add_common_arguments(parser)
    add_corpus_arguments(parser)
    parser.add_argument("--download", action="store_true", help="fetch and unpack what is not there")
    parser.add_argument("--join", action="store_true", help="join the short utterances of a session, as wespeaker does")
    parser.add_argument("--join_seconds", type=float, default=DEFAULT_JOIN_SECONDS, help="shorter ones are joined")
    add_download_arguments(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Fetch what is missing, join, then write the lists."""
    options = corpus_options(arguments, "cnceleb")
    with exclusive(options.root):
        summaries = []
        if arguments.download:
            summaries += download_joined("cnceleb", arguments, options)
        rows = cnceleb_rows(options.root)
        if arguments.join:
            with StepSummary("join", options.save_path) as summary:
                rows = iter(join_short(rows, options.root, options.num_jobs, summary, arguments.join_seconds))
            summaries.append(summary)
        lists, summary = prepare_corpus(rows, options)
        write_published_trials(options.root, options.save_path / "cnceleb_trials.txt")
        return finish_corpus(lists, [*summaries, summary], options)


if __name__ == "__main__":
    sys.exit(run_script(build_parser(), run))
