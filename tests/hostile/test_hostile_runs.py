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
NUM_KILLS, NUM_FAULTS = (
    int(os.environ.get(f"HOSTILE_{name}", few)) for name, few in (("KILLS", 8), ("FAULTS", 12))
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="copies of a process need fork"),
]


@pytest.fixture(scope="module")
def starter(tmp_path_factory):
    """One warm process for all runs; if there is a compiler, its disk can fail on request."""
    folder = tmp_path_factory.mktemp("hostile")
    with Starter(folder, build_shim(folder)) as one:
        yield one


@pytest.fixture(scope="module")
def failing_starter(starter):
    if not starter.can_fail:
        pytest.skip("no C compiler, or no Linux")
    return starter


def test_kills(starter):
    """Weights, optimizer, random state (a dropout draws from it), scores, figures and report."""
    both = [Kills(starter, workers, SEED) for workers in (0, 2)]
    assert both[0].expected == both[1].expected
    for kills in both:
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
            assert not faults.case(call, error, lasts=lasts), (
                f"{errno.errorcode[error]} at call {call}"
            )


def test_stores(failing_starter):
    """After a failure at any call, a store is unchanged or complete, and the same command completes
    it.
    """
    faults = StoreFaults(failing_starter)
    assert len(faults.places) > 200
    draw = random.Random(SEED)
    for error, lasts in (
        (KILL, False),
        (errno.EIO, False),
        (errno.ENOSPC, True),
        (errno.EROFS, True),
    ):
        for command, call in draw.sample(faults.places, min(len(faults.places), NUM_FAULTS // 3)):
            assert not faults.case(command, call, error, lasts=lasts), (
                f"{command}, {error} at call {call}"
            )
