"""Parallel threads on the cores of this process, and the signals that ask a process to stop."""

import collections
import functools
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_LANES = 8
"""Each lane holds the activations of its batch, and all need the interpreter between operations."""

HANGUP = getattr(signal, "SIGHUP", None)
"""Sent when the terminal is closed or the connection is lost; Windows does not have it."""

PREEMPTION = getattr(signal, "SIGUSR1", None)
"""A cluster can send it some time before it reclaims a machine (SLURM: --signal=USR1@60)."""

# Ctrl-C, and the signal that job schedulers, `timeout` and container stops send before they kill.
STOP_SIGNALS: list[signal.Signals] = [signal.SIGINT, signal.SIGTERM]
STOP_SIGNALS += filter(None, [HANGUP, PREEMPTION])


class Stopped(Exception):
    """Work was left unfinished because the run was asked to stop; it is repeated after resuming."""


@functools.cache
def use_one_thread_after_fork() -> None:
    """From now on, a process forked from this one computes with one thread; call it before a
    network is used.

    Only the forking thread exists in the new process, so an operation that is shared among torch's
    threads would wait for them forever (gunicorn --preload, multiprocessing's default on Linux up
    to Python 3.13).
    """
    # Windows cannot fork.
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))


def lanes_of(device: torch.device | str) -> int:
    """How many batches to process at once; a GPU would process them one after another."""
    if torch.device(device).type != "cpu":
        return 1
    return min(MAX_LANES, torch.get_num_threads())


def in_lanes(work: Callable[[Item], Result], items: Iterable[Item], count: int) -> Iterator[Result]:
    """Yield `work(item)` for each item, in order; `count` run at once, each in its own thread.

    A network on a CPU gains little from a second thread within a layer: threads wait for each other
    after each of its hundreds of operations, and small operations are not split at all. Parallel
    batches do not wait for each other, so each gets only an equal share of torch's threads.

    Items are drawn in the caller's thread. `work` must set torch's per-thread state (autocast,
    inference mode) itself. Its exceptions are raised in the item's turn.

    >>> list(in_lanes(lambda number: number * number, range(5), 2))
    [0, 1, 4, 9, 16]
    """
    if count == 1:
        yield from map(work, items)
        return
    # Divided among the lanes, because more threads than cores slow all of them down.
    num_threads = torch.get_num_threads()
    share = max(1, num_threads // count)
    waiting: collections.deque[Future[Result]] = collections.deque()
    with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(share,)) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                # One more item than lanes, so that no lane waits for the caller.
                if len(waiting) > count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
            # torch keeps the number per thread, but a thread that starts later inherits the last
            # one that any thread set.
            torch.set_num_threads(num_threads)
