"""Hostile variants of small files, drawn from a seed: bytes, text, JSON-like values."""

import random
import re
import struct
from collections.abc import Sequence
from typing import Any

MAX_CHANGES = 6
NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    127,
    128,
    255,
    256,
    32767,
    65535,
    65536,
    2**24,
    2**31 - 1,
    -(2**31),
    2**32 - 1,
    2**40,
    2**63 - 1,
)
TOKENS = (
    b"",
    b"0",
    b"-1",
    b"1e12",
    b"1e999",
    b"nan",
    b".nan",
    b"inf",
    b"-.inf",
    b"NaN",
    b"9" * 400,
    b"0x10",
    b"1_0",
    b"null",
    b"true",
    b"~",
    b"{}",
    b"[]",
    b'"',
    b"'",
    b"\\",
    b"&a [*a]",
    b"*a",
    b"<<: *a",
    b"!!python/object:x y",
    b"[" * 600,
    b"{" * 600,
    b"\x00",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\r",
    b"\r\n",
    b"\n\n",
    b"\t",
    b" ",
    b",",
    "\u202e\u2066".encode(),
    "\u00a0".encode(),
    b"\xed\xa0\x80",
    b"a" * 70_000,
    b"%s%n",
    b"<script>alert(1)</script>",
    b"../../etc/passwd",
    b"/dev/zero",
    b"2024-13-45",
    b"0b_",
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    10**6,
    10**9,
    10**15,
    -(10**15),
    0.0,
    -1.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "nan",
    "../x",
    "a" * 5000,
    "\x00",
    "\u202e",
    [],
    {},
    [[]],
    [None],
    [1, "a"],
    {"a": {}},
    [10**7],
    [0.5] * 3,
)
"""Replacements for any value of a tree."""


def mutated(content: bytes, draw: random.Random) -> bytes:
    """A few random changes to the bytes of a file."""
    changed = bytearray(content)
    for _ in range(1 + min(int(draw.expovariate(0.8)), MAX_CHANGES - 1)):
        # Headers matter more than bodies, so half of all changes are near the beginning or the end.
        size = len(changed)
        where = draw.random()
        place = draw.randrange((min(size, 64) if where < 0.35 else size) + 1)
        if 0.35 <= where < 0.5:
            place = max(0, size - draw.randrange(min(size, 128) + 1))
        span = slice(place, place + int(draw.expovariate(1 / 24)) + 1)
        match draw.choice(
            ("bit", "bit", "number", "number", "delete", "repeat", "insert", "token", "cut")
        ):
            case "bit" if place < size:
                changed[place] ^= 1 << draw.randrange(8)
            case "number":
                width, code = draw.choice(((1, "B"), (2, "H"), (4, "I"), (8, "Q")))
                value = draw.choice((*NUMBERS, size)) % (1 << 8 * width)
                changed[place : place + width] = struct.pack(draw.choice("<>") + code, value)
            case "delete":
                del changed[span]
            case "repeat":
                changed[place:place] = changed[span] * draw.choice((1, 2, 50))
            case "insert":
                changed[place:place] = draw.choice((*TOKENS, draw.randbytes(draw.randrange(1, 40))))
            case "token":
                if found := list(re.finditer(rb"[^\s,:=\"]+", bytes(changed[:50_000]))):
                    match = draw.choice(found)
                    changed[match.start() : match.end()] = draw.choice(TOKENS)
            case "cut":
                del changed[place:]
    return bytes(changed)


def mutated_tree(tree: Any, draw: random.Random, values: Sequence[Any] = VALUES) -> Any:
    """A copy of nested dictionaries and lists with a few entries removed, doubled or replaced."""
    for _ in range(1 + min(int(draw.expovariate(1.0)), MAX_CHANGES - 1)):
        tree = _changed(tree, draw, values)
    return tree


def _changed(tree: Any, draw: random.Random, values: Sequence[Any]) -> Any:
    """The tree with one entry changed, somewhere on a random path."""
    if not isinstance(tree, dict | list) or not tree or draw.random() < 0.05:
        return draw.choice(values)
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    key = draw.choice(keys)
    copy: Any = dict(tree) if isinstance(tree, dict) else list(tree)
    if isinstance(tree[key], dict | list) and draw.random() < 0.7:
        copy[key] = _changed(tree[key], draw, values)
    elif draw.random() < 0.25:
        del copy[key]
    elif isinstance(copy, dict) and draw.random() < 0.2:
        copy[draw.choice(("x", "", 3, "a" * 500))] = draw.choice(values)
    else:
        copy[key] = draw.choice(values)
    return copy
