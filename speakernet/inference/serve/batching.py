"""Clips of different requests embedded together: what waits while one batch is computed is the next batch."""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

import numpy as np

logger = logging.getLogger(__name__)

MOST_TOGETHER = 16
Clip = TypeVar("Clip")


class Batcher(Generic[Clip]):
    """One thread that embeds what others hand it.

    Args:
        embed: clips of different lengths to (clips, dim).

    >>> batcher = Batcher(lambda clips: np.array([[len(clip)] for clip in clips]))
    >>> batcher.submit(np.zeros(3)).result()
    array([3])
    >>> batcher.close()
    """

    def __init__(self, embed: Callable[[Sequence[Clip]], np.ndarray]) -> None:
        self._embed = embed
        self._waiting: queue.Queue[tuple[Clip, Future[np.ndarray]] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="embedding", daemon=True)
        self._thread.start()
        self.num_batches = 0
        self.num_clips = 0

    @property
    def num_waiting(self) -> int:
        """Clips that wait."""
        return self._waiting.qsize()

    def submit(self, clip: Clip) -> "Future[np.ndarray]":
        """The embedding of a clip, (dim,), as soon as its turn comes; cancelled before, it is not computed."""
        future: Future[np.ndarray] = Future()
        self._waiting.put((clip, future))
        return future

    def close(self) -> None:
        """Finish what waits, then end."""
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        is_open = True
        while is_open:
            batch = [self._waiting.get()]
            while len(batch) < MOST_TOGETHER and batch[-1] is not None:
                try:
                    batch.append(self._waiting.get_nowait())
                except queue.Empty:
                    break
            is_open = batch[-1] is not None
            self._answer([one for one in batch if one is not None and one[1].set_running_or_notify_cancel()])

    def _answer(self, batch: Sequence[tuple[Clip, "Future[np.ndarray]"]]) -> None:
        if not batch:
            return
        self.num_batches += 1
        self.num_clips += len(batch)
        try:
            embeddings = self._embed([clip for clip, _ in batch])
        except Exception as error:
            if len(batch) == 1:
                batch[0][1].set_exception(error)
                return
            # Nobody is to suffer from a neighbour.
            logger.warning("a batch of %d clips failed (%s); each is tried alone", len(batch), error)
            for one in batch:
                self._answer([one])
            return
        for (_, future), embedding in zip(batch, embeddings, strict=True):
            future.set_result(embedding)
