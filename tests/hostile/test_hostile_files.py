"""Damaged and hostile files against every reader: a seeded sample of what `make hostile` runs."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fuzz import failures
from mutations import mutated
from readers import READERS

SEED = 20260101
CASES = 120


def test_a_case_is_the_same_every_time_and_no_case_is_another() -> None:
    cases = [mutated(b"some content of a file" * 20, case, SEED) for case in range(200)]
    assert cases == [mutated(b"some content of a file" * 20, case, SEED) for case in range(200)]
    assert len(set(cases)) > 150


@pytest.mark.parametrize("name", READERS)
def test_every_reader_reads_its_own_file(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    reader.read(reader.make(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_damage_is_an_error_that_names_the_file_or_changes_nothing(name: str) -> None:
    found = list(failures(name, 0, CASES, SEED))
    assert not found, "\n".join(f"case {one['case']}: {one['problem']}" for one in found[:5])
