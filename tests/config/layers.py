"""Configurations from a command line as it is typed, or from the text of a file."""

import shlex

from speakernet.config import load_config


def write(folder, text, name="my.yaml"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def load_line(line=""):
    return load_config(shlex.split(line))


def load_text(folder, text, line=""):
    """What a file with this text and a command line make."""
    return load_line(f"--config {write(folder, text)} {line}")
