"""Pieces of work beside each other on the cores of this process, each with a share of torch's threads.

A network on a CPU gains little from a second thread within a layer: threads wait for each other behind every one of
its hundreds of operations, and what is small is not split at all. Two batches beside each other wait for nobody.
"""

import collections
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_LANES = 8
"""Each holds the activations of its batch, and all of them need the interpreter between operations."""


def lanes_of(device: torch.device | str) -> int:
    """How many batches at once are worth it there: one on a GPU, which works on one after the other."""
    return min(MOST_LANES, torch.get_num_threads()) if torch.device(device).type == "cpu" else 1


def in_lanes(work: Callable[[Item], Result], items: Iterable[Item], count: int) -> Iterator[Result]:
    """What `work` makes of each item, in order; `count` of them are worked on at once.

    Items are taken as they are needed. Torch's settings of a thread (autocast, inference mode) are those that `work`
    makes itself. One item at a time is worked on in the thread of the caller.

    Args:
        work: called in other threads.
        items: taken in the thread of the caller.
        count: 1 or more.

    Raises:
        Exception: what `work` raised, when its turn has come; no more items are taken then.

    >>> list(in_lanes(lambda number: number * number, range(5), 2))
    [0, 1, 4, 9, 16]
    """
    if count == 1:
        yield from map(work, items)
        return
    threads = torch.get_num_threads()
    share = max(1, threads // count)
    waiting: collections.deque[Future[Result]] = collections.deque()
    with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(share,)) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                # One more than is worked on, so that no lane waits for the caller.
                if len(waiting) > count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for left in waiting:
                left.cancel()
            # The number belongs to a thread, but threads that begin later take the last one that was set.
            torch.set_num_threads(threads)
