"""Runs and stores that are killed, or whose disk fails, lose nothing; `make hostile` sets the
number of cases.
"""

import errno
import os
import random

import pytest
from runs import DiskFaults, Kills, Starter, build_shim
from stores import KILL, StoreFaults

SEED = 20260101
NUM_KILLS = int(os.environ.get("HOSTILE_KILLS", "8"))
NUM_FAULTS = int(os.environ.get("HOSTILE_FAULTS", "12"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="copies of a process need fork"),
]


@pytest.fixture(scope="module")
def starter(tiny_corpus, tmp_path_factory):
    """One warm process for all runs; if there is a compiler, its disk can fail on request."""
    folder = tmp_path_factory.mktemp("hostile")
    with Starter(folder, tiny_corpus, build_shim(folder)) as starter:
        yield starter


@pytest.fixture(scope="module")
def failing_starter(starter):
    if not starter.can_fail:
        pytest.skip("no C compiler, or no Linux")
    return starter


def test_kills(starter):
    """Weights, optimizer, random state (a dropout draws from it), scores, figures and report."""
    alone = Kills(starter, 0, SEED)
    with_workers = Kills(starter, 2, SEED)
    assert alone.expected == with_workers.expected
    for kills in (alone, with_workers):
        for _ in range(NUM_KILLS // 8):
            assert not kills.round(4)
        assert kills.num_kills >= NUM_KILLS // 5


def test_failing_disk(failing_starter):
    draw = random.Random(SEED)
    faults = DiskFaults(failing_starter)
    assert faults.num_calls > 100
    for error, lasts in ((errno.EIO, False), (errno.ENOSPC, True)):
        for _ in range(NUM_FAULTS // 6):
            call = draw.randint(1, faults.num_calls)
            problems = faults.case(call, error, lasts=lasts)
            assert not problems, f"{errno.errorcode[error]} at call {call}"


def test_stores(failing_starter):
    """After a failure at any call, a store is unchanged or complete, and the same command completes
    it.
    """
    faults = StoreFaults(failing_starter)
    assert len(faults.places) > 200
    draw = random.Random(SEED)
    for error in (KILL, errno.EIO, errno.ENOSPC, errno.EROFS):
        lasts = error in (errno.ENOSPC, errno.EROFS)
        for command, call in draw.sample(faults.places, min(len(faults.places), NUM_FAULTS // 3)):
            problems = faults.case(command, call, error, lasts=lasts)
            assert not problems, f"{command}, {error} at call {call}"
