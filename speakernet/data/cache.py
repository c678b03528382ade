"""Decoded audio kept in memory up to a number of bytes: the least recently used goes first.

Each process has its own cache (nothing is locked between workers), so the budget handed in is a worker's share.
"""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import numpy as np


class AudioCache:
    """Arrays by key within a byte budget, with hits and misses counted; safe with threads."""

    def __init__(self, budget_bytes: int) -> None:
        """A cache of at most `budget_bytes` of samples."""
        self.budget_bytes = int(budget_bytes)
        self._entries: OrderedDict[Hashable, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()
        self.used_bytes = 0
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        # An empty cache is a cache all the same: `if cache` asks whether there is one.
        return True

    def admits(self, num_samples: int) -> bool:
        """Whether float32 audio of that length is worth keeping: longer than an eighth of the budget it is not."""
        return 0 < 4 * num_samples <= self.budget_bytes // 8

    def get(self, key: Hashable) -> np.ndarray | None:
        """The array, now the most recently used; None when it is not here."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self.misses += 1
                return None
            self._entries.move_to_end(key)
            self.hits += 1
            return entry

    def put(self, key: Hashable, array: np.ndarray) -> None:
        """Keep an array (read-only from now on), dropping the least recently used ones to make room."""
        if array.nbytes > self.budget_bytes:
            # It would push out everything and then be pushed out itself.
            return
        array.flags.writeable = False
        with self._lock:
            old = self._entries.pop(key, None)
            if old is not None:
                self.used_bytes -= old.nbytes
            while self.used_bytes + array.nbytes > self.budget_bytes:
                _, dropped = self._entries.popitem(last=False)
                self.used_bytes -= dropped.nbytes
            self._entries[key] = array
            self.used_bytes += array.nbytes

    def counts(self) -> dict[str, int]:
        """Hits and misses so far."""
        return {"cache_hits": self.hits, "cache_misses": self.misses}

    def __getstate__(self) -> dict[str, Any]:
        # A worker starts with an empty cache of its own.
        return {"budget_bytes": self.budget_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["budget_bytes"])  # type: ignore[misc]
