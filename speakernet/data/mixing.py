"""Epoch orders for data that is not shuffled as a whole: streamed shards, and several corpora.

An epoch consists of parts (`sampling.Parts`), and every batch takes its share of each. The plan
depends only on (labels, seed, epoch, number of streams). No audio is read here.
"""

from collections.abc import Mapping

import numpy as np

from speakernet.data.sampling import BLOCK, CORPUS, SHARDS, Parts, Sampler
from speakernet.random import numpy_generator

FIRST_BLOCK = 1024
"""Utterances in the first block: training starts once the first shards have arrived, not the whole
buffer."""


# Why the order is shuffled in blocks. To read one crop at an address, its whole shard has to be
# fetched, about a gigabyte, so neighbours in the order must come from few shards. The shards are in
# random order, and only rows near each other in it are shuffled together: with 4,096 utterances to
# a shard, the 65,536 of the default buffer are sixteen shards. We do not know whether that mixes
# every corpus well enough; packing deals a list out over the shards (`stores.pack_to_address`), so
# that each has many speakers.
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
    # Stable, because the order of equal places could otherwise differ between versions of NumPy.
    rows = eligible[np.argsort(place, kind="stable")]
    rows = sampler.limit_speakers(rows)
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
            # Blocks double in size, so that training starts after a few shards and soon mixes a
            # whole buffer.
            size = min(2 * size, max(1, buffer // num_streams))
        streams.append(np.concatenate(blocks))
    return Parts(streams, np.arange(1, num_streams + 1) / num_streams)


# An epoch does not end when the first corpus runs out, because a small corpus with a large weight
# would end it after a few batches. Repeats have row numbers of their own: everything random is
# keyed by the row, so with the same numbers each repeat would be the same crop with the same noise.
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
        # Rounded up, so that no corpus lacks the last unit of the last batch.
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
