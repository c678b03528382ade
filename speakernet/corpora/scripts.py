"""What the scripts in data_prep/ share: options, the log on the terminal, errors without tracebacks, exit codes."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from speakernet.corpora.download import DownloadOptions
from speakernet.corpora.http_client import Credentials
from speakernet.machine.limits import usable_cores

DEFAULT_SEED = 10
WRONG_USAGE = 2
INTERRUPTED = 130


def new_parser(description: str) -> argparse.ArgumentParser:
    """A parser that shows the script's own text as it is written, and every default."""
    return argparse.ArgumentParser(description=description, formatter_class=_HelpFormatter)


def add_common_arguments(parser: argparse.ArgumentParser, save_path: str | None = "data") -> None:
    """Options of every script: where to write, how many workers."""
    if save_path is not None:
        parser.add_argument("--save_path", type=Path, default=Path(save_path), help="target folder")
    parser.add_argument("--jobs", type=positive_int, default=usable_cores(), help="files worked on at once")


def add_download_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of scripts that fetch files."""
    group = parser.add_argument_group("download")
    group.add_argument("--key", default=os.environ.get("SPEAKERNET_KEY", ""), help=_secret("access key", "KEY"))
    group.add_argument("--user", default=os.environ.get("SPEAKERNET_USER", ""), help=_secret("user name", "USER"))
    password = os.environ.get("SPEAKERNET_PASSWORD", "")
    group.add_argument("--password", default=password, help=_secret("password", "PASSWORD"))
    group.add_argument("--base_url", help="a mirror to fetch from instead; {name} stands for the file")
    group.add_argument("--catalogue", type=Path, help="a table of sources instead of the shipped catalogue.yaml")
    group.add_argument(
        "--retries", type=int, default=8, help="attempts in a row without a single byte before giving up"
    )
    group.add_argument("--timeout", type=float, default=60.0, help="seconds of silence before asking again")


def download_options(arguments: argparse.Namespace) -> DownloadOptions:
    """The download options that were given."""
    return DownloadOptions(
        num_retries=arguments.retries,
        timeout_seconds=arguments.timeout,
        credentials=Credentials(arguments.user, arguments.password),
    )


def run_script(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int], argv: Sequence[str] | None = None
) -> int:
    """Parse, run, and turn errors that the user can mend into one line.

    Returns:
        0 done, 1 something is missing or broken, 2 wrong usage, 130 interrupted.
    """
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger().setLevel(logging.INFO)
    try:
        return run(arguments)
    except (ValueError, OSError) as error:
        logging.getLogger(parser.prog).error("%s", error)
        return WRONG_USAGE if isinstance(error, argparse.ArgumentError) else 1
    except KeyboardInterrupt:
        logging.getLogger(parser.prog).warning("interrupted; run it again to go on from here")
        return INTERRUPTED


def positive_int(text: str) -> int:
    """An argparse type: a whole number of at least one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}; expected at least 1")
    return number


def _secret(what: str, name: str) -> str:
    return f"{what}; better in the environment as SPEAKERNET_{name} (other users can see command lines); never logged"


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the description's lines and adds defaults, but never a secret's."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_plain = action.dest not in ("key", "user", "password", "help") and action.nargs != 0
        if is_plain and action.default not in (None, argparse.SUPPRESS, "", False):
            return f"{action.help} (default: %(default)s)"
        return action.help
