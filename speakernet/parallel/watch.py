"""Signs of life: who of the processes is gone, stopped or hangs, by name, and what is said once for all of them.

A thread of each process writes where it is into the store by which the processes found each other. Nothing waits for
it; it is read when a collective has failed, or nothing was heard of a process for as long as a collective may take.
"""

import contextlib
import hashlib
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from speakernet.distributed import work
from speakernet.parallel.environment import Place
from speakernet.parallel.meeting import part_of_start

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
SILENT_BEATS = 5
"""Who has given none of so many is gone or stopped: a busy machine delays one or two."""
LOOK_SECONDS = 5.0
STORE_SECONDS = 20.0
MOST_NAMED = 4


@dataclass(frozen=True)
class Sign:
    """The last sign of life of a process."""

    number: int
    """Of the sign: one that stays the same is no sign."""
    process: int
    host: str
    steps: int
    """Pieces of work begun."""
    name: str
    """Of the last of them."""

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, last at {self.name}"


class Watch:
    """Writes this process's signs of life and reads those of the others.

    Args:
        place: of this process.
        start: the name of this start of the processes (`meeting`).
        timeout_seconds: after so long without a sign a process is named in the log.

    Raises:
        RuntimeError: the store cannot be reached.
    """

    def __init__(self, place: Place, start: str, timeout_seconds: float) -> None:
        self.place, self.timeout_seconds = place, timeout_seconds
        # A connection of its own: the group's may be waiting for something at any moment.
        store = TCPStore(
            place.address,
            place.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_SECONDS),
        )
        self._is_lost = False
        self._store = PrefixStore("watch", part_of_start(store, start))
        self._lock = threading.Lock()
        self._number = 0
        self._beat()
        self._is_over = threading.Event()
        self._starter = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
        self._thread = threading.Thread(target=self._run, name="signs-of-life", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give no more signs."""
        self._is_over.set()
        self._thread.join()

    def is_first_to_say(self, words: str) -> bool:
        """Whether no process has said this yet; it counts as said from now on."""
        try:
            with self._asked() as store:
                return store.add(f"said/{hashlib.sha256(words.encode()).hexdigest()}", 1) == 1
        except RuntimeError:
            # The store went with the process that held it.
            return True

    def tell_end(self, why: str) -> None:
        """Leave word why this process ends before the others."""
        with contextlib.suppress(RuntimeError), self._asked() as store:
            store.set(f"end/{self.place.rank}", why)

    def request(self, name: str, value: int) -> None:
        """Leave a number that every process can see."""
        with contextlib.suppress(RuntimeError), self._asked() as store:
            store.set(f"request/{name}", str(value))

    def requested(self, name: str) -> int:
        """The number that some process has left; 0 where none has."""
        key = f"request/{name}"
        try:
            with self._asked() as store:
                return int(store.get(key)) if store.check([key]) else 0
        except RuntimeError:
            return 0

    def missing(self) -> str:
        """Which processes keep the others waiting, in words; takes a few seconds."""
        before = self._signs()
        time.sleep(SILENT_BEATS * BEAT_SECONDS)
        after = self._signs()
        if not before or not after:
            return "rank 0, or whatever kept the processes together, is gone: the store does not answer"
        ends = {rank: why for rank in after if (why := self._end_of(rank))}
        if ends:
            return "; ".join(f"rank {rank} ended: {why}" for rank, why in sorted(ends.items())[:MOST_NAMED])
        silent = {rank: sign for rank, sign in after.items() if sign.number == before[rank].number}
        if silent:
            return _named(silent, "was killed, or is stopped: it gives no sign of life")
        own = after[self.place.rank]
        behind = {rank: sign for rank, sign in after.items() if sign.steps < own.steps}
        if not behind:
            behind = {rank: sign for rank, sign in after.items() if sign.name != own.name}
        if behind:
            return _named(behind, f"hangs, while rank {self.place.rank} is at {own.name}")
        return "all processes give signs of life: the network between them failed"

    def _end_of(self, rank: int) -> str:
        key = f"end/{rank}"
        try:
            with self._asked() as store:
                return store.get(key).decode() if store.check([key]) else ""
        except RuntimeError:
            return ""

    def _signs(self) -> dict[int, Sign]:
        """The last sign of each process; none where the store is gone."""
        try:
            with self._asked() as store:
                found = store.multi_get([f"sign/{rank}" for rank in range(self.place.world_size)])
        except RuntimeError:
            return {}
        return {rank: Sign(*json.loads(values)) for rank, values in enumerate(found)}

    def _beat(self) -> None:
        self._number += 1
        values = [self._number, os.getpid(), socket.gethostname(), work.count, work.name]
        with self._asked() as store:
            store.set(f"sign/{self.place.rank}", json.dumps(values))

    @contextlib.contextmanager
    def _asked(self) -> Iterator[PrefixStore]:
        """The store, which one thread at a time may ask.

        Raises:
            RuntimeError: it is gone; it is not asked again, for torch says at length each time what it has run into.
        """
        if self._is_lost:
            raise RuntimeError("the store is gone")
        with self._lock:
            yield self._store

    def _run(self) -> None:
        looked = time.monotonic()
        seen: dict[int, tuple[int, float]] = {}
        while not self._is_over.wait(BEAT_SECONDS):
            if self._starter and os.getppid() != self._starter:
                # torchrun was killed, and the processes, which find each other without it, would train on unseen.
                self._is_lost = True
                os.kill(os.getpid(), signal.SIGTERM)
                return
            try:
                self._beat()
            except RuntimeError:
                # The store is gone, and with it rank 0: the collective under way fails and says so.
                self._is_lost = True
                return
            if self.place.rank == 0 and time.monotonic() - looked > LOOK_SECONDS:
                looked = time.monotonic()
                self._look(seen, looked)

    def _look(self, seen: dict[int, tuple[int, float]], now: float) -> None:
        """Name, once, whoever has been silent for too long; with NCCL nobody else does."""
        for rank, sign in self._signs().items():
            number, since = seen.get(rank, (0, now))
            if sign.number != number:
                seen[rank] = (sign.number, now)
            elif now - since > self.timeout_seconds:
                logger.error("rank %d (%s) has given no sign of life for %.0f s", rank, sign, now - since)
                # Not again.
                seen[rank] = (number, float("inf"))


def _named(signs: dict[int, Sign], what: str) -> str:
    shown = [f"rank {rank} ({sign}) {what}" for rank, sign in sorted(signs.items())[:MOST_NAMED]]
    more = f" and {len(signs) - MOST_NAMED} more" if len(signs) > MOST_NAMED else ""
    return "; ".join(shown) + more
