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
def plan_streams(sampler: Sampler, shards: np.ndarray, num_streams: int, *turn: int) -> Parts:
    """An epoch of a corpus that is read shard by shard, with one stream per process.

    The shards come in random order, and each stream gets a run of them (a shard at the border is in
    two). Each stream is cut into blocks that hold `data.shuffle_buffer` utterances over all
    streams, and each block is shuffled, or dealt into groups, like a whole corpus.

    Args:
        sampler: orders a block.
        shards: the shard of each row of the list, int32 (rows,).
        num_streams: 1, or the number of processes.
        turn: the epoch; for one of several corpora, also the number of the pass over it in this
            epoch. Both are counted from 0.
    """
    seed = sampler.seed
    eligible = sampler.eligible
    buffer = sampler.options.shuffle_buffer
    place_of_shard = numpy_generator(seed, SHARDS, *turn).permutation(int(shards.max()) + 1)
    places = place_of_shard[shards[eligible]]
    # Stable, because the order of equal places could otherwise differ between versions of NumPy.
    rows = eligible[np.argsort(places, kind="stable")]
    rows = sampler.limit_speakers(rows)
    first_block = buffer if sampler.needs_many_speakers else min(FIRST_BLOCK, buffer)
    streams = []
    for stream in range(num_streams):
        start = len(rows) * stream // num_streams
        stop = len(rows) * (stream + 1) // num_streams
        size = max(1, first_block // num_streams)
        blocks: list[np.ndarray] = []
        # A stream without rows has one empty block.
        while start < stop or not blocks:
            random = numpy_generator(seed, BLOCK, *turn, stream, len(blocks))
            blocks.append(sampler.units_of(random, rows[start : min(start + size, stop)]))
            start += size
            # Blocks double in size, so that training starts after a few shards and soon mixes a
            # whole buffer.
            size = min(2 * size, max(1, buffer // num_streams))
        streams.append(np.concatenate(blocks))
    ends = np.arange(1, num_streams + 1) / num_streams  # every stream has the same share of a batch
    return Parts(streams, ends)


# An epoch does not end when the first corpus runs out, because a small corpus with a large weight
# would end it after a few batches. Each pass has row numbers of its own: everything random is keyed
# by the row, so with the same numbers each pass would be the same crop with the same noise.
def plan_mixture(samplers: Mapping[str, Sampler], epoch: int) -> Parts:
    """An epoch of several corpora; the batch size of a corpus's sampler is its share of a batch.

    The epoch has as many utterances as all corpora together. A corpus that runs out is repeated in
    a different order, with a multiple of the list's length added to its rows, so that they are
    cropped and augmented differently.

    Args:
        samplers: one per corpus, by name, all over the same list.
        epoch: counted from 0.
    """
    sizes = np.array([sampler.batch_size for sampler in samplers.values()])
    orders = [
        _units_of_pass(sampler, epoch, corpus, 0)
        for corpus, sampler in enumerate(samplers.values())
    ]
    total = sum(map(len, orders))
    for corpus, sampler in enumerate(samplers.values()):
        passes = [orders[corpus]]
        count = len(orders[corpus])
        # Rounded up, so that no corpus lacks the last unit of the last batch.
        needed = -(-total * int(sizes[corpus]) // int(sizes.sum()))
        # A corpus that gives no units, however often it is repeated, is left empty.
        while 0 < count < needed:
            units = _units_of_pass(sampler, epoch, corpus, len(passes))
            passes.append(units.astype(np.int64) + len(passes) * len(sampler.labels))
            count += len(units)
        orders[corpus] = np.concatenate(passes)[:needed]
    return Parts(orders, np.cumsum(sizes) / sizes.sum(), tuple(samplers))


def _units_of_pass(sampler: Sampler, epoch: int, corpus: int, number: int) -> np.ndarray:
    """The units of a corpus in the order of its pass `number` of an epoch."""
    if sampler.in_parts is not None:
        # Streamed, as one part.
        (units,) = sampler.in_parts(epoch, number).units
        return units
    return sampler.units_of(
        numpy_generator(sampler.seed, CORPUS, epoch, corpus, number), sampler.eligible
    )
