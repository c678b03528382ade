"""`speakernet` without a valid command: the list of commands, the version, or a suggestion for a
mistyped name.
"""

import argparse
import sys
from collections.abc import Sequence

import speakernet
from speakernet.cli import COMMANDS, module_of
from speakernet.cli.parsing import build_parser, load_command
from speakernet.options import suggestion

PARSES_ITSELF = True


def run(arguments: Sequence[str]) -> int:
    """Print the overview; the exit status is 2 if the command is missing or unknown."""
    name = arguments[0] if arguments else ""
    if name == "--version":
        sys.stdout.write(f"speakernet {speakernet.__version__}\n")
    elif name == "--completion":
        sys.stdout.write(f"{completion(arguments[1] if len(arguments) > 1 else '')}\n")
    elif name in ("", "-h", "--help"):
        commands = "".join(f"  {command:<16} {what}\n" for command, what in COMMANDS.items())
        title = "speakernet: train, score and use speaker-verification models"
        sys.stdout.write(
            f"{title}\n\ncommands:\n{commands}\nSee `speakernet COMMAND --help`.\n"
            'Shell completion: `eval "$(speakernet --completion bash)"` (or zsh, fish)\n'
        )
    else:
        sys.stderr.write(f"speakernet: unknown command {name!r}; {suggestion(name, COMMANDS)}\n")
    return 0 if name in ("-h", "--help", "--version", "--completion") else 2


def completion(shell: str) -> str:
    """The script that completes commands and options in a shell.

    Raises:
        ValueError: shtab does not support the shell.
    """
    # Late: only completion needs it.
    import shtab

    # Late: these read the options of every component.
    from speakernet.config.reference import rows
    from speakernet.config.schema import SECTIONS

    if shell not in shtab.SUPPORTED_SHELLS:
        raise ValueError(
            f"--completion {shell}: expected one of {', '.join(shtab.SUPPORTED_SHELLS)}"
        )
    parser = argparse.ArgumentParser("speakernet")
    subparsers = parser.add_subparsers()
    for name, what in COMMANDS.items():
        command = load_command(module_of(name))
        parents = [] if command.PARSES_ITSELF else [build_parser(command, name)]
        subparser = subparsers.add_parser(
            name, help=what, parents=parents, add_help=False, conflict_handler="resolve"
        )
        if command.TAKES_CONFIG:
            option = subparser.add_argument("--config", help="configuration file")
            option.complete = shtab.FILE  # type: ignore[attr-defined]
            for key in dict.fromkeys(row.key for section in SECTIONS for row in rows(section)):
                subparser.add_argument(f"--{key}")
    return str(shtab.complete(parser, shell))
