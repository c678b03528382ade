"""The order of what is not shuffled as a whole: shards that are streamed, and several corpora.

An epoch is made of parts, from which every batch takes its share. The plan depends on (labels, seed, epoch, number of
streams) alone. Touches no audio.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from speakernet.data.sampling import BLOCK, CORPUS, SHARDS, Sampler, by_speaker_of
from speakernet.random import numpy_generator

FIRST_BLOCK = 1024
"""Utterances: training begins when the first shards are here, not the whole buffer."""


@dataclass(frozen=True)
class Parts:
    """Units of several parts in their orders, each (units, utterances of a unit), and each part's share of a batch.

    >>> parts = Parts([np.arange(6)[:, None], np.arange(10, 13)[:, None]], np.array([2 / 3, 1.0]), names=("a", "b"))
    >>> sizes = np.array([3, 3, 3, 3])
    >>> parts.num_batches(sizes), parts.take(sizes[:3])[:, 0], parts.drawn(sizes[:3])
    (3, array([ 0, 10,  1,  2, 11,  3,  4, 12,  5]), {'a': 6, 'b': 3})
    """

    units: Sequence[np.ndarray]
    ends: np.ndarray
    """Where each part of a batch ends, as a share of the batch; the last one is 1."""
    names: Sequence[str] = ()
    """Of corpora, which are spread over a batch; else a batch has part after part, as ranks are."""

    def __len__(self) -> int:
        return sum(map(len, self.units))

    def counts(self, sizes: np.ndarray) -> np.ndarray:
        """Units of each part in batches of those sizes, int64 (batches, parts)."""
        # As `rank_share` cuts a batch.
        return np.diff(np.floor(sizes[:, None] * self.ends + 1e-9).astype(np.int64), axis=1, prepend=0)

    def num_batches(self, sizes: np.ndarray) -> int:
        """How many batches of those sizes every part can give its share of."""
        needed = np.cumsum(self.counts(sizes), axis=0)
        return min(
            int(np.searchsorted(needed[:, part], len(units), side="right")) for part, units in enumerate(self.units)
        )

    def take(self, sizes: np.ndarray) -> np.ndarray:
        """The units of batches of those sizes, (units, utterances of a unit)."""
        counts = self.counts(sizes).ravel()
        owners = np.repeat(np.tile(np.arange(len(self.units)), len(sizes)), counts)
        if self.names:
            # Evenly over the batch, so that every process has its part of every corpus.
            places = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
            order = (places + 0.5) / np.repeat(counts, counts)
            owners = owners[np.lexsort((order, np.repeat(np.arange(len(sizes)), sizes)))]
        taken = np.empty((len(owners), self.units[0].shape[1]), dtype=np.result_type(*self.units))
        for part, units in enumerate(self.units):
            places = np.flatnonzero(owners == part)
            taken[places] = units[: len(places)]
        return taken

    def drawn(self, sizes: np.ndarray, unit: int = 1) -> dict[str, int]:
        """Utterances of each corpus in batches of those sizes, `unit` in a unit."""
        return dict(zip(self.names, (unit * self.counts(sizes).sum(axis=0)).tolist(), strict=False))


def streamed(sampler: Sampler, shards: np.ndarray, num_streams: int, *turn: int) -> Parts:
    """An epoch of a corpus that is read shard by shard, each stream for a process of its own.

    The shards come in random order, a run of them for each stream (one at the border is in two). Each stream is cut
    into blocks of `data.shuffle_buffer` utterances, all streams together, and each block is shuffled, or dealt into
    groups, as a whole corpus is.

    Args:
        sampler: orders a block.
        shards: the shard of each row of the list, int32 (rows,).
        num_streams: 1, or the number of processes.
        turn: the epoch, counted from 0; of a corpus that is repeated in an epoch, also how often it was there before.
    """
    seed, eligible, buffer = sampler.seed, sampler.eligible, sampler.options.shuffle_buffer
    place = numpy_generator(seed, SHARDS, *turn).permutation(int(shards.max()) + 1)[shards[eligible]]
    rows = eligible[np.argsort(place, kind="stable")]
    if sampler.max_utterances < len(rows):
        by_speaker, number, _ = by_speaker_of(sampler.labels[rows])
        is_kept = np.empty(len(rows), dtype=bool)
        is_kept[by_speaker] = number < sampler.max_utterances
        rows = rows[is_kept]
    # Groups of one speaker are found in a large block only.
    smallest = min(FIRST_BLOCK, buffer) if sampler.unit == 1 else buffer
    found = []
    for stream in range(num_streams):
        mine = rows[len(rows) * stream // num_streams : len(rows) * (stream + 1) // num_streams]
        first, size = 0, max(1, smallest // num_streams)
        blocks: list[np.ndarray] = []
        while first < len(mine) or not blocks:
            random = numpy_generator(seed, BLOCK, *turn, stream, len(blocks))
            blocks.append(sampler.units_of(random, mine[first : first + size]))
            first, size = first + size, min(2 * size, max(1, buffer // num_streams))
        found.append(np.concatenate(blocks))
    return Parts(found, np.arange(1, num_streams + 1) / num_streams)


def mixed(samplers: Mapping[str, Sampler], epoch: int) -> Parts:
    """An epoch of several corpora, each with a sampler of its own, whose batches are its part of every batch.

    It has as many utterances as all corpora together. One that ends before comes again, in another order; its rows are
    then larger by the number of rows of the list, so that they are cropped and augmented in another way.

    Args:
        samplers: the corpora's by name, all over the same list.
        epoch: counted from 0.
    """
    sizes = np.array([one.batch_size for one in samplers.values()])
    orders = [_in_turn(sampler, epoch, number, 0) for number, sampler in enumerate(samplers.values())]
    total = sum(map(len, orders))
    for number, sampler in enumerate(samplers.values()):
        found, have, needed = [orders[number]], len(orders[number]), -(-total * int(sizes[number]) // int(sizes.sum()))
        while 0 < have < needed:
            again = _in_turn(sampler, epoch, number, len(found))
            found.append(again.astype(np.int64) + len(found) * len(sampler.labels))
            have += len(again)
        orders[number] = np.concatenate(found)[:needed]
    return Parts(orders, np.cumsum(sizes) / sizes.sum(), tuple(samplers))


def _in_turn(sampler: Sampler, epoch: int, number: int, repeat: int) -> np.ndarray:
    """The units of a corpus, the `number`-th of several, in the order in which they come for the `repeat`-th time."""
    if sampler.in_parts is not None:
        (units,) = sampler.in_parts(epoch, repeat).units
    else:
        units = sampler.units_of(numpy_generator(sampler.seed, CORPUS, epoch, number, repeat), sampler.eligible)
    # Groups of one speaker are dealt by batches; between two dealings a batch would see a speaker twice.
    return units if sampler.unit == 1 else units[: len(units) // sampler.batch_size * sampler.batch_size]
