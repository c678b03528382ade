"""A seeded sample of `make hostile`: damaged files against every reader, in processes with limits."""

import random

import pytest
from cases import Reader, Tally, run_sample, shares
from mutation import mutated, mutated_tree
from targets import TARGETS

SEED = 20260101
NUM_CASES = 3000
MOST_SECONDS = 300

pytestmark = pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="copies of a process need fork")


def test_a_seed_gives_one_case_and_others_other_cases() -> None:
    content = b"some content of a file, 12" * 20
    cases = [mutated(content, random.Random(seed)) for seed in range(300)]
    assert cases == [mutated(content, random.Random(seed)) for seed in range(300)] and len(set(cases)) > 250
    trees = [repr(mutated_tree({"a": [1, {"b": 2}], "c": "d"}, random.Random(seed))) for seed in range(300)]
    assert len(set(trees)) > 100


def test_every_target_has_its_share() -> None:
    counts = shares(100_000)
    assert set(counts) == set(TARGETS) and 100_000 <= sum(counts.values()) <= 100_000 + len(TARGETS)
    assert min(counts.values()) >= 100


@pytest.mark.slow
def test_damage_is_a_clear_error_or_changes_nothing() -> None:
    tally = run_sample(SEED, NUM_CASES, MOST_SECONDS)
    assert not tally.failures, "\n".join(tally.failures[:10])
    assert tally.outcomes["read"] > 100 and tally.outcomes["refused"] > 100


@pytest.mark.slow
def test_what_dies_hangs_or_takes_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself: readers that misbehave, put in by name."""
    monkeypatch.setattr("cases.CASE_SECONDS", 2.0)
    monkeypatch.setenv("HOSTILE_MISBEHAVIOUR", "1")
    with Reader() as reader:
        for name, words in (
            ("dies", "the process ended with -11"),
            ("hangs", "no answer in 2 s"),
            ("eats", "MemoryError"),
            ("misses", "damage was not noticed"),
            ("is silent", "names no file"),
        ):
            tally = Tally()
            reader.run(name, [1, 2], tally.add)
            assert len(tally.failures) == 2 and all(words in one for one in tally.failures), (name, tally.failures)
