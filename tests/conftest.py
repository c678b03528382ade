"""What all tests share: tiny synthetic speakers, the optional real speech, single-threaded torch."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"

# Two cores, many small tensors: more threads only make the tests slower.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real recorded speech beside the checkout."""
    if not (SHARED_DATA / "speechocean_mini" / "train_list.txt").is_file():
        pytest.skip("the real speech of ../shared/data is not on this machine")
    return SHARED_DATA


@pytest.fixture()
def random() -> np.random.Generator:
    """A generator with a fixed seed."""
    return np.random.default_rng(20260101)
