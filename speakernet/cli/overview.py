"""`speakernet` without a valid command: the list of commands, the version, or a suggestion for a
mistyped name.
"""

import sys
from collections.abc import Sequence

import speakernet
from speakernet.cli import COMMANDS
from speakernet.options import suggestion


def main(arguments: Sequence[str]) -> int:
    """Print the overview; the exit status is 2 if the command is missing or unknown."""
    name = arguments[0] if arguments else ""
    if name == "--version":
        sys.stdout.write(f"speakernet {speakernet.__version__}\n")
    elif name in ("", "-h", "--help"):
        commands = "".join(f"  {command:<16} {what}\n" for command, what in COMMANDS.items())
        title = "speakernet: train, score and use speaker-verification models"
        sys.stdout.write(f"{title}\n\ncommands:\n{commands}\nSee `speakernet COMMAND --help`.\n")
    else:
        sys.stderr.write(f"speakernet: unknown command {name!r}; {suggestion(name, COMMANDS)}\n")
    return 0 if name in ("-h", "--help", "--version") else 2
