"""Rank facts and collectives that do nothing in one process, so that no caller asks whether it is distributed.

torch.distributed is looked up, not imported: a process group runs only where somebody has imported it
(`speakernet.parallel.group` starts and ends it), and a command that is mistyped is told so without waiting for torch.
"""

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Work:
    """Where this process is in its work, for whoever has to say which process hangs."""

    def __init__(self) -> None:
        self.count, self.name = 0, "the start"

    def at(self, name: str) -> None:
        """Note what is begun now."""
        self.count, self.name = self.count + 1, name


work = Work()
"""Of this process."""


def is_distributed() -> bool:
    """Whether a process group of more than one process is running."""
    return _group() is not None


def rank() -> int:
    """This process's number, 0 when alone."""
    group = _group()
    return int(group.get_rank()) if group else 0


def world_size() -> int:
    """Number of processes, 1 when alone."""
    group = _group()
    return int(group.get_world_size()) if group else 1


def local_rank() -> int:
    """This process's number on its machine (torchrun's LOCAL_RANK), 0 when alone."""
    return int(os.environ.get("LOCAL_RANK", "0")) if is_distributed() else 0


def local_world_size() -> int:
    """Number of processes on this machine (torchrun's LOCAL_WORLD_SIZE), 1 when alone."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if is_distributed() else 1


def is_main() -> bool:
    """Whether this process writes files and shows progress."""
    return rank() == 0


def barrier() -> None:
    """Wait until every process is here."""
    group = _group()
    if group:
        group.barrier()


def broadcast_object(value: T) -> T:
    """Rank 0's value, on every rank."""
    group = _group()
    if not group:
        return value
    # torch puts what it received into the list that it was given.
    box = [value]
    group.broadcast_object_list(box, src=0)
    return box[0]


def gather_objects(value: T) -> list[T]:
    """Every rank's value, in rank order, on every rank."""
    group = _group()
    if not group:
        return [value]
    gathered: list[Any] = [None] * world_size()
    group.all_gather_object(gathered, value)
    return gathered


def from_main(make: Callable[[], T]) -> T:
    """What rank 0 makes, on every rank: the others may lie on machines that do not see its files.

    Raises:
        ValueError: or OSError, on every rank, where rank 0 raised it.
    """
    made: Any = None
    error: Exception | None = None
    if is_main():
        try:
            made = make()
        except (ValueError, OSError) as found:
            if not is_distributed():
                raise
            error = found
    made, error = broadcast_object((made, error))
    if error is not None:
        raise error
    return made  # type: ignore[no-any-return]


def _group() -> Any:
    """torch.distributed where it runs a group of several processes, else None."""
    group = sys.modules.get("torch.distributed")
    is_running = group is not None and group.is_available() and group.is_initialized()
    return group if is_running and group.get_world_size() > 1 else None  # type: ignore[union-attr]
