"""Runs and stores that are killed, or whose disk fails, lose nothing; `make hostile` sets how many are tried."""

import errno
import os
import random
from pathlib import Path

import pytest
from runs import DiskFaults, Kills, Starter, build_shim
from stores import KILL, StoreFaults

SEED = 20260101
NUM_KILLS, NUM_FAULTS = (int(os.environ.get(f"HOSTILE_{name}", few)) for name, few in (("KILLS", 16), ("FAULTS", 24)))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="copies of a process need fork"),
]


@pytest.mark.parametrize("workers", [0, 2])
def test_kills_change_nothing(tmp_path: Path, workers: int) -> None:
    """Weights, optimizer, random state (a dropout draws from it), scores, figures and report."""
    with Starter(tmp_path) as starter:
        kills = Kills(starter, workers, SEED)
        for _ in range(NUM_KILLS // 8):
            assert not kills.round(4)
        assert kills.num_kills >= NUM_KILLS // 5


def test_workers_change_nothing(tmp_path: Path) -> None:
    with Starter(tmp_path) as starter:
        assert Kills(starter, 0, SEED).expected == Kills(starter, 2, SEED).expected


def test_a_failing_disk_loses_lines_at_most(tmp_path: Path) -> None:
    shim = build_shim(tmp_path)
    if shim is None:
        pytest.skip("no C compiler, or no Linux")
    draw = random.Random(SEED)
    with Starter(tmp_path, shim) as starter:
        faults = DiskFaults(starter)
        assert faults.num_calls > 100
        for error, lasts in ((errno.EIO, False), (errno.ENOSPC, True)):
            for _ in range(NUM_FAULTS // 6):
                call = draw.randint(1, faults.num_calls)
                assert not faults.case(call, error, lasts=lasts), f"{errno.errorcode[error]} at call {call}"


def test_a_store_is_as_it_was_or_as_it_should_be(tmp_path: Path) -> None:
    """And the same command comes to what it should, wherever it was cut short."""
    shim = build_shim(tmp_path)
    if shim is None:
        pytest.skip("no C compiler, or no Linux")
    with Starter(tmp_path, shim) as starter:
        faults = StoreFaults(starter)
        places = list(faults.cases())
        assert len(places) > 200
        draw = random.Random(SEED)
        for error, lasts in ((KILL, False), (errno.EIO, False), (errno.ENOSPC, True), (errno.EROFS, True)):
            for command, call in draw.sample(places, min(len(places), NUM_FAULTS // 4)):
                assert not faults.case(command, call, error, lasts=lasts), f"{command}, {error} at call {call}"
