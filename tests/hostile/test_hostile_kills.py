"""A run that is killed at random moments ends as one that nobody disturbed: a seeded sample of `make hostile`."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conftest import tiny_voice
from kills import differences, finish, killed_run, make_corpus


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_kills_change_nothing(tmp_path: Path, workers: int) -> None:
    make_corpus(tmp_path, tiny_voice)
    seconds = finish(tmp_path, tmp_path / "undisturbed", workers)
    killed_run(tmp_path, tmp_path / "run", workers, seconds, random.Random(workers), kills=4)
    assert not differences(tmp_path / "run", tmp_path / "undisturbed")
