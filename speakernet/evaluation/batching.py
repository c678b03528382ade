"""Which waveforms share a batch where utterances of all lengths are embedded, by their lengths or as they come."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MAX_BATCH_SECONDS_EACH = 4.0
"""A batch of whole utterances holds no more padded audio than batch_size crops of this length."""
WIDTHS_AN_OCTAVE = 8
"""Of batches of few shapes: at most an eighth of a batch is padding for the sake of its shape."""


@dataclass(frozen=True)
class Stretch:
    """What is read at once: an utterance, or a window of a long one.

    Attributes:
        row: of the list of names.
        start: first sample of the window.
        num_samples: of the utterance or the window.
        num_windows: of the utterance.
    """

    row: int
    start: int
    num_samples: int
    num_windows: int = 1


@dataclass(frozen=True)
class Piece:
    """What a stretch gives the network: different waveforms, and which of them each of its columns takes.

    Attributes:
        stretch: where they were read.
        waveforms: (waveforms, samples) float32.
        columns: (crops,) row of `waveforms` for each crop.
    """

    stretch: Stretch
    waveforms: np.ndarray
    columns: np.ndarray


@dataclass(frozen=True)
class Plan:
    """Which waveforms share a batch.

    Attributes:
        stretches: what is read, in the order of reading.
        stretch_of: (waveforms,) which stretch each waveform is cut from; those of one are neighbours.
        bounds: batch b is waveforms `bounds[b]` to `bounds[b + 1]`, (batches + 1,).
        shapes: rows and samples of each batch, (batches, 2).
    """

    stretches: list[Stretch]
    stretch_of: np.ndarray
    bounds: np.ndarray
    shapes: np.ndarray

    def counts(self, batches: range) -> tuple[int, int]:
        """Waveforms in some batches, and stretches that they are cut from."""
        waveforms = self.stretch_of[self.bounds[batches.start] : self.bounds[batches.stop]]
        return len(waveforms), len(np.unique(waveforms))

    def share(self, rank: int, world_size: int) -> range:
        """The batches of one process: neighbours, with about as much audio as every other process has."""
        done = np.concatenate([[0], np.cumsum(self.shapes.prod(axis=1))])
        edges = np.searchsorted(done, [done[-1] * one / world_size for one in (rank, rank + 1)])
        return range(int(edges[0]), int(edges[1]))


def plan_of(
    stretches: list[Stretch],
    length: int,
    num_crops: int,
    shortest: int,
    batch_size: int,
    sample_rate: int,
    *,
    has_few_shapes: bool = False,
) -> Plan:
    """At most batch_size waveforms in a batch, and a bounded amount of padded audio.

    Args:
        stretches: in the order in which they are read.
        length: samples of the crops; 0 where stretches are embedded whole.
        num_crops: of each stretch.
        shortest: samples to which whole ones are wrapped around.
        batch_size: waveforms, at most.
        sample_rate: Hz.
        has_few_shapes: pad batches of whole stretches to one of few shapes: an accelerator prepares for each anew.
    """
    samples = np.array([stretch.num_samples for stretch in stretches], dtype=np.int64)
    if length:
        # Short recordings give equal crops (28 of 40 in speechocean_mini, at 4 s): each is embedded once.
        counts = np.minimum(num_crops, np.where(samples > length, samples - length, 1) + 1)
        widths = np.full(len(samples), length)
    else:
        counts, widths = np.ones(len(samples), dtype=np.int64), np.maximum(samples, shortest)
    stretch_of = np.repeat(np.arange(len(samples)), counts)
    # Crops have one length, and are all full batches but the last.
    room, bounds, shapes = _Room(batch_size, sample_rate, has_few_shapes=has_few_shapes and not length), [0], []
    are_windows = np.array([stretch.num_windows > 1 for stretch in stretches], dtype=bool)
    given = zip(widths[stretch_of].tolist(), are_windows[stretch_of].tolist(), strict=True)
    for number, (width, is_window) in enumerate(given):
        shape = room.shape
        if room.begins_anew(width, is_window=is_window):
            shapes.append(shape)
            bounds.append(number)
    if len(stretch_of):
        shapes.append(room.shape)
        bounds.append(len(stretch_of))
    return Plan(stretches, stretch_of, np.array(bounds), np.array(shapes, dtype=np.int64).reshape(-1, 2))


class _Room:
    """What a batch takes: at most so many waveforms, and a bounded amount of padded audio.

    With few shapes rows are a power of two, and lengths are eight in each octave.
    """

    def __init__(self, batch_size: int, sample_rate: int, *, has_few_shapes: bool = False) -> None:
        self._batch_size, self._budget = batch_size, int(batch_size * MAX_BATCH_SECONDS_EACH * sample_rate)
        self._has_few_shapes = has_few_shapes
        self._size = self._longest = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and samples of the batch as it is padded."""
        rows = 1 << (self._size - 1).bit_length() if self._has_few_shapes else self._size
        return rows, self._longest

    def begins_anew(self, width: int, *, is_window: bool) -> bool:
        """Take in a waveform of so many samples; whether it had to begin another batch."""
        width = usual_width(width) if self._has_few_shapes else width
        longest = max(self._longest, width)
        is_full = self._size >= self._most(longest)
        # A minute is work enough at once, and four of them took CAM++ a gigabyte.
        is_full |= is_window
        if not self._size or not is_full:
            self._size, self._longest = self._size + 1, longest
            return False
        self._size, self._longest = 1, width
        return True

    def _most(self, longest: int) -> int:
        # Padded audio is what memory holds: one long recording fills a batch on its own.
        most = min(self._batch_size, max(1, self._budget // longest))
        return 1 << (most.bit_length() - 1) if self._has_few_shapes else most


def usual_width(samples: int) -> int:
    """The next of `WIDTHS_AN_OCTAVE` lengths in each octave.

    >>> [usual_width(samples) for samples in (7, 16, 17, 1000, 1024, 1025)]
    [7, 16, 18, 1024, 1024, 1152]
    """
    unit = max(1, (1 << (samples.bit_length() - 1)) // WIDTHS_AN_OCTAVE)
    return -(-samples // unit) * unit


def batches_of(pieces: Iterable[Piece], batch_size: int, sample_rate: int) -> Iterator[list[tuple[Piece, int]]]:
    """Lists of (piece, waveform of it) of pieces whose number nobody knows beforehand; as many as in a `Plan`.

    Args:
        pieces: those of like length beside each other, so that little is padded.
        batch_size: waveforms, at most.
        sample_rate: Hz.
    """
    room = _Room(batch_size, sample_rate)
    batch: list[tuple[Piece, int]] = []
    for piece in pieces:
        for index in range(len(piece.waveforms)):
            if room.begins_anew(piece.waveforms.shape[1], is_window=piece.stretch.num_windows > 1):
                yield batch
                batch = []
            batch.append((piece, index))
    if batch:
        yield batch


def padded(waveforms: list[np.ndarray], shape: tuple[int, int] = (0, 0)) -> tuple[Tensor, Tensor]:
    """One zero-padded tensor (rows, samples), and the lengths (rows,).

    Args:
        waveforms: the first rows.
        shape: least rows and samples; rows beyond the waveforms are silence, and nobody's.
    """
    lengths = np.array([len(waveform) for waveform in waveforms])
    rows, samples = max(shape[0], len(waveforms)), max(shape[1], int(lengths.max()))
    padded = np.zeros((rows, samples), dtype=np.float32)
    for row, waveform in enumerate(waveforms):
        padded[row, : len(waveform)] = waveform
    of_rows = np.concatenate([lengths, np.full(rows - len(lengths), samples, dtype=lengths.dtype)])
    return torch.from_numpy(padded), torch.from_numpy(of_rows)
