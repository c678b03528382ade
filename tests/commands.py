"""Runs commands as they are typed."""

import shlex

from speakernet.cli import main


def run_command(line, status=0):
    """Run a command of speakernet in this process; it must end with this status."""
    ended = main(shlex.split(line))
    assert ended == status, f"status {ended}: {line}"
