"""Configurations from a command line as it is typed, or from the text of a file in the working
directory.
"""

import shlex
from pathlib import Path

from speakernet.config import load_config


def write(text, name="my.yaml"):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return name


def load_line(line=""):
    return load_config(shlex.split(line))


def load_text(text, line=""):
    """What a file with this text and a command line make."""
    return load_line(f"--config {write(text)} {line}")
