"""Epoch orders for data that is not shuffled as a whole: streamed shards, and several corpora.

An epoch consists of parts, and every batch takes its share of each. The plan depends only on
(labels, seed, epoch, number of streams). No audio is read here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from speakernet.data.sampling import BLOCK, CORPUS, SHARDS, Sampler, by_speaker_of
from speakernet.random import numpy_generator

FIRST_BLOCK = 1024
"""Utterances in the first block: training starts once the first shards have arrived, not the whole
buffer."""


@dataclass(frozen=True)
class Parts:
    """The ordered units of several parts, each (units, utterances per unit), and each part's share
    of a batch.

    >>> units = [np.arange(6)[:, None], np.arange(10, 13)[:, None]]
    >>> parts = Parts(units, np.array([2 / 3, 1.0]), names=("a", "b"))
    >>> sizes = np.array([3, 3, 3, 3])
    >>> parts.num_batches(sizes), parts.take(sizes[:3])[:, 0], parts.drawn(sizes[:3])
    (3, array([ 0, 10,  1,  2, 11,  3,  4, 12,  5]), {'a': 6, 'b': 3})
    """

    units: Sequence[np.ndarray]
    ends: np.ndarray
    """Where each part of a batch ends, as a share of the batch; the last one is 1."""
    names: Sequence[str] = ()
    """Names of corpora, which are spread over a batch; if empty, parts follow each other in the
    order of the ranks."""

    def __len__(self) -> int:
        return sum(map(len, self.units))

    def counts(self, sizes: np.ndarray) -> np.ndarray:
        """Units of each part in batches of the given sizes, int64 (batches, parts)."""
        # Rounded as in `rank_share`.
        return np.diff(
            np.floor(sizes[:, None] * self.ends + 1e-9).astype(np.int64), axis=1, prepend=0
        )

    def num_batches(self, sizes: np.ndarray) -> int:
        """How many batches of the given sizes every part can fill its share of."""
        needed = np.cumsum(self.counts(sizes), axis=0)
        return min(
            int(np.searchsorted(needed[:, part], len(units), side="right"))
            for part, units in enumerate(self.units)
        )

    def take(self, sizes: np.ndarray) -> np.ndarray:
        """The units of batches of the given sizes, (units, utterances per unit)."""
        counts = self.counts(sizes).ravel()
        owners = np.repeat(np.tile(np.arange(len(self.units)), len(sizes)), counts)
        if self.names:
            # Spread evenly over the batch, so that every process gets its share of every corpus.
            places = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
            order = (places + 0.5) / np.repeat(counts, counts)
            owners = owners[np.lexsort((order, np.repeat(np.arange(len(sizes)), sizes)))]
        taken = np.empty((len(owners), self.units[0].shape[1]), dtype=np.result_type(*self.units))
        for part, units in enumerate(self.units):
            places = np.flatnonzero(owners == part)
            taken[places] = units[: len(places)]
        return taken

    def drawn(self, sizes: np.ndarray, unit: int = 1) -> dict[str, int]:
        """Utterances of each corpus in batches of the given sizes, with `unit` utterances per
        unit.
        """
        return dict(zip(self.names, (unit * self.counts(sizes).sum(axis=0)).tolist(), strict=False))


def streamed(sampler: Sampler, shards: np.ndarray, num_streams: int, *turn: int) -> Parts:
    """An epoch of a corpus that is read shard by shard, with one stream per process.

    The shards come in random order, and each stream gets a run of them (a shard at the border is in
    two). Each stream is cut into blocks that hold `data.shuffle_buffer` utterances over all
    streams, and each block is shuffled, or dealt into groups, like a whole corpus.

    Args:
        sampler: orders a block.
        shards: the shard of each row of the list, int32 (rows,).
        num_streams: 1, or the number of processes.
        turn: the epoch, counted from 0; for a corpus that is repeated within an epoch, also the
            number of the repeat.
    """
    seed = sampler.seed
    eligible = sampler.eligible
    buffer = sampler.options.shuffle_buffer
    place = numpy_generator(seed, SHARDS, *turn).permutation(int(shards.max()) + 1)[
        shards[eligible]
    ]
    rows = eligible[np.argsort(place, kind="stable")]
    if sampler.max_utterances < len(rows):
        by_speaker, number, _ = by_speaker_of(sampler.labels[rows])
        is_kept = np.empty(len(rows), dtype=bool)
        is_kept[by_speaker] = number < sampler.max_utterances
        rows = rows[is_kept]
    smallest = buffer if sampler.needs_many_speakers else min(FIRST_BLOCK, buffer)
    streams = []
    for stream in range(num_streams):
        mine = rows[len(rows) * stream // num_streams : len(rows) * (stream + 1) // num_streams]
        first = 0
        size = max(1, smallest // num_streams)
        blocks: list[np.ndarray] = []
        while first < len(mine) or not blocks:
            random = numpy_generator(seed, BLOCK, *turn, stream, len(blocks))
            blocks.append(sampler.units_of(random, mine[first : first + size]))
            first = first + size
            size = min(2 * size, max(1, buffer // num_streams))
        streams.append(np.concatenate(blocks))
    return Parts(streams, np.arange(1, num_streams + 1) / num_streams)


def mixed(samplers: Mapping[str, Sampler], epoch: int) -> Parts:
    """An epoch of several corpora, each with its own sampler, whose batch size is the corpus's
    share of every batch.

    The epoch has as many utterances as all corpora together. A corpus that runs out is repeated in
    a different order, with a multiple of the list's length added to its rows, so that they are
    cropped and augmented differently.

    Args:
        samplers: one per corpus, by name, all over the same list.
        epoch: counted from 0.
    """
    sizes = np.array([sampler.batch_size for sampler in samplers.values()])
    orders = [
        _units_of_pass(sampler, epoch, number, 0)
        for number, sampler in enumerate(samplers.values())
    ]
    total = sum(map(len, orders))
    for number, sampler in enumerate(samplers.values()):
        passes = [orders[number]]
        count = len(orders[number])
        needed = -(-total * int(sizes[number]) // int(sizes.sum()))
        while 0 < count < needed:
            again = _units_of_pass(sampler, epoch, number, len(passes))
            passes.append(again.astype(np.int64) + len(passes) * len(sampler.labels))
            count += len(again)
        orders[number] = np.concatenate(passes)[:needed]
    return Parts(orders, np.cumsum(sizes) / sizes.sum(), tuple(samplers))


def _units_of_pass(sampler: Sampler, epoch: int, number: int, repeat: int) -> np.ndarray:
    """The units of corpus `number` in the order of its `repeat`-th repeat in an epoch."""
    if sampler.in_parts is not None:
        (units,) = sampler.in_parts(epoch, repeat).units
        return units
    return sampler.units_of(
        numpy_generator(sampler.seed, CORPUS, epoch, number, repeat), sampler.eligible
    )
