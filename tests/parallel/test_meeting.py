"""Processes that are started together agree on a name, whatever those before them have left in their store."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from speakernet.parallel.meeting import name_of_start


@pytest.fixture()
def kept() -> TCPStore:
    """A store that outlives several starts, as torchrun's does."""
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def meet(kept: TCPStore, ranks: tuple[int, ...] = (0, 1, 2), seconds: float = 20.0) -> list[str]:
    """What these of three processes come to: a name, or why there is none."""

    def come(rank: int) -> str:
        # As in processes: each has a connection of its own.
        store = TCPStore("localhost", kept.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
        try:
            return name_of_start(store, rank, 3, seconds)
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(come, ranks))


def test_each_start_has_a_name_of_its_own(kept: TCPStore) -> None:
    names = [meet(kept) for _ in range(3)]
    assert all(len(set(of_one)) == 1 for of_one in names)
    assert len({of_one[0] for of_one in names}) == 3


def test_a_start_that_was_broken_off_misleads_nobody(kept: TCPStore) -> None:
    assert meet(kept, (0, 1), 0.3) == ["rank 2 did not come", "rank 0 did not come in 0.3 s"]
    before = meet(kept)
    # Words of all three are there now: the first greets one that is gone, and has no answer from it.
    assert meet(kept, (0, 2), 0.5)[0] == "rank 1 did not come"
    assert meet(kept, (1,), 0.3) == ["rank 0 did not come in 0.3 s"]
    after = meet(kept)
    assert len(set(before)) == len(set(after)) == 1 and before[0] != after[0]
