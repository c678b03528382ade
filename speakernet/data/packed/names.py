"""Find names among a million others with arrays alone: 64-bit hashes, sorted once, and a comparison of the bytes.

A dictionary of a million paths would cost 150 MB and be copied into every worker; this costs 16 bytes a name.
"""

from pathlib import Path

import numpy as np

from speakernet.data.lists import ListError, StringTable

HASH_SEED = 20260101
ROWS_PER_BLOCK = 1 << 13  # Keeps the temporary arrays in the processor's cache.
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # Odd, so it has an inverse modulo 2**64.


class NameIndex:
    """Rows of a table by name."""

    def __init__(self, names: StringTable) -> None:
        self._names = names
        hashes = hash_names(names)
        self._order = np.argsort(hashes, kind="stable")
        self._sorted = hashes[self._order]

    def find(self, names: StringTable) -> np.ndarray:
        """The first row that has each name, -1 where none has; int64 (names,)."""
        found = np.full(len(names), -1, dtype=np.int64)
        if not len(self._sorted) or not len(names):
            return found
        hashes = hash_names(names)
        places = np.searchsorted(self._sorted, hashes)
        candidates = self._order[np.minimum(places, len(self._sorted) - 1)]
        has_hash = self._sorted[np.minimum(places, len(self._sorted) - 1)] == hashes
        is_same = np.zeros(len(names), dtype=bool)
        is_same[has_hash] = _equal_strings(names, np.flatnonzero(has_hash), self._names, candidates[has_hash])
        found[is_same] = candidates[is_same]
        # Two names with one hash are not to be expected in a lifetime, but a wrong recording would go unnoticed.
        for row in np.flatnonzero(has_hash & ~is_same).tolist():
            place = int(places[row])
            while place < len(self._sorted) and self._sorted[place] == hashes[row]:
                if self._names.raw(int(self._order[place])) == names.raw(row):
                    found[row] = self._order[place]
                    break
                place += 1
        return found

    def refuse_repeated(self, path: str | Path) -> None:
        """Refuse a list that names an utterance twice.

        Raises:
            ListError: it does; the first such name is said.
        """
        repeated = np.flatnonzero(self.find(self._names) != np.arange(len(self._names)))
        if len(repeated):
            raise ListError(f"{path}: {self._names[int(repeated[0])]!r} is there twice; remove one")


def hash_names(names: StringTable) -> np.ndarray:
    """A 64-bit hash of every name, uint64 (names,): a polynomial in scrambled bytes, modulo 2**64."""
    hashes = np.empty(len(names), dtype=np.uint64)
    scrambled = np.random.default_rng(HASH_SEED).integers(1, 2**63, size=256, dtype=np.uint64)
    inverse = np.uint64(pow(int(MULTIPLIER), -1, 2**64))
    block_ends = names.offsets[np.minimum(np.arange(0, len(names) + ROWS_PER_BLOCK, ROWS_PER_BLOCK), len(names))]
    longest = int(np.diff(block_ends).max(initial=0)) + 1
    powers, inverse_powers = _powers(MULTIPLIER, longest), _powers(inverse, longest)
    for first in range(0, len(names), ROWS_PER_BLOCK):
        offsets = names.offsets[first : first + ROWS_PER_BLOCK + 1]
        content = names.content[offsets[0] : offsets[-1]]
        starts = offsets - offsets[0]
        totals = np.zeros(len(content) + 1, dtype=np.uint64)
        np.cumsum(scrambled[content] * powers[: len(content)], out=totals[1:])
        # The sum over one name carries the power of the place where it starts, which the inverse takes away.
        values = (totals[starts[1:]] - totals[starts[:-1]]) * inverse_powers[starts[:-1]]
        values ^= values >> np.uint64(32)
        hashes[first : first + len(values)] = values * MULTIPLIER
    return hashes


def _powers(base: np.uint64, count: int) -> np.ndarray:
    """Powers base ** 0 … base ** (count - 1) modulo 2**64."""
    powers = np.full(count, base, dtype=np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, dtype=np.uint64)


def _equal_strings(left: StringTable, left_rows: np.ndarray, right: StringTable, right_rows: np.ndarray) -> np.ndarray:
    """Whether string `left_rows[i]` of one table is string `right_rows[i]` of the other; bool (rows,)."""
    left_starts, left_ends = left.offsets[left_rows], left.offsets[left_rows + 1]
    right_starts, right_ends = right.offsets[right_rows], right.offsets[right_rows + 1]
    lengths = left_ends - left_starts
    is_same = lengths == right_ends - right_starts
    for first in range(0, len(left_rows), ROWS_PER_BLOCK):
        rows = first + np.flatnonzero(
            is_same[first : first + ROWS_PER_BLOCK] & (lengths[first : first + ROWS_PER_BLOCK] > 0)
        )
        if not len(rows):
            continue
        counts = lengths[rows]
        ends = np.cumsum(counts)
        within = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        is_equal = (
            left.content[np.repeat(left_starts[rows], counts) + within]
            == right.content[np.repeat(right_starts[rows], counts) + within]
        )
        is_same[rows] = np.add.reduceat(~is_equal, ends - counts) == 0
    return is_same
