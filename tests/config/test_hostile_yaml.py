"""Files that a person or a program broke: an error with file and line, within a second, never a traceback."""

import os
from pathlib import Path

import pytest

from speakernet.config import ConfigError, load_config

BROKEN = {
    "NUL": ("data:\n  batch_size: 3\0\n", "not valid YAML"),
    "deep nesting": (
        "model:\n  options: " + "[" * 5000 + "]" * 5000 + "\n",
        r"my\.yaml:2: nested deeper than 20 levels",
    ),
    "aliases of aliases": (
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{b}: &{b} [{', '.join(9 * [f'*{a}'])}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True))
        + "model:\n  options: {x: *h}\n",
        "more than 20 aliases",
    ),
    "a date that is none": ("data:\n  batch_size: 2024-13-45\n", r"my\.yaml:2: '2024-13-45' is not a value"),
    "a number that is none": ("data:\n  batch_size: 0b_\n", r"my\.yaml:2"),
    "an option left empty": ("data:\n  batch_size:\n", r"my\.yaml:2: data\.batch_size is nothing; expected int"),
    "a list of lists": (
        "model:\n  options: {blocks: [[1], [2]]}\n  name: ResNet\n",
        r"my\.yaml:2: model\.options\.blocks is",
    ),
    "not text": (b"\xff\xfe\x00data", "cannot read the configuration"),
    "too large": ("# " + "x" * (1 << 20) + "\n", "bytes; a configuration has 1,048,576 at most"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_has_a_clear_error(name: str, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    path = tmp_path / "my.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message):
        load_config(["--config", str(path)])


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    with pytest.raises(ConfigError, match="no configuration"):
        load_config(["--config", str(tmp_path / "fifo.yaml")])
