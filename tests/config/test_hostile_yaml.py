"""Files that a person or a program broke: an error with file and line, within a second, never a traceback."""

import functools
import os
import re
from pathlib import Path

import pytest

from speakernet.config import ConfigError, load_config
from speakernet.config.schema import NESTED, PARTS, POOLING, SECTIONS, TABLES
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
    "too large": ("# " + "x" * (1 << 18) + "\n", "bytes; a configuration has 262,144 at most"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_has_a_clear_error(name: str, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    path = tmp_path / "my.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message):
        load_config(["--config", str(path)])


IN_A_LINE = {
    "deep nesting": ("{channels: " + "[" * 5000 + "]" * 5000 + "}", "nested deeper than 20 levels"),
    "aliases of aliases": (
        "{a: &a [x, x, x], b: &b [" + ", ".join(["*a"] * 11) + "], channels: [" + ", ".join(["*b"] * 11) + "]}",
        "more than 20 aliases",
    ),
    "a date that is none": ("{channels: 2024-13-45}", "'2024-13-45' is not a value"),
    "minutes without end": ("{channels: 1" + ":59" * 80_000 + "}", "a number of 240,001 digits"),
    "an object": ("{channels: !!python/object/apply:os.getcwd []}", "not a value"),
    "half of it": ("{channels: 8", "not valid YAML"),
    "too long": ("{channels: " + "x" * (1 << 18) + "}", "262,144 are the most that is read"),
}


@pytest.mark.parametrize("name", IN_A_LINE)
def test_values_of_the_command_line_go_through_the_same_reader(name: str, tmp_path: Path) -> None:
    text, message = IN_A_LINE[name]
    with pytest.raises(ConfigError, match=f"(?s)--model.options.*({message})"):
        load_config(["--model.name", "ResNet", "--model.options", text])
    # As well as text within a file that stands for such a value.
    path = tmp_path / "my.yaml"
    path.write_text(f"model:\n  name: ResNet\n  options: '{text}'\n")
    with pytest.raises(ConfigError, match=r"my\.yaml"):
        load_config(["--config", str(path)])


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    with pytest.raises(ConfigError, match=r"fifo\.yaml: not a regular file"):
        load_config(["--config", str(tmp_path / "fifo.yaml")])


def every_number() -> list[tuple[str, str, str]]:
    """Dotted key, lines of YAML before it, and its indentation, for every numeric option of every part.

    Parts of one place that take the same numbers for an option of one name are asked once.
    """
    found: dict[tuple[str, str], tuple[str, str, str]] = {}

    def add(key: str, owner: type, begin: str, indent: str) -> None:
        for name in filter(functools.partial(is_number, owner), field_names(owner)):
            found.setdefault((f"{key}.{name}", str(annotations(owner)[name])), (f"{key}.{name}", begin, indent))

    for section, owner in SECTIONS.items():
        if section not in TABLES:
            add(section, owner, f"{section}:\n", "  ")
    for place, (_, table) in PARTS.items():
        for name, part in table.items():
            section, _, field = place.partition(".")
            if place in TABLES:
                add(place, part.options, f"{place}:\n  name: {name}\n", "  ")
            elif place == "model":
                add("model.options", part.options, f"model:\n  name: {name}\n  options:\n", "    ")
            elif place == POOLING:
                begin = f"model:\n  name: ResNet\n  pooling: {name}\n  pooling_options:\n"
                add("model.pooling_options", part.options, begin, "    ")
            else:
                add(place, part.options, f"{section}:\n  name: combined\n  {field}:\n    name: {name}\n", "    ")
    return list(found.values())


def is_number(owner: type, name: str) -> bool:
    words = in_words(annotations(owner)[name])
    return "int" in words or "float" in words


TAKEN = {"1e12": {"runtime.seed", "runtime.loss_scale"}, "": {"runtime.gpu_id"}}
"""Where such a value is one like others: a key of random streams, a power of two, the device that is there."""


@pytest.mark.parametrize("value", ["-1", "0", "1e12", "1000000000000000", ".nan", ".inf", "-.inf", "abc", ""])
def test_every_number_is_taken_or_refused_with_file_and_line(value: str, tmp_path: Path) -> None:
    numbers = every_number()
    # Of every section, and of every place where a part is chosen.
    assert len(numbers) > 140
    assert {key.rpartition(".")[0] for key, _, _ in numbers} >= {*SECTIONS, *NESTED}
    taken = []
    for key, begin, indent in numbers:
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
