"""Rebuild report.html from a run's files.

    speakernet report exps/a                    rebuilds exps/a/report.html
    speakernet report exps/a --audio corpus/    the same, with the hardest trials playable
    speakernet report exps/a --export paper/    tables as CSV, LaTeX; plots as SVG, PDF

A run that is still training or was never evaluated shows its curves so far. `speakernet compare`
has the differences between several runs.
"""

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from speakernet.cli.shared import output_path
from speakernet.files import FileError, atomic_write, open_text, reading, sha256_of

EXPORTED = ".speakernet-export.json"
"""File in the folder of --export: SHA-256 of what was exported there."""

ARGUMENTS = {
    "run": {"type": Path, "metavar": "RUN", "help": "folder of a run or of an evaluation"},
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
}


def run(arguments: argparse.Namespace) -> list[str]:
    """Write the page; return its path."""
    # Late: --help needs no matplotlib.
    from speakernet.evaluation.report import write_report

    # The report needs only the files of the run, no model and no audio, so it can be made again
    # later.
    with _exporting(arguments.export, is_forced=arguments.force) as export:
        page = write_report(arguments.run, audio=arguments.audio, export=export)
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
    # Which plots and tables there are depends on the run, so their names are known only when all
    # are made. The temporary folder is inside the target, so moving a file only renames it.
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
