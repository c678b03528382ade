"""Threads beside each other on the cores of this process, and the signals that ask a process to stop."""

import collections
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_LANES = 8
"""Each holds the activations of its batch, and all of them need the interpreter between operations."""

HANGUP = getattr(signal, "SIGHUP", None)
"""What a closed terminal or a lost connection sends; Windows has none."""

PREEMPTION = getattr(signal, "SIGUSR1", None)
"""What a cluster can send some time before it takes a machine away (SLURM: --signal=USR1@60)."""

STOP_SIGNALS: tuple[signal.Signals, ...] = (
    # Ctrl-C, and what job schedulers, `timeout` and container stops send before they kill.
    *(signal.SIGINT, signal.SIGTERM),
    *((HANGUP,) if HANGUP else ()),
    *((PREEMPTION,) if PREEMPTION else ()),
)


class Stopped(Exception):
    """Work was left unfinished because the run was asked to stop; it is done again after resuming."""


def lanes_of(device: torch.device | str) -> int:
    """How many batches to work on at once: one on a GPU, which works on one after the other."""
    return min(MOST_LANES, torch.get_num_threads()) if torch.device(device).type == "cpu" else 1


def in_lanes(work: Callable[[Item], Result], items: Iterable[Item], count: int) -> Iterator[Result]:
    """What `work` makes of each item, in order; `count` of them at once, each in a thread with its share of torch's.

    A network on a CPU gains little from a second thread within a layer: threads wait for each other after every one of
    its hundreds of operations, and small ones are not split at all. Batches beside each other wait for nothing.

    Items are drawn by the caller's thread. Torch's settings of a thread (autocast, inference mode) are those that
    `work` makes itself. What `work` raises is raised at its item's place.

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
            # The number belongs to a thread, but threads that start later take the last one that was set.
            torch.set_num_threads(threads)
