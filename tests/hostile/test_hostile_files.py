"""Damaged files against every reader, in processes with limits; HOSTILE_CASES sets how many (`make
hostile`).
"""

import math
import os
import random

import cases
import pytest
from targets import TARGETS

SEED = 20260101
NUM_CASES = int(os.environ.get("HOSTILE_CASES", "700"))

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes under limits need fork")


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_damaged_files(name):
    draw = random.Random(SEED)
    # A report takes a second, every other reader a moment.
    count = math.ceil(NUM_CASES / len(TARGETS) / (4 if name == "report" else 1))
    outcomes, failures = cases.run(name, [draw.randrange(1 << 31) for _ in range(count)])
    assert not failures, "\n".join(failures[:10])
    assert outcomes["read"] + outcomes["refused"]
