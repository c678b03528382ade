"""Prepare a corpus: download, convert, split, write lists and trials; data_prep/NAME.py in a
checkout does the same.

    speakernet prepare folder my_voices                 your own recordings
    speakernet prepare voxceleb --save_path data --all
    speakernet prepare musan --save_path data

Every preparation can be interrupted; the same command resumes it.
"""

import argparse
import logging
import sys
from collections.abc import Sequence

from speakernet.cli import parsing
from speakernet.files import own_command
from speakernet.options import suggestion

logger = logging.getLogger(__name__)

CORPORA = {
    "folder": "your own recordings: lists, split, trials, a configuration and the next command",
    "voxceleb": "VoxCeleb1 and VoxCeleb2, downloaded or from archives on disk",
    "musan": "MUSAN: music, speech and noise for augmentation",
    "rirs": "RIRS_NOISES: simulated and measured room impulse responses",
    "librispeech": "LibriSpeech, with lists for its own splits",
    "cnceleb": "CN-Celeb 1 and 2, with the published trials",
    "vctk": "VCTK 0.92, with a speaker-disjoint split",
    "common_voice": "Common Voice, one language",
    "trials": "trial lists: make them from any list, drop trials whose files are missing",
    "synthetic": "synthetic speakers with lists, trials, noise and RIRs",
}
"""Name -> description; its module in `speakernet.corpora` has `run(arguments)`, `ARGUMENTS` and
perhaps `ACTIONS`."""
MODULES = {"folder": "own_folder", "trials": "trial_lists"}
PARSES_ITSELF = True


def run(arguments: Sequence[str]) -> int:
    """Prepare the corpus named by the first argument; return the exit status."""
    # Parsed by hand, because subparsers of argparse would import the modules of all corpora, and
    # with them numpy, scipy and requests, to show one line of help.
    name = arguments[0] if arguments else ""
    if name and name not in (*CORPORA, "-h", "--help"):
        sys.stderr.write(
            f"speakernet prepare: unknown corpus {name!r}; {suggestion(name, CORPORA)}\n"
        )
        return 2
    if name not in CORPORA:
        listed = "".join(f"  {corpus:<14}{what}\n" for corpus, what in CORPORA.items())
        sys.stdout.write(f"usage: speakernet prepare NAME [options]\n\n{__doc__}\n{listed}\n")
        sys.stdout.write("See `speakernet prepare NAME --help`.\n")
        return 0 if name else 2
    try:
        return int(_load(name).run(build_parser(name).parse_args(arguments[1:])))
    except KeyboardInterrupt:
        logger.warning("interrupted; the same command resumes")
        raise


def build_parser(name: str) -> argparse.ArgumentParser:
    """The parser of a corpus; its help names the command as this user started it."""
    from speakernet.corpora.listing import HelpFormatter  # late: the overview does not need it

    corpus = _load(name)
    # Help and messages name the command as it was started, `python data_prep/musan.py` in a
    # checkout, so that it can be copied.
    command = own_command(f"prepare {name}")
    parser = parsing.build_parser(corpus, command)
    parser.formatter_class = HelpFormatter
    parser.description = (corpus.__doc__ or "").replace(f"speakernet prepare {name}", command)
    if corpus.ACTIONS:
        actions = parser.add_subparsers(dest="action", required=True)
        for action, (what, table) in corpus.ACTIONS.items():
            subparser = actions.add_parser(action, help=what, formatter_class=HelpFormatter)
            for option, settings in table.items():
                subparser.add_argument(option, **settings)
    return parser


def _load(name: str) -> parsing.Command:
    return parsing.load_command(f"speakernet.corpora.{MODULES.get(name, name)}")
