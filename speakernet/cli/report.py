"""Rebuild report.html from a run's files, or put several runs side by side on one page.

    speakernet report exps/a                              rebuilds exps/a/report.html
    speakernet report exps/a --audio corpus/              the same, with the hardest trials playable
    speakernet report exps/a --export paper/              tables as CSV, LaTeX; plots as SVG, PDF
    speakernet report exps/a exps/b --output both.html    one page for several runs

A run that is still training or was never evaluated shows its curves so far.
"""

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from speakernet.cli import output_path
from speakernet.files import FileError, atomic_write, is_own, open_text, reading, sha256_of

PAGE = "comparison.html"
EXPORTED = ".speakernet-export.json"
"""File in the folder of --export: SHA-256 of what was exported there."""

ARGUMENTS = {
    "runs": {
        "type": Path,
        "nargs": "+",
        "metavar": "RUN",
        "help": "folders of runs or of evaluations",
    },
    "--audio": {
        "type": Path,
        "help": "folder or packed corpus with the trial list's audio, to play the hardest trials "
        "on the page",
    },
    "--export": {
        "type": output_path,
        "metavar": "FOLDER",
        "help": "also write each table as CSV and LaTeX, and each plot as SVG and PDF, into this "
        "folder",
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
    # A report is made from the files of a run alone: no model, no audio, and the same page years
    # later.
    with _exporting(arguments.export, is_forced=arguments.force) as export:
        if is_one:
            page = write_report(arguments.runs[0], audio=arguments.audio, export=export)
        else:
            page = write_side_by_side(arguments.runs, arguments.output or Path(PAGE), export)
    return [str(page)]


@contextlib.contextmanager
def _exporting(folder: Path | None, *, is_forced: bool) -> Iterator[Path | None]:
    """A temporary folder, whose files replace those of `folder` when the block ends.

    Only then the names of the files are known. A file that was not exported here before, or was
    changed since, is not replaced without `is_forced`.
    """
    if folder is None:
        yield None
        return
    description = folder / EXPORTED
    known = dict[str, str]()
    if description.is_file():
        with reading(description, "the SHA-256 of exported files"), open_text(description) as file:
            known = dict(json.load(file))
    folder.mkdir(parents=True, exist_ok=True)
    # Which plots and tables there are depends on the run, so names are known only once all of them
    # are made. The temporary folder lies in the target, so that moving is renaming.
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as temporary:
        yield Path(temporary)
        exported = sorted(Path(temporary).iterdir())
        for path in exported:
            target = folder / path.name
            is_ours = not target.exists() or known.get(path.name) == sha256_of(target)
            if not is_ours and not is_forced:
                raise FileError(
                    f"{target} exists, and was not exported here or has been changed since; choose "
                    "another folder, or replace it with --force"
                )
        for path in exported:
            known[path.name] = sha256_of(path)
            path.replace(folder / path.name)
    with atomic_write(description) as file:
        json.dump(known, file, indent=1)
