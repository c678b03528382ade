"""Threads that read what the next batches need of a packed corpus that memory does not hold.

A crop that is not in memory is waited for, one after another, while the network waits too. Threads read the crops of
the next batches, several at once, and throw them away: they then are in the system's page cache when their batch is
made, here or in worker processes.
"""

import contextlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch

from speakernet.data.audio import AudioError
from speakernet.data.batches import BatchMaker, crop_places
from speakernet.data.packed.corpus import PackedRows
from speakernet.data.requests import BatchReport, BatchRequest, CropMaker

BATCHES_AHEAD = 4
"""A disk that is slow for a moment holds nobody up; their pages are a few dozen megabytes."""
NUM_THREADS = 16
"""Reads at once, more than cores: they wait for the disk."""
CROPS_PER_TASK = 4


class ReadAhead:
    """A `CropMaker` around another: the same batches, whose crops were read before.

    Args:
        maker: makes the batches.
        planner: knows which crops a request needs; it reads a packed corpus.
        num_asked: requests that `maker` works on before it hands over the first: those of worker processes.
    """

    def __init__(self, maker: CropMaker, planner: BatchMaker, num_asked: int = 0) -> None:
        assert isinstance(planner.reader, PackedRows)
        self.maker, self.planner, self.reader = maker, planner, planner.reader
        self.speeds, self.augments, self.changes_speed = maker.speeds, maker.augments, maker.changes_speed
        self._num_asked = num_asked

    def run(self, requests: list[BatchRequest]) -> Iterator[tuple[BatchRequest, torch.Tensor, BatchReport]]:
        """See `CropMaker.run`."""
        reads: deque[list[Future]] = deque()
        pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="read-ahead")
        # Those that the maker has by now are read by it.
        begun = 1 + self._num_asked
        try:
            # The pool starts its threads when it is first used: worker processes, copies of this one, are there then.
            for number, made in enumerate(self.maker.run(requests)):
                wanted = number + 1 + self._num_asked + BATCHES_AHEAD
                for request in requests[begun:wanted]:
                    reads.append(self._read(pool, request))
                begun = max(begun, wanted)
                yield made
                if reads:
                    # The maker would read it crop by crop.
                    wait(reads.popleft())
        finally:
            pool.shutdown(cancel_futures=True)

    def close(self) -> None:
        """See `CropMaker.close`."""
        self.maker.close()

    def _read(self, pool: ThreadPoolExecutor, request: BatchRequest) -> list[Future]:
        """Begin to read a request's crops."""
        rows, planner = request.rows, self.planner
        starts, counts = crop_places(request, planner.lengths[rows], planner.speeds, planner.seed)
        firsts = self.reader.starts[rows] + starts
        # A row that is not here has no samples.
        stops = np.minimum(firsts + counts, self.reader.starts[rows] + self.reader.lengths[rows])
        spans = list(zip(firsts.tolist(), stops.tolist(), strict=True))
        return [
            pool.submit(self._touch, spans[place : place + CROPS_PER_TASK])
            for place in range(0, len(spans), CROPS_PER_TASK)
        ]

    def _touch(self, spans: list[tuple[int, int]]) -> None:
        for first, stop in spans:
            # Whoever makes the batch says so, or takes another utterance.
            with contextlib.suppress(AudioError):
                self.reader.samples[first:stop]
