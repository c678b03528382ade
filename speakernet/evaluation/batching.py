"""Which waveforms share a batch where utterances of all lengths are embedded, by their lengths or as they come."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MAX_BATCH_SECONDS_EACH = 4.0
"""A batch of whole utterances holds no more padded audio than batch_size crops of this length."""


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
        costs: padded samples of each batch, (batches,).
    """

    stretches: list[Stretch]
    stretch_of: np.ndarray
    bounds: np.ndarray
    costs: np.ndarray

    def counts(self, batches: range) -> tuple[int, int]:
        """Waveforms in some batches, and stretches that they are cut from."""
        waveforms = self.stretch_of[self.bounds[batches.start] : self.bounds[batches.stop]]
        return len(waveforms), len(np.unique(waveforms))

    def share(self, rank: int, world_size: int) -> range:
        """The batches of one process: neighbours, with about as much audio as every other process has."""
        done = np.concatenate([[0], np.cumsum(self.costs)])
        edges = np.searchsorted(done, [done[-1] * one / world_size for one in (rank, rank + 1)])
        return range(int(edges[0]), int(edges[1]))


def plan_of(
    stretches: list[Stretch], length: int, num_crops: int, shortest: int, batch_size: int, sample_rate: int
) -> Plan:
    """At most batch_size waveforms in a batch, and a bounded amount of padded audio.

    Args:
        stretches: in the order in which they are read.
        length: samples of the crops; 0 where stretches are embedded whole.
        num_crops: of each stretch.
        shortest: samples to which whole ones are wrapped around.
        batch_size: waveforms, at most.
        sample_rate: Hz.
    """
    samples = np.array([stretch.num_samples for stretch in stretches], dtype=np.int64)
    if length:
        # Short recordings give equal crops (28 of 40 in speechocean_mini, at 4 s): each is embedded once.
        counts = np.minimum(num_crops, np.where(samples > length, samples - length, 1) + 1)
        widths = np.full(len(samples), length)
    else:
        counts, widths = np.ones(len(samples), dtype=np.int64), np.maximum(samples, shortest)
    stretch_of = np.repeat(np.arange(len(samples)), counts)
    room, bounds, costs = _Room(batch_size, sample_rate), [0], []
    are_windows = np.array([stretch.num_windows > 1 for stretch in stretches], dtype=bool)
    given = zip(widths[stretch_of].tolist(), are_windows[stretch_of].tolist(), strict=True)
    for number, (width, is_window) in enumerate(given):
        cost = room.cost
        if room.begins_anew(width, is_window=is_window):
            costs.append(cost)
            bounds.append(number)
    if len(stretch_of):
        costs.append(room.cost)
        bounds.append(len(stretch_of))
    return Plan(stretches, stretch_of, np.array(bounds), np.array(costs))


class _Room:
    """What a batch takes: at most so many waveforms, and a bounded amount of padded audio."""

    def __init__(self, batch_size: int, sample_rate: int) -> None:
        self._batch_size, self._budget = batch_size, batch_size * MAX_BATCH_SECONDS_EACH * sample_rate
        self._size = self._longest = 0

    @property
    def cost(self) -> int:
        """Padded samples of the batch."""
        return self._size * self._longest

    def begins_anew(self, width: int, *, is_window: bool) -> bool:
        """Take in a waveform of so many samples; whether it had to begin another batch."""
        longest = max(self._longest, width)
        # Padded audio is what memory holds: one long recording fills a batch on its own.
        is_full = self._size >= self._batch_size or (self._size + 1) * longest > max(self._budget, longest)
        # A minute is work enough at once, and four of them took CAM++ a gigabyte.
        is_full |= is_window
        if not self._size or not is_full:
            self._size, self._longest = self._size + 1, longest
            return False
        self._size, self._longest = 1, width
        return True


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


def padded(waveforms: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """One zero-padded tensor (waveforms, samples), and the lengths (waveforms,)."""
    lengths = np.array([len(waveform) for waveform in waveforms])
    padded = np.zeros((len(waveforms), int(lengths.max())), dtype=np.float32)
    for row, waveform in enumerate(waveforms):
        padded[row, : len(waveform)] = waveform
    return torch.from_numpy(padded), torch.from_numpy(lengths)
