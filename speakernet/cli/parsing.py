"""From the words of a command line to a command's arguments.

`Command` is what a command's module declares. An option with the type `output_path` names what the
command writes: before it runs, its outputs are compared with all other arguments.
"""

import argparse
import importlib
import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from speakernet.cli.shared import RECOMMENDED, ModelFile, is_own, output_path, wrong_usage
from speakernet.files import FileError, refuse_overwriting

COMPONENTS = "speakernet.components"
"""Entry-point group in which installed packages declare components."""
PLUGIN: dict[str, Any] = {
    "action": "append",
    "default": [],
    "metavar": "FILE",
    "help": "Python file with your own components (docs/components.md)",
}

INTERRUPTED = 130
BROKEN_PIPE = 141
EXIT_STATUSES = {
    0: "done",
    1: "failed; the message says what to do",
    2: "wrong usage",
    75: (
        "a loader worker or another rank died or hung; the same command resumes the run from "
        "last.pt"
    ),
    129: (
        "ended by SIGHUP (the terminal was closed); training wrote last.pt, and the same command "
        "resumes the run"
    ),
    INTERRUPTED: (
        "interrupted by Ctrl-C (SIGINT); training wrote last.pt, and the same command "
        "resumes the run"
    ),
    138: "ended by SIGUSR1 (the cluster is reclaiming the machine); otherwise like SIGTERM",
    BROKEN_PIPE: "the reader closed the output (`speakernet list | head`)",
    143: "ended by SIGTERM; training wrote last.pt, and the same command resumes the run",
}


class Command(SimpleNamespace):
    """What the module of a command declares, or the default; only `run` has to be there."""

    ARGUMENTS: Mapping[str, dict[str, Any]] = {}
    """Option names -> keyword arguments of `add_argument`."""
    ACTIONS: Mapping[str, tuple[str, dict[str, dict[str, Any]]]] = {}
    """Of a corpus: name of an action -> what it does, and its arguments."""
    TAKES_CONFIG = False
    """Whether it also accepts `--config FILE` and every configuration option, which arrive in
    `arguments.config_arguments`."""
    USAGE = "--config FILE [--config FILE …] [--section.key VALUE …] [options below]"
    """What follows the program's name in --help of a command that takes a configuration."""
    PARSES_ITSELF = False
    """Whether `run` takes the words as they were given."""
    ERROR_STATUS: int | None = None
    """Exit status after an error, for a command whose status 1 is an answer."""
    outputs: Callable[[argparse.Namespace], dict[Path, bool]] | None = None
    """The files that the parsed arguments mean, and whether each may be replaced; None: the paths
    of its options."""
    run: Callable[[Any], Any]
    """Takes the parsed arguments; returns the lines to print or an exit status."""


def load_command(module_name: str) -> Command:
    """Import the module of a command."""
    return Command(**vars(importlib.import_module(module_name)))


def parse(command: Command, program: str, rest: Sequence[str]) -> argparse.Namespace:
    """Parse and check the words after a command's name."""
    parser = build_parser(command, program)
    _add_components(rest)
    if command.TAKES_CONFIG:
        for place, word in enumerate(rest):
            if word in ("-h", "--help"):
                parser.epilog = _help_on_configuration(rest[place + 1 :])
        # The rest are options of the configuration, which `load_configuration` checks.
        parsed, config_arguments = parser.parse_known_args(rest)
        parsed.config_arguments = config_arguments
    else:
        _refuse_unknown_options(parser, rest)
        _recommend_model(parser, rest)
        parsed = parser.parse_args(rest)
    _check_outputs(command, parser, parsed)
    return parsed


def build_parser(command: Command, program: str) -> argparse.ArgumentParser:
    """The parser of a command's own options; configuration options are left for the caller."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=command.__doc__,
        # An abbreviation that is unique today may become ambiguous with the next option.
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="log only warnings and errors; results are still printed",
    )
    parser.add_argument("--plugin", **PLUGIN)
    if command.TAKES_CONFIG:
        parser.usage = f"{program} {command.USAGE}"
    for names, how in command.ARGUMENTS.items():
        parser.add_argument(*names.split(), **how)
    if _output_names(parser):
        parser.add_argument(
            "--force", action="store_true", help="replace existing files of other programs"
        )
    return parser


def _help_on_configuration(words: Sequence[str]) -> str:
    """The options of the section or component in the first word after --help, and the exit
    statuses.
    """
    # Late: only --help needs the options of every component.
    from speakernet.config.reference import help_text

    topic = words[0] if words and not words[0].startswith("-") else ""
    statuses = (f"  {code:<5} {meaning}" for code, meaning in EXIT_STATUSES.items())
    return "\n".join([help_text(topic), "", "exit status:", *statuses])


def _refuse_unknown_options(parser: argparse.ArgumentParser, rest: Sequence[str]) -> None:
    """Report a mistyped option; argparse would first report the required option that it stands for
    as missing.
    """
    known = parser._option_string_actions
    for word in rest:
        option = word.partition("=")[0]
        if option == "--":
            return
        if option.startswith("--") and option not in known:
            # Late: only a mistyped option needs it.
            from speakernet.options import nearest

            names = nearest(option, known.keys() - {"--help"}, 1)
            meant = f"did you mean {names[0]}? " if names else ""
            parser.error(f"unknown option {option!r}; {meant}see `{parser.prog} --help`")


def _recommend_model(parser: argparse.ArgumentParser, rest: Sequence[str]) -> None:
    """Report a missing model file with the published model that can be used at once."""
    action = parser._option_string_actions.get("--model")
    options = {word.partition("=")[0] for word in rest}
    is_missing = not options & {"--model", "-h", "--help"}
    if isinstance(action, ModelFile) and action.required and is_missing:
        parser.error(
            "--model is missing; give a model file such as exps/exp01/best.pt, or a published "
            f"model by name: --model {RECOMMENDED} (`speakernet models` lists more)"
        )


def _output_names(parser: argparse.ArgumentParser) -> set[str]:
    """The names of the arguments that name what a command writes."""
    return {action.dest for action in parser._actions if action.type is output_path}


def _check_outputs(
    command: Command, parser: argparse.ArgumentParser, parsed: argparse.Namespace
) -> None:
    """Refuse outputs that would replace an input or each other, or without --force a file that this
    program did not write.
    """
    output_names = _output_names(parser)
    if not output_names:
        return
    inputs: list[str | Path] = []
    is_ours: dict[Path, bool] = {}
    for name, value in vars(parsed).items():
        if name not in output_names:
            for item in value if isinstance(value, list) else [value]:
                # Path.exists would raise for a person's name that is too long for a file.
                if isinstance(item, str | Path) and os.path.exists(item):  # noqa: PTH110
                    inputs.append(item)
        elif value is not None:
            is_ours[value] = is_own(value)
    # Some names only follow from several options together, which only the command knows.
    if command.outputs is not None:
        is_ours = command.outputs(parsed)
    refuse_overwriting(is_ours, inputs)
    for path in is_ours:
        if path.is_file() and path.stat().st_size and not is_ours[path] and not parsed.force:
            raise FileError(
                f"{path} exists, and is not a file that this command wrote; choose another name, "
                "or replace it with --force"
            )


def _add_components(rest: Sequence[str]) -> None:
    """Add the components of installed packages and of `--plugin`, before the options of any
    component are read.
    """
    # A parser of its own, because plug-ins add components that --help of the real one describes.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--plugin", **PLUGIN)
    plugins = parser.parse_known_args(rest)[0].plugin
    installed = importlib.metadata.entry_points(group=COMPONENTS)
    if plugins or installed:
        # Late: without external components, a command reads only the options of the components it
        # uses.
        from speakernet.config import components

        with wrong_usage():
            components.add_installed(installed)
            for path in plugins:
                components.add_file(path)
