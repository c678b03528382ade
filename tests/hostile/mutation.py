"""Hostile variants of small files, drawn from a seed: bytes, text, JSON-like values."""

import json
import re
import struct

MAX_CHANGES = 6
POWERS = [2**bits for bits in (7, 8, 15, 16, 31, 32, 63)]
NUMBERS = (0, 1, -1, 2, 7, 2**24, 2**40, -(2**31), *POWERS, *(power - 1 for power in POWERS))
WORDS = rb"""
0 -1 1e12 1e999 nan .nan inf -.inf NaN 0x10 1_0 null true ~ {} [] " ' \ , *a %s%n 0b_ 2024-13-45
!!python/object:x <script>alert(1)</script> ../../etc/passwd /dev/zero
"""
BLANKS = (b"", b" ", b"\t", b"\r", b"\r\n", b"\n\n", b"\x00", b"&a [*a]", b"<<: *a")
# A byte order mark of each kind, half a character, marks that reverse text.
MARKS = (b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", "\u202e\u2066\u00a0".encode())
LONG = (b"9" * 400, b"[" * 600, b"{" * 600, b"a" * 70_000)
TOKENS = (*WORDS.split(), *BLANKS, *MARKS, *LONG)
VALUES = (
    "a" * 5000,
    *json.loads(
        r"""[null, true, false, 0, 1, -1, 1000000, 1000000000, 1000000000000000, -1000000000000000,
        0.0, -1.5, 1e308, NaN, Infinity, "", "x", "nan", "../x", "\u0000", "\u202e",
        [], {}, [[]], [null], [1, "a"], {"a": {}}, [10000000], [0.5, 0.5, 0.5]]"""
    ),
)
"""Replacements for any value of a tree."""
KINDS = ("bit", "bit", "number", "number", "delete", "repeat", "insert", "token", "cut")


def mutate(content, draw):
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
        match draw.choice(KINDS):
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
                words = list(re.finditer(rb"[^\s,:=\"]+", bytes(changed[:50_000])))
                if words:
                    word = draw.choice(words)
                    changed[word.start() : word.end()] = draw.choice(TOKENS)
            case "cut":
                del changed[place:]
    return bytes(changed)


def mutate_tree(tree, draw, values=VALUES):
    """A copy of nested dictionaries and lists with a few entries removed, doubled or replaced."""
    for _ in range(1 + min(int(draw.expovariate(1.0)), MAX_CHANGES - 1)):
        tree = _change(tree, draw, values)
    return tree


def _change(tree, draw, values):
    """The tree with one entry changed, somewhere on a random path."""
    if not isinstance(tree, dict | list) or not tree or draw.random() < 0.05:
        return draw.choice(values)
    copy = tree.copy()
    key = draw.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
    if isinstance(tree[key], dict | list) and draw.random() < 0.7:
        copy[key] = _change(tree[key], draw, values)
    elif draw.random() < 0.25:
        del copy[key]
    elif isinstance(copy, dict) and draw.random() < 0.2:
        copy[draw.choice(("x", "", 3, "a" * 500))] = draw.choice(values)
    else:
        copy[key] = draw.choice(values)
    return copy
