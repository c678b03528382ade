"""How processes of one start find each other in a store that an earlier start of them has written into.

torchrun keeps its store from one start of the processes to the next, and no number that it gives them is the same on
all machines and another in every start: what its restart count counts are the failures of each machine's own processes.
So rank 0 draws a name for the start, and goes on when everybody who is there now has answered to it.
"""

import json
import time
import uuid

from torch.distributed import PrefixStore, Store

LOOK_SECONDS = 0.05
"""Between two looks into the store."""


def name_of_start(store: Store, rank: int, world_size: int, seconds: float) -> str:
    """A name that all processes of this start know, and none before it had; each of them calls this.

    Args:
        store: that all of them see, of this start or of others before it.
        rank: of this process.
        world_size: how many there are.
        seconds: how long the others are waited for.

    Raises:
        RuntimeError: some did not come.
    """
    words = PrefixStore("speakernet/meeting", store)
    own, deadline = uuid.uuid4().hex, time.monotonic() + seconds
    if rank == 0:
        _gather_all(words, own, range(1, world_size), deadline)
        return own
    # Another word than that of a process of this number before: those who are greeted by that one wait on.
    words.set(f"here/{rank}", own)
    while time.monotonic() < deadline:
        if words.check(["greeting"]):
            name, greeted = json.loads(words.get("greeting"))
            if own in greeted:
                words.set(f"answer/{name}/{rank}", "")
                return str(name)
        time.sleep(LOOK_SECONDS)
    raise RuntimeError(f"rank 0 did not come in {seconds:g} s")


def _gather_all(words: Store, name: str, ranks: range, deadline: float) -> None:
    """Greet whoever is there by the name of this start, until all have answered.

    Raises:
        RuntimeError: some have not when the time is up.
    """
    greeted: list[str] | None = None
    here, answers = [f"here/{rank}" for rank in ranks], [f"answer/{name}/{rank}" for rank in ranks]
    while not words.check(answers):
        if words.check(here):
            # Of those who are gone too, until the one in their place has said who it is.
            found = [word.decode() for word in words.multi_get(here)]
            if found != greeted:
                words.set("greeting", json.dumps([name, found]))
                greeted = found
        if time.monotonic() > deadline:
            looked_for = here if greeted is None else answers
            missing = [str(rank) for rank, word in zip(ranks, looked_for, strict=True) if not words.check([word])]
            raise RuntimeError(f"rank {', '.join(missing[:8])} did not come")
        time.sleep(LOOK_SECONDS)


def part_of_start(store: Store, name: str) -> PrefixStore:
    """The part of a store that belongs to the start of that name; empty: the store is of this start alone."""
    return PrefixStore(f"speakernet/{name}", store)
