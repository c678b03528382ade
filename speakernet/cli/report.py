"""Rebuild report.html from a run's files, or put several runs side by side on one page.

    speakernet report exps/a                              rebuilds exps/a/report.html
    speakernet report exps/a --audio corpus/              the same, with the hardest trials playable
    speakernet report exps/a --export paper/              tables as CSV and LaTeX, plots as SVG and
    PDF speakernet report exps/a exps/b --output both.html    one page for several runs

A run that is still training or was never evaluated shows its curves so far.
"""

import argparse
from pathlib import Path

from speakernet.cli import output_path
from speakernet.files import is_own

PAGE = "comparison.html"

ARGUMENTS = {
    "runs": {
        "type": Path,
        "nargs": "+",
        "metavar": "RUN",
        "help": "folders of runs or of evaluations",
    },
    "--audio": {
        "type": Path,
        "help": (
            "folder or packed corpus with the trial list's audio, to play the hardest trials "
            "on the page"
        ),
    },
    "--export": {
        "type": Path,
        "metavar": "FOLDER",
        "help": (
            "also write each table as CSV and LaTeX, and each plot as SVG and PDF, into this folder"
        ),
    },
    "--output": {"type": output_path, "help": f"output page for several runs (default: {PAGE})"},
}


def outputs(arguments: argparse.Namespace) -> dict[Path, bool]:
    """The page of several runs; the report of one run has its own name in the run's folder."""
    if len(arguments.runs) == 1:
        return {}
    path = arguments.output or Path(PAGE)
    return {path: is_own(path)}


def run(arguments: argparse.Namespace) -> list[str]:
    """Write the page; return its path."""
    # Late: --help needs no matplotlib.
    from speakernet.evaluation.report import write_report, write_side_by_side

    is_one = len(arguments.runs) == 1
    if arguments.output is not None and is_one:
        raise ValueError(
            "--output needs several runs; the report of one run is report.html in its folder"
        )
    if arguments.audio is not None and not is_one:
        raise ValueError("--audio needs a single run; a page of several runs does not list trials")
    if is_one:
        return [
            str(write_report(arguments.runs[0], audio=arguments.audio, export=arguments.export))
        ]
    return [
        str(write_side_by_side(arguments.runs, arguments.output or Path(PAGE), arguments.export))
    ]
