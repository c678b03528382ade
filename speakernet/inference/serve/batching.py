"""Clips of all requests are embedded together, in one thread."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

MAX_TOGETHER = 16
CLOSE_SECONDS = 1.0


class Batcher:
    """A thread that embeds clips from other threads; clips that arrive while a batch is computed
    form the next one.

    >>> batcher = Batcher(lambda clips: np.array([[len(clip)] for clip in clips]))
    >>> batcher.submit(np.zeros(3)).result()
    array([3])
    >>> batcher.close()
    """

    def __init__(self, embed: Callable[[list[Any]], np.ndarray]) -> None:
        self._embed = embed
        self.waiting: queue.Queue[tuple[Any, Future[np.ndarray]] | None] = queue.Queue()
        self.num_batches = self.num_clips = 0
        self._is_closed = False
        # A daemon, so that a long batch cannot keep the server from ending.
        self._thread = threading.Thread(target=self._work, name="embedding", daemon=True)
        self._thread.start()

    def submit(self, clip: Any) -> "Future[np.ndarray]":
        """Queue a clip; the future gives its embedding, (dim,). A cancelled future is not
        computed.
        """
        future: Future[np.ndarray] = Future()
        if self._is_closed:
            future.cancel()
        self.waiting.put((clip, future))
        return future

    def close(self) -> None:
        """Finish the current batch and cancel everything that waits."""
        self._is_closed = True
        self.waiting.put(None)
        self._thread.join(CLOSE_SECONDS)
        while not self.waiting.empty():
            if (request := self.waiting.get()) is not None:
                request[1].cancel()

    def _work(self) -> None:
        while not self._is_closed:
            # Only the first clip is waited for, so that a single request is not delayed. Others
            # join if they are there already.
            batch = [self.waiting.get()]
            while len(batch) < MAX_TOGETHER and not self.waiting.empty():
                batch.append(self.waiting.get())
            # A request that has timed out is cancelled and not computed; None only wakes the thread
            # up.
            running = [
                request
                for request in batch
                if request is not None and request[1].set_running_or_notify_cancel()
            ]
            if running:
                self.num_batches += 1
                self.num_clips += len(running)
                self._answer(running)

    def _answer(self, batch: Sequence[tuple[Any, "Future[np.ndarray]"]]) -> None:
        try:
            embeddings = self._embed([clip for clip, _ in batch])
        except Exception as error:
            if len(batch) == 1:
                batch[0][1].set_exception(error)
                return
            # One request must not fail because of a clip in another.
            for request in batch:
                self._answer([request])
            return
        for (_, future), embedding in zip(batch, embeddings, strict=True):
            future.set_result(embedding)
