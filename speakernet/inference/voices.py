"""The voices of all people as rows of one matrix, in memory: what a recording is compared with."""

from collections.abc import Sequence

import numpy as np

from speakernet.evaluation.scoring import EPSILON

GROWTH = 1.5
"""Room is made for so many times the rows when there is none left."""


class Voices:
    """Unit vectors by name; a product with an embedding of length 1 gives everybody's score.

    Args:
        names: of the people.
        units: (people, dim) of length 1.

    >>> voices = Voices(["Ada"], np.array([[1.0, 0.0]], dtype=np.float32))
    >>> voices.put("Bo", np.array([0.0, 1.0]))
    >>> voices.drop("Ada")
    >>> voices.nearest(np.array([0.6, 0.8], dtype=np.float32), 5)
    [('Bo', 0.800000011920929)]
    """

    def __init__(self, names: Sequence[str], units: np.ndarray) -> None:
        self.names = list(names)
        self._rows = np.ascontiguousarray(units, dtype=np.float32)
        self._row_of = {name: row for row, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)

    def row(self, name: str) -> np.ndarray:
        """Somebody's voice, (dim,) of length 1."""
        return self._rows[self._row_of[name]]

    def put(self, name: str, unit: np.ndarray) -> None:
        """Somebody's voice, (dim,) of length 1, new or in place of what it was."""
        row = self._row_of.get(name)
        if row is None:
            row = self._row_of[name] = len(self.names)
            self.names.append(name)
            if row == len(self._rows):
                grown = np.empty((int(GROWTH * row) + 1, len(unit)), dtype=np.float32)
                grown[:row] = self._rows
                self._rows = grown
        self._rows[row] = unit

    def drop(self, name: str) -> None:
        """Nobody of that name any more; the last one takes the row."""
        row = self._row_of.pop(name, None)
        if row is None:
            return
        last = self.names.pop()
        if last != name:
            self.names[row], self._row_of[last] = last, row
            self._rows[row] = self._rows[len(self.names)]

    def nearest(self, unit: np.ndarray, top: int) -> list[tuple[str, float]]:
        """The names with the highest scores, best first; equal ones by name."""
        scores = self._rows[: len(self.names)] @ unit
        count = min(max(0, top), len(scores))
        # Sorting everybody would take longer than comparing with everybody.
        order = np.argpartition(scores, len(scores) - count) if count else np.empty(0, dtype=np.int64)
        found = [(self.names[row], float(scores[row])) for row in order[len(scores) - count :].tolist()]
        return sorted(found, key=lambda one: (-one[1], one[0]))


def voices_of(names: Sequence[str], units: np.ndarray, weights: np.ndarray) -> Voices:
    """The weighted mean of each person's embeddings.

    Args:
        names: of the person of each recording, those of one person beside each other.
        units: (recordings, dim) of length 1.
        weights: (recordings,) above 0.
    """
    if not len(names):
        return Voices([], units.reshape(0, units.shape[-1]))
    starts = [0, *(row for row in range(1, len(names)) if names[row] != names[row - 1])]
    sums = np.add.reduceat(units * weights[:, None].astype(np.float32), starts, axis=0)
    lengths = np.linalg.norm(sums, axis=1, keepdims=True)
    return Voices([names[row] for row in starts], sums / np.maximum(lengths, EPSILON))
