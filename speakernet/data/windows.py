"""How recordings of any length are read for embedding: whole, or window by window if they are long.

Nothing is read here; evaluation and inference read the stretches.
"""

import itertools
import logging
import math
from dataclasses import dataclass

import numpy as np

logger = logging.getLogger(__name__)

LONG_SECONDS = 180.0
"""Longer recordings are not read in one piece; VoxCeleb's longest lasts 145 s."""
WINDOW_SECONDS = 60.0
"""As whole utterances, long recordings are embedded in windows of about this length and
averaged."""


@dataclass(frozen=True)
class Stretch:
    """A unit of reading: an utterance (a row of the list of names), or a window of a long one."""

    row: int
    start: int
    num_samples: int
    num_windows: int = 1


def window_edges(num_samples: int, sample_rate: int) -> list[int]:
    """First samples of a recording's windows, then its end; there is a single window unless it is
    long.
    """
    is_long = num_samples > round(LONG_SECONDS * sample_rate)
    count = math.ceil(num_samples / (WINDOW_SECONDS * sample_rate)) if is_long else 1
    # Equally long, so that their plain mean gives every frame the same weight.
    return [int(edge) for edge in np.linspace(0, num_samples, count + 1).astype(np.int64)]


def stretches_of(
    rows: np.ndarray, lengths: np.ndarray, sample_rate: int, *, are_whole: bool = True
) -> list[Stretch]:
    """The stretches to read for these rows of `lengths` (samples), in order: an utterance, or
    windows of a long one.
    """
    stretches = []
    num_long = 0
    for row in rows.tolist():
        # Crops of long recordings are read one by one, so they need no windows.
        edges = [0, int(lengths[row])]
        if are_whole:
            edges = window_edges(edges[1], sample_rate)
        num_long += len(edges) > 2
        for start, stop in itertools.pairwise(edges):
            stretches.append(Stretch(row, start, stop - start, len(edges) - 1))
    if num_long:
        logger.info(
            "%d recordings longer than %g s are embedded in windows of about %g s, whose "
            "embeddings are averaged",
            num_long,
            LONG_SECONDS,
            WINDOW_SECONDS,
        )
    return stretches
