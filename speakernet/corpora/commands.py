"""What the parts of `speakernet prepare` share: options, the download of a public corpus, the last words.

Each part is a module with `add_arguments(parser)` and `run(arguments) -> exit status`, and its docstring is its help.
"""

import argparse
import dataclasses
import logging
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from speakernet.corpora import verified
from speakernet.corpora.archives import extract, join_parts
from speakernet.corpora.catalogue import load_corpus
from speakernet.corpora.download import DownloadOptions, download_all
from speakernet.corpora.http_client import Credentials
from speakernet.corpora.listing import ListFiles, ListOptions
from speakernet.corpora.recipe import write_recipe
from speakernet.corpora.summary import StepSummary, finish
from speakernet.files import own_command
from speakernet.machine.facts import usable_cores

logger = logging.getLogger(__name__)

Kind = TypeVar("Kind")

SECRETS = ("key", "user", "password")
#: Steps of the sets for augmentation; all of them where none is named.
STEPS = ("download", "extract", "prepare")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the description's lines and adds defaults, but never a secret's."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_plain = action.dest not in (*SECRETS, "help") and action.nargs != 0
        if is_plain and action.default not in (None, argparse.SUPPRESS, "", False):
            return f"{action.help} (default: %(default)s)"
        return action.help


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to write, and how many workers."""
    parser.add_argument("--save_path", type=Path, default=Path("data"), help="target folder")
    add_jobs_argument(parser)


def add_jobs_argument(parser: argparse.ArgumentParser) -> None:
    """How many workers."""
    parser.add_argument(
        "--jobs", type=positive_int, default=usable_cores(), dest="num_jobs", help="files worked on at once"
    )


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of lists, split and trials; their names are those of `ListOptions`."""
    default = ListOptions
    share = default.validation_share
    parser.add_argument("--validation_share", type=float, default=share, help="of the speakers, where a split is drawn")
    share = default.test_share
    parser.add_argument("--test_share", type=float, default=share, help="of the speakers, where a split is drawn")
    most = default.targets_per_speaker
    parser.add_argument("--targets_per_speaker", type=positive_int, default=most, help="most target trials a speaker")
    parser.add_argument("--same_gender", action="store_true", help="leave out the easy trials across genders")
    shortest = default.min_seconds
    parser.add_argument("--min_seconds", type=float, default=shortest, help="shorter utterances are left out")
    parser.add_argument("--seed", type=int, default=default.seed, help="of the split and the trials")


def add_corpus_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of a public corpus's lists."""
    add_common_arguments(parser)
    add_list_arguments(parser)
    parser.add_argument(
        "--min_utterances",
        type=positive_int,
        default=ListOptions.min_utterances,
        help="speakers with fewer are not trained on",
    )


def add_download_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of parts that fetch files; what they share with `DownloadOptions` is named as there."""
    group = parser.add_argument_group("download")
    for name, what in zip(SECRETS, ("access key", "user name", "password"), strict=True):
        variable = f"SPEAKERNET_{name.upper()}"
        advice = f"{what}; better in the environment as {variable} (other users can see command lines); never logged"
        group.add_argument(f"--{name}", default=os.environ.get(variable, ""), help=advice)
    group.add_argument("--base_url", help="a mirror to fetch from instead; {name} stands for the file")
    group.add_argument("--catalogue", type=Path, help="a table of sources instead of the shipped catalogue.yaml")
    retries, seconds = DownloadOptions.num_retries, DownloadOptions.timeout_seconds
    help_text = "attempts in a row without a single byte before giving up"
    group.add_argument("--retries", type=int, default=retries, dest="num_retries", help=help_text)
    help_text = "seconds of silence before asking again"
    group.add_argument("--timeout", type=float, default=seconds, dest="timeout_seconds", help=help_text)


def add_step_arguments(parser: argparse.ArgumentParser, prepare: str, what: str) -> None:
    """The three steps of a set for augmentation; `--PREPARE` is the last one's name."""
    steps = parser.add_argument_group("steps (all of them when none is named)")
    steps.add_argument("--download", action="store_true", help="fetch the archive unless it is there")
    steps.add_argument("--extract", action="store_true", help="unpack it")
    steps.add_argument(f"--{prepare}", action="store_true", dest="prepare", help=what)


def positive_int(text: str) -> int:
    """An argparse type: a whole number of at least one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}; expected at least 1")
    return number


def chosen(kind: Callable[..., Kind], arguments: argparse.Namespace, **others: Any) -> Kind:
    """An options object of the dataclass `kind`, from the arguments of its fields' names and `others`."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in vars(arguments).items() if name in names} | others)


def download_options(arguments: argparse.Namespace) -> DownloadOptions:
    """The download options that were given."""
    return chosen(DownloadOptions, arguments, credentials=Credentials(arguments.user, arguments.password))


def list_options(arguments: argparse.Namespace, name: str) -> ListOptions:
    """The options of a public corpus; its lists go to `NAME_lists` below its folder."""
    root = arguments.save_path
    return chosen(ListOptions, arguments, root=root, save_path=root / f"{name}_lists")


def steps_of(arguments: argparse.Namespace) -> Sequence[str]:
    """The steps asked for, in order; all of them where none is named."""
    return [step for step in STEPS if getattr(arguments, step)] or STEPS


def fetch(
    name: str,
    arguments: argparse.Namespace,
    steps: Sequence[str] = ("download", "extract"),
    files: Sequence[str] | None = None,
) -> list[StepSummary]:
    """Download a corpus's archives into the target folder and unpack them there, as far as `steps` asks for it.

    Raises:
        ValueError: none of the archives could be fetched.
    """
    save_path = arguments.save_path
    corpus = load_corpus(name, base_url=arguments.base_url, catalogue_path=arguments.catalogue)
    wanted = [corpus.files[file] for file in (files or corpus.files)]
    summaries = []
    if "download" in steps:
        with StepSummary(f"download_{name}", save_path, made="fetched") as summary:
            download_all(wanted, save_path, arguments.num_jobs, download_options(arguments), summary)
        if summary.broken == summary.found > 0:
            # What follows would only find nothing to unpack, and say so instead of why.
            raise ValueError("nothing could be fetched: " + "; ".join(summary.first_broken))
        summaries.append(summary)
    if "extract" in steps:
        with StepSummary(f"extract_{name}", save_path) as summary:
            for file in wanted:
                archive = save_path / file.name
                if not archive.is_file():
                    summary.add_broken(file.name, f"is not there; run with --download, or put it into {save_path}")
                elif not verified.has_md5(archive, file.md5):
                    summary.add_broken(file.name, "its MD5 sum is wrong; remove it and run with --download")
                else:
                    extract(archive, save_path, summary, arguments.num_jobs)
        summaries.append(summary)
    return summaries


def fetch_joined(name: str, arguments: argparse.Namespace) -> list[StepSummary]:
    """Fetch, join and unpack a corpus of which some archives are published in parts."""
    root, num_jobs = arguments.save_path, arguments.num_jobs
    corpus = load_corpus(name, base_url=arguments.base_url, catalogue_path=arguments.catalogue)
    # A whole that is verified needs no parts: they were removed when it was joined.
    done = [one for one in corpus.joined.values() if verified.has_md5(root / one.name, one.md5)]
    finished = {part for one in done for part in one.parts}
    with StepSummary(f"download_{name}", root, made="fetched") as download:
        wanted = [file for file in corpus.files.values() if file.name not in finished]
        download_all(wanted, root, num_jobs, download_options(arguments), download)
    with StepSummary(f"join_{name}", root) as join:
        for one in corpus.joined.values():
            join_parts([root / part for part in one.parts], root / one.name, one.md5, join)
    parts = {part for one in corpus.joined.values() for part in one.parts}
    with StepSummary(f"extract_{name}", root) as unpack:
        sums = {file.name: file.md5 for file in corpus.files.values() if file.name not in parts}
        # CN-Celeb 2's whole has no published sum: its three parts are verified, their concatenation is not.
        sums |= {joined.name: joined.md5 for joined in corpus.joined.values()}
        for archive, md5 in sums.items():
            if verified.has_md5(root / archive, md5):
                extract(root / archive, root, unpack, num_jobs)
            else:
                unpack.add_broken(archive, "is not there, or has the wrong MD5 sum; see the download's errors")
    return [download, join, unpack]


def finish_corpus(lists: ListFiles, summaries: Sequence[StepSummary], options: ListOptions) -> int:
    """Write the configuration, say the next command, and give the exit code."""
    # The run folder is named after the file: exps/librispeech, not exps/librispeech_lists.
    config = options.save_path / f"{options.save_path.name.removesuffix('_lists')}.yaml"
    write_recipe(config, options.root, lists)
    code = finish(summaries, options.save_path / "summary.txt")
    logger.info("lists: %s (their paths start from %s)", options.save_path, options.root)
    say_next(config)
    return code


def say_next(*configs: Path, options: str = "") -> None:
    """Print the command that trains on the configurations, as a shell takes it; `options` as they are."""
    named = [f"--config {shlex.quote(str(config))}" for config in configs]
    sys.stdout.write(" ".join([own_command("train"), *named, *filter(None, [options])]) + "\n")
