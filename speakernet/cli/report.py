"""Make report.html again from a run's files, or put several runs side by side on one page.

    speakernet report exps/a                              rebuilds exps/a/report.html
    speakernet report exps/a --audio corpus/              the same, and the hardest trials can be played
    speakernet report exps/a exps/b --output both.html    one page for several runs

A run that is still training, or was never evaluated, shows its curves so far.
"""

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run folders, and the file of a page of several."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs or of evaluations")
    parser.add_argument(
        "--audio",
        type=Path,
        help="folder or packed corpus of the trial list's audio: puts the hardest trials into the page, to be played",
    )
    parser.add_argument("--output", type=Path, help="page of several runs; default comparison.html")


def run(arguments: argparse.Namespace) -> int:
    """Write the page and print its path."""
    # Late: --help needs no matplotlib.
    from speakernet.evaluation.report import write_report, write_side_by_side

    if len(arguments.runs) == 1:
        if arguments.output is not None:
            raise ValueError("--output is for several runs; the report of one run is report.html in its folder")
        path = write_report(arguments.runs[0], audio=arguments.audio)
    elif arguments.audio is not None:
        raise ValueError("--audio works with one run only: a page of several runs does not list single trials")
    else:
        path = write_side_by_side(arguments.runs, arguments.output or Path("comparison.html"))
    sys.stdout.write(f"{path}\n")
    return 0
