"""The order of what cannot be shuffled as a whole: shards that are streamed.

An epoch is made of parts, from which every batch takes its share (`sampling.Parts`). The plan depends on (labels,
seed, epoch, number of streams) alone. Touches no audio.
"""

import numpy as np

from speakernet.data.sampling import BLOCK, SHARDS, Parts, Sampler, by_speaker_of
from speakernet.random import numpy_generator

FIRST_BLOCK = 1024
"""Utterances: training begins when the first shards are here, not the whole buffer."""


def streamed(sampler: Sampler, shards: np.ndarray, num_streams: int, epoch: int) -> Parts:
    """An epoch of a corpus that is read shard by shard, each stream for a process of its own.

    The shards come in random order, a run of them for each stream (one at the border is in two). Each stream is cut
    into blocks of `data.shuffle_buffer` utterances, all streams together, and each block is shuffled, or dealt into
    groups, as a whole corpus is.

    Args:
        sampler: orders a block.
        shards: the shard of each row of the list, int32 (rows,).
        num_streams: 1, or the number of processes.
        epoch: counted from 0.
    """
    seed, eligible, buffer = sampler.seed, sampler.eligible, sampler.options.shuffle_buffer
    place = numpy_generator(seed, SHARDS, epoch).permutation(int(shards.max()) + 1)[shards[eligible]]
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
            random = numpy_generator(seed, BLOCK, epoch, stream, len(blocks))
            blocks.append(sampler.units_of(random, mine[first : first + size]))
            first, size = first + size, min(2 * size, max(1, buffer // num_streams))
        found.append(np.concatenate(blocks))
    return Parts(found, np.arange(1, num_streams + 1) / num_streams)
