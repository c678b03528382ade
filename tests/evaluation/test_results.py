"""One result from scores to results.json, report and terminal: its keys, files of earlier versions, its headline."""

import dataclasses
import json

import numpy as np
import pytest

from speakernet.data.lists import StringTable, TrialList, repeated_trials
from speakernet.evaluation.figures import cautions, figures
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.results import GroupResult, Results, SliceResult, SweepResult
from speakernet.evaluation.speakers import speakers_of
from tests.evaluation.report_runs import make_trials

FIGURES = {
    *("num_trials", "num_utterances", "eer_percent", "eer_interval_percent", "min_dcf", "num_targets"),
    *("num_duplicate_trials", "eer_threshold", "eer_convex_hull_percent", "eer_voxceleb_trainer_percent"),
    *("dcf_costs", "area_under_roc", "min_cllr", "num_speakers", "speaker_rule"),
}
DRAWN = {"num_draws", "min_dcf_interval", "interval_note", "det_band"}
CALIBRATED = {"cllr", "act_dcf", "calibration_loss"}
NEVER_MISSING = {"num_trials", "num_utterances", "eer_percent", "eer_interval_percent", "min_dcf"}


@pytest.fixture()
def trials(tmp_path):
    return make_trials(tmp_path / "trials.txt")


@pytest.fixture()
def scores(trials, random):
    return random.standard_normal(len(trials)) + 2.0 * trials.labels


def measured(trials, scores, draws=50, llrs=None):
    options = EvaluationOptions(bootstrap_samples=draws, dcf_target_priors=[0.05, 0.2])
    return figures(trials, scores, speakers_of(trials), options, 0, llrs)


def test_the_file_has_the_keys_that_it_always_had(trials, scores):
    assert set(measured(trials, scores, draws=0).to_dict()) == FIGURES
    assert set(measured(trials, scores).to_dict()) == FIGURES | DRAWN
    assert set(measured(trials, scores, draws=0, llrs=scores).to_dict()) == FIGURES | CALIBRATED
    assert list(measured(trials, scores).to_dict()["min_dcf"]) == ["0.01", "0.05", "0.2"]
    trials.labels = None
    unlabelled = measured(trials, scores).to_dict()
    assert set(unlabelled) == NEVER_MISSING | {"why_no_eer"}
    assert unlabelled["eer_percent"] is None and unlabelled["eer_interval_percent"] == [None, None]


def test_a_result_comes_back_from_its_file(trials, scores):
    rows = [
        GroupResult("a", 5.0, (4.0, 6.0), "", 40, 8, {"0.01": 0.5}),
        GroupResult("b", 5.0, None, "too few speakers", 40, 8, {"0.01": 0.5}),
        GroupResult("c", note="no targets", num_trials=4, num_targets=0),
    ]
    whole = dataclasses.replace(
        measured(trials, scores),
        slices=[SliceResult("duration", "", rows)],
        sweep=[SweepResult("noise", "dB", "both sides", [GroupResult("none", 5.0, (4.0, 6.0))])],
        checkpoint={"path": "best.pt", "sha256": "0" * 64},
        lists=[{"role": "trials", "name": "trials.txt", "sha256": ""}],
        warnings=[],
        extra={"of_a_later_version": [1]},
    )
    written = json.loads(json.dumps(whole.to_dict()))
    assert Results.from_dict(written) == whole
    assert written["warnings"] == [] and written["of_a_later_version"] == [1]
    first, second, third = written["slices"][0]["rows"]
    assert first["eer_interval_percent"] == [4.0, 6.0] and second["eer_interval_percent"] == [None, None]
    assert set(third) == {"label", "num_trials", "num_targets", "eer_percent", "eer_interval_percent", "note"}
    assert set(written["sweep"][0]["rows"][0]) == {"label", "eer_percent", "eer_interval_percent"}


GOOD = Results(
    num_trials=1100, num_targets=100, eer_percent=5.0, min_dcf={"0.01": 0.4}, dcf_costs={"c_miss": 1.0, "c_fa": 1.0}
)


def test_each_caution_has_its_sentence():
    worse = dataclasses.replace(
        GOOD, eer_percent=60.0, num_duplicate_trials=1200, num_contradicting_trials=2, interval_note="no interval: few"
    )
    assert cautions(GOOD) == []
    swapped, wrong, repeated, interval = cautions(worse)
    assert "labels swapped?" in swapped and wrong.startswith("2 trials")
    assert repeated.startswith("1,200 trials occur more than once") and interval == "no interval: few"


def test_a_min_dcf_is_doubted_where_one_false_accept_costs_as_much_as_accepting_nobody():
    """At a prior of 0.01 that is with 99 pairs of different speakers: 0.99 / 99 is 0.01."""
    for nontargets, few in ((98, True), (99, True), (100, False)):
        found = cautions(dataclasses.replace(GOOD, num_trials=100 + nontargets))
        assert bool(found) is few, nontargets
        assert not few or ("minDCF(0.01)" in found[0] and f"{nontargets} pairs" in found[0])
    dear = dataclasses.replace(GOOD, dcf_costs={"c_miss": 1.0, "c_fa": 20.0})
    assert "minDCF(0.01)" in cautions(dear)[0]


def listed(pairs, labels):
    enrol, test = np.array(pairs, dtype=np.int32).T
    known = None if labels is None else np.array(labels, dtype=np.int8)
    return TrialList(StringTable.from_strings(["a", "b", "c"]), enrol, test, known, "trials.txt")


def test_repeated_trials_are_counted_and_contradictions_named_by_their_row():
    pairs = [(0, 1), (1, 0), (0, 2), (0, 1), (0, 2), (0, 2)]
    number, rows = repeated_trials(listed(pairs, [1, 0, 0, 0, 0, 1]))
    assert number == 3 and rows.tolist() == [3, 5]
    number, rows = repeated_trials(listed(pairs, None))
    assert number == 3 and not len(rows)
    number, rows = repeated_trials(listed(pairs[:3], [1, 1, 0]))
    assert number == 0 and not len(rows)
