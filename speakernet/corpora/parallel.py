"""Run a function over many items in threads, in order, with a bounded number in flight and a progress bar.

Threads, because the work is other processes (ffmpeg), files and decompression, which all leave the interpreter free.
Items come from an iterator and results leave one by one, so that memory does not grow with their number.
"""

import collections
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
Result = TypeVar("Result")

IN_FLIGHT_PER_WORKER = 4


def parallel_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    num_jobs: int,
    description: str = "",
    total: int | None = None,
    unit: str = "file",
) -> Iterator[Result]:
    """The results of `function` over `items`, in order; an exception of one item is raised at its place.

    At most `IN_FLIGHT_PER_WORKER` items a worker are drawn ahead. With `description` a progress bar is shown.
    """
    waiting: collections.deque[Future[Result]] = collections.deque()
    limit = max(1, num_jobs) * IN_FLIGHT_PER_WORKER
    bar = tqdm(total=total, desc=description, unit=unit, disable=not description, dynamic_ncols=True, mininterval=0.5)
    with ThreadPoolExecutor(max_workers=max(1, num_jobs)) as pool, bar:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) >= limit:
                    yield waiting.popleft().result()
                    bar.update()
            while waiting:
                yield waiting.popleft().result()
                bar.update()
        finally:
            # Also reached when the caller stops early or an item failed: what has not begun is not begun.
            for future in waiting:
                future.cancel()
