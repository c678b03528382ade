"""The batches as the trainer gets them, and what becomes of a loader that fails in one process among several.

The others are then in the midst of a step, which none of them can leave: so the process takes part in it with NaN, by
which all of them undo it, and tells them why with its gradients.
"""

import logging
from collections.abc import Iterator
from typing import NoReturn

from speakernet.parallel import distributed
from speakernet.parallel.group import ProcessLost
from speakernet.training.interfaces import BatchLike, Loader

logger = logging.getLogger(__name__)


class Supply:
    """Gives the batches of a loader, and stand-ins once it has failed.

    Args:
        loader: makes them.

    Attributes:
        error: of the loader of this process; None while it gives batches.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.error: Exception | None = None

    def next(self, batches: Iterator[BatchLike], *, is_kept: bool) -> BatchLike | None:
        """The next batch; None where none is left, or the loader of the only process has failed, as `error` says.

        Args:
            batches: of the loader.
            is_kept: whether anything was trained yet that is to be kept; else an error of the loader is raised.
        """
        if self.error is None:
            try:
                return next(batches, None)
            except Exception as error:
                if not is_kept:
                    raise
                self.error = error
        if not distributed.is_distributed():
            return None
        stand_in: BatchLike = self.loader.stand_in()
        return stand_in

    def has_failed(self) -> bool:
        """Whether the loader of some process has; every process calls it."""
        return any(distributed.gather_objects(self.error is not None))

    def raise_error(self, step: int) -> NoReturn:
        """End the run, which was saved after `step`; every process calls it.

        Raises:
            Exception: the loader's, in the process that it is of.
            ProcessLost: in the others, with the same words.
        """
        own = self.error
        found = own and (type(own).__name__, str(own), getattr(own, "exit_status", 1))
        name, words, status = next(one for one in distributed.gather_objects(found) if one)
        if distributed.is_main():
            logger.error("%s: last.pt was written after step %d", name, step)
        raise own or ProcessLost(words, status)
