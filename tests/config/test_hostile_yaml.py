"""Files that a person or a program broke: an error with file and line, within a second, never a traceback."""

import os
import re
from pathlib import Path

import pytest

from speakernet.config import ConfigError, load_config
from speakernet.config.schema import MODELS, POOLINGS, SECTIONS, TABLES
from speakernet.options import annotations, field_names, in_words

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
    "a dot in a name": ("data: {train_list.x: a}\n", r"data\.train_list\.x is no option"),
    "a path of 70,000 letters": (
        f"data:\n  train_list: {'x' * 70_000}\n",
        r"my\.yaml:2: data\.train_list is 'x+' of 70,000 letters; expected a path",
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


def every_number() -> dict[str, tuple[str, str]]:
    """Dotted key -> lines of YAML before it, and its indentation, for every numeric option of every part."""
    found: dict[str, tuple[str, str]] = {}
    for section, owner in SECTIONS.items():
        parts = {name: part.options for name, part in TABLES[section][1].items()} if section in TABLES else {"": owner}
        for part, options in parts.items():
            begin = f"{section}:\n" + (f"  name: {part}\n" if part else "")
            found |= {f"{section}.{name}": (begin, "  ") for name in field_names(options) if is_number(options, name)}
    for part, model in MODELS.items():
        begin = f"model:\n  name: {part}\n  options:\n"
        options = model.options
        found |= {f"model.options.{one}": (begin, "    ") for one in field_names(options) if is_number(options, one)}
    for part, pooling in POOLINGS.items():
        begin = f"model:\n  name: ResNet\n  pooling: {part}\n  pooling_options:\n"
        options = pooling.options
        ones = [one for one in field_names(options) if is_number(options, one)]
        found |= {f"model.pooling_options.{one}": (begin, "    ") for one in ones}
    return found


def is_number(owner: type, name: str) -> bool:
    words = in_words(annotations(owner)[name])
    return "int" in words or "float" in words


TAKEN = {"1e12": {"runtime.seed", "runtime.loss_scale"}, "": {"runtime.gpu_id"}}
"""Where such a value is one like others: a key of random streams, a power of two, the device that is there."""


@pytest.mark.parametrize("value", ["-1", "0", "1e12", "1000000000000000", ".nan", ".inf", "-.inf", "abc", ""])
def test_every_number_is_taken_or_refused_with_file_and_line(value: str, tmp_path: Path) -> None:
    numbers = every_number()
    assert len(numbers) > 100
    taken = []
    for key, (begin, indent) in numbers.items():
        name = key.rpartition(".")[2]
        path = tmp_path / "my.yaml"
        path.write_text(f"{begin}{indent}{name}: {value}\n")
        try:
            load_config(["--config", str(path)])
        except ConfigError as error:
            # What contradicts another option is said of that one.
            assert re.search(rf"(my\.yaml:\d+|default): {re.escape(key.rpartition('.')[0])}", str(error)), (key, error)
        else:
            taken.append(key)
    if value not in ("-1", "0"):
        assert set(taken) == TAKEN.get(value, set())
