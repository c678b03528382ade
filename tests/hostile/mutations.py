"""Damage to the bytes of a file, as a broken disk, another program or an attacker does it; every case by its number."""

import random

INTERESTING = [
    b"\x00",
    b"\xff" * 4,
    b"\xff" * 8,
    b"\x7f\xff\xff\xff",
    b"\x00\x00\x00\x80",
    b"\n",
    b"\r",
    b"\t",
    b",",
    b'"',
    b"-1",
    b"0",
    b"1e400",
    b"nan",
    b"inf",
    b"999999999999999999999",
    b"\xe2\x80\xae",
    b"[" * 2000,
    b"{",
    b"&a [*a]",
    b"!!python/object:os.system",
    b"../",
]


def mutated(content: bytes, case: int, seed: int) -> bytes:
    """The content with one to four pieces of damage; the same for the same case and seed."""
    draw = random.Random(f"{seed} {case}")
    for _ in range(draw.choice((1, 1, 2, 4))):
        content = draw.choice(KINDS)(content, draw)
    return content


def _flip(content: bytes, draw: random.Random) -> bytes:
    if not content:
        return content
    changed = bytearray(content)
    changed[_place(content, draw)] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _overwrite(content: bytes, draw: random.Random) -> bytes:
    piece, at = draw.choice(INTERESTING), _place(content, draw)
    return content[:at] + piece + content[at + len(piece) :]


def _insert(content: bytes, draw: random.Random) -> bytes:
    at = _place(content, draw)
    return content[:at] + draw.choice(INTERESTING) + content[at:]


def _cut(content: bytes, draw: random.Random) -> bytes:
    return content[: _place(content, draw)]


def _leave_out(content: bytes, draw: random.Random) -> bytes:
    at = _place(content, draw)
    return content[:at] + content[at + draw.choice((1, 2, 8, 100, 5000)) :]


def _repeat(content: bytes, draw: random.Random) -> bytes:
    at, length = _place(content, draw), draw.choice((1, 10, 300))
    return content[:at] + content[at : at + length] * draw.choice((2, 50)) + content[at + length :]


def _noise(content: bytes, draw: random.Random) -> bytes:
    at, length = _place(content, draw), draw.choice((4, 64, 1000))
    return content[:at] + draw.randbytes(length) + content[at + length :]


def _place(content: bytes, draw: random.Random) -> int:
    # Headers and tables of contents stand at the two ends; what they say decides.
    size = max(1, len(content))
    near = min(size, 200)
    return draw.choice((draw.randrange(size), draw.randrange(near), size - 1 - draw.randrange(near)))


KINDS = (_flip, _flip, _overwrite, _insert, _cut, _leave_out, _repeat, _noise)
