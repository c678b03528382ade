"""What is said beside figures that a list does not support: repeated and contradicting trials, too few, upside down."""

import dataclasses

import numpy as np

from speakernet.data.lists import StringTable, TrialList, repeated_trials
from speakernet.evaluation.figures import cautions
from speakernet.evaluation.results import Results

GOOD = Results(
    num_trials=1100, num_targets=100, eer_percent=5.0, min_dcf={"0.01": 0.4}, dcf_costs={"c_miss": 1.0, "c_fa": 1.0}
)


def listed(pairs: list[tuple[int, int]], labels: list[int] | None) -> TrialList:
    enrol, test = np.array(pairs, dtype=np.int32).T
    known = None if labels is None else np.array(labels, dtype=np.int8)
    return TrialList(StringTable.from_strings(["a", "b", "c"]), enrol, test, known, "trials.txt")


def test_repeated_trials_are_counted_and_contradictions_named_by_their_row() -> None:
    pairs = [(0, 1), (1, 0), (0, 2), (0, 1), (0, 2), (0, 2)]
    number, rows = repeated_trials(listed(pairs, [1, 0, 0, 0, 0, 1]))
    assert number == 3 and rows.tolist() == [3, 5]
    number, rows = repeated_trials(listed(pairs, None))
    assert number == 3 and not len(rows)
    number, rows = repeated_trials(listed(pairs[:3], [1, 1, 0]))
    assert number == 0 and not len(rows)


def test_a_good_list_has_no_caution() -> None:
    assert cautions(GOOD) == []
    assert cautions(Results(num_trials=4, why_no_eer="unlabelled")) == []


def test_each_caution_has_its_sentence() -> None:
    worse = dataclasses.replace(
        GOOD, eer_percent=60.0, num_duplicate_trials=1200, num_contradicting_trials=2, interval_note="no interval: few"
    )
    swapped, wrong, repeated, interval = cautions(worse)
    assert "labels swapped?" in swapped and wrong.startswith("2 trials")
    assert repeated.startswith("1,200 trials occur more than once") and interval == "no interval: few"


def test_a_min_dcf_is_doubted_where_one_false_accept_costs_as_much_as_accepting_nobody() -> None:
    """At a prior of 0.01 that is with 99 pairs of different speakers: 0.99 / 99 is 0.01."""
    for nontargets, few in ((98, True), (99, True), (100, False)):
        found = cautions(dataclasses.replace(GOOD, num_trials=100 + nontargets))
        assert bool(found) is few, nontargets
        assert not few or ("minDCF(0.01)" in found[0] and f"{nontargets} pairs" in found[0])
    dear = dataclasses.replace(GOOD, dcf_costs={"c_miss": 1.0, "c_fa": 20.0})
    assert "minDCF(0.01)" in cautions(dear)[0]
