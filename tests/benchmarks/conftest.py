"""Restores torch's threads, which benchmarks set for the whole process."""

import pytest
import torch


@pytest.fixture(autouse=True)
def torch_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
