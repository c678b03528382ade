"""Prepare a corpus: download, convert, split, lists, trials; in a checkout data_prep/NAME.py does the same.

    speakernet prepare folder my_voices                 your own recordings
    speakernet prepare voxceleb --save_path data --all
    speakernet prepare musan --save_path data

Everything can be killed and run again: it goes on from there.
"""

import argparse
import ast
import importlib
import importlib.util
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from speakernet.files import own_command
from speakernet.options import suggestion

logger = logging.getLogger(__name__)

PARTS = {
    "folder": "own_folder",
    "voxceleb": "voxceleb",
    "musan": "musan",
    "rirs": "rirs",
    "librispeech": "librispeech",
    "cnceleb": "cnceleb",
    "vctk": "vctk",
    "common_voice": "common_voice",
    "trials": "trial_lists",
    "synthetic": "synthetic",
}
"""What can be prepared -> its module in `speakernet.corpora`, with `add_arguments(parser)` and `run(arguments)`."""


def main(arguments: Sequence[str]) -> int:
    """Run the part that the first argument names; its exit status.

    Raises:
        ValueError: whatever the user can mend.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(_overview())
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    if name not in PARTS:
        sys.stderr.write(f"speakernet prepare: unknown corpus {name!r}; {suggestion(name, PARTS)}\n")
        return 2
    # Late: only the part that is asked for is worth its imports.
    module = importlib.import_module(f"speakernet.corpora.{PARTS[name]}")
    parser = build_parser(name)
    try:
        return int(module.run(parser.parse_args(rest)))
    except KeyboardInterrupt:
        logger.warning("interrupted; run it again to go on from here")
        raise


def build_parser(name: str) -> argparse.ArgumentParser:
    """All options of a part; its help names commands that this user has."""
    from speakernet.corpora.listing import HelpFormatter  # late: the overview needs none of it

    module = importlib.import_module(f"speakernet.corpora.{PARTS[name]}")
    command = own_command(f"prepare {name}")
    description = (module.__doc__ or "").replace(f"speakernet prepare {name}", command)
    parser = argparse.ArgumentParser(
        prog=command, description=description, allow_abbrev=False, formatter_class=HelpFormatter
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    module.add_arguments(parser)
    return parser


def _overview() -> str:
    width = max(map(len, PARTS))
    lines = ["usage: speakernet prepare NAME [options]", "", __doc__ or ""]
    lines += [f"  {name:<{width}}  {_first_line(module)}" for name, module in PARTS.items()]
    return "\n".join([*lines, "", "`speakernet prepare NAME --help` tells the rest.", ""])


def _first_line(module: str) -> str:
    # Read, not imported: the parts import what they work with.
    folder = Path(__file__).parents[1] / "corpora"
    path = folder / module / "__init__.py" if (folder / module).is_dir() else folder / f"{module}.py"
    text = path.read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").split("\n", 1)[0]
