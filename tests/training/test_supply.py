"""A loader that fails: in one process the run ends, in one of several all go on with a stand-in until they know."""

from collections.abc import Iterator
from typing import Any

import pytest
from training_fakes import FakeLoader

from speakernet.parallel import distributed
from speakernet.parallel.group import ProcessLost
from speakernet.training.supply import Supply


class Broken(ChildProcessError):
    """Of a loader."""

    exit_status = 75


def failing() -> Iterator[Any]:
    yield "a batch"
    raise Broken("a worker was killed")


def test_one_process_is_told_that_there_is_no_more() -> None:
    supply, batches = Supply(FakeLoader()), failing()
    assert supply.next(batches, is_kept=True) == "a batch"
    assert supply.error is None and not supply.has_failed()
    assert supply.next(batches, is_kept=True) is None
    assert supply.has_failed()
    with pytest.raises(Broken, match="a worker was killed"):
        supply.raise_error(5)


def test_where_nothing_is_to_be_kept_the_error_comes_at_once() -> None:
    supply, batches = Supply(FakeLoader()), failing()
    supply.next(batches, is_kept=False)
    with pytest.raises(Broken):
        supply.next(batches, is_kept=False)


def test_one_of_several_goes_on_with_stand_ins_and_all_end_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_distributed", lambda: True)
    mine, other, batches = Supply(FakeLoader()), Supply(FakeLoader()), failing()
    mine.next(batches, is_kept=True)
    for _ in range(2):
        stand_in = mine.next(batches, is_kept=True)
        assert stand_in is not None and bool(stand_in.waveforms.isnan().all())
    gathered: list[Any] = []
    monkeypatch.setattr(distributed, "gather_objects", lambda value: gathered.append(value) or [None, gathered[0]])
    with pytest.raises(Broken):
        mine.raise_error(5)
    with pytest.raises(ProcessLost, match="a worker was killed") as caught:
        other.raise_error(5)
    assert caught.value.exit_status == 75
