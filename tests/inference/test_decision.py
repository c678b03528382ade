"""Decisions and identification: the threshold used, the number of people, refusals."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest

from speakernet.evaluation.calibration import (
    SCORE_ONLY,
    AffineCalibration,
    quality_columns,
    quality_inputs,
)
from speakernet.evaluation.fitting import fit_scores
from speakernet.evaluation.scoring import VERIFYING, WHOLE, verifying_backend
from speakernet.inference.decision import DecisionRule, NotCalibratedError
from speakernet.inference.verifier import SpeakerVerifier, enroll, identify
from speakernet.models.model_file import ModelFile
from tests.conftest import tiny_voice
from tests.evaluation.report_runs import trials_of
from tests.small_networks import tiny_resnet

WAY = verifying_backend({}).describe(WHOLE)
NAMES = quality_inputs(["duration"])


def rule(*thresholds, calibration=(8.0, -2.0)):
    """A decision rule with thresholds (name, threshold, measured false-accept rate)."""
    fits = [
        {
            "inputs": ["score"],
            "weights": [calibration[0]],
            "offset": calibration[1],
            "prior": 0.5,
            "backend": WAY,
        }
    ]
    kept = [
        {"name": n, "threshold": t, "false_accept_rate": r, "backend": WAY}
        for n, t, r in thresholds
    ]
    contents = {"thresholds": kept, "calibration": {"fits": fits if calibration[0] else []}}
    return contents, DecisionRule.of_model_file(contents, "m.pt")


SHORT_LIST = [("eer", 0.479, 0.0183), ("far_5%", 0.312, 0.05)]
LONG_LIST = [
    ("eer", 0.2, 0.08),
    ("far_5%", 0.25, 0.05),
    ("far_1%", 0.4, 0.01),
    ("far_0.1%", 0.6, 0.001),
]


@pytest.mark.parametrize(
    ("thresholds", "num_people", "rate", "expected"),
    [
        # No threshold keeps 1 %, so the strictest is used, not the last.
        (SHORT_LIST, 1, None, "eer"),
        (SHORT_LIST, 1, 0.06, "far_5%"),
        (LONG_LIST, 1000, None, "far_0.1%"),
        (LONG_LIST, 10, 0.1, "far_1%"),
        # A threshold without errors on the list has no known rate.
        ([("eer", 0.3, 0.0), ("far_1%", 0.2, 0.01)], 1, None, "far_1%"),
    ],
)
def test_threshold_for_many_people(thresholds, num_people, rate, expected):
    assert rule(*thresholds)[1].threshold_of_many(num_people, rate) == expected


def test_refused_rates_and_thresholds():
    for rate in (0.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match=rf"{rate:g}; expected"):
            rule(*LONG_LIST)[1].threshold_of_many(1, rate)
    with pytest.raises(NotCalibratedError):
        rule()[1].threshold_of_many(1)
    # No list gives a threshold at this rate, however long it is.
    with pytest.raises(NotCalibratedError, match=r"5, 1, 0\.1, 0\.01 %.*--threshold"):
        rule(*LONG_LIST)[1].decide(0.5, false_accept_rate=0.1)


def test_odds_below_a_strict_threshold():
    """Odds above one do not contradict a rejection if the threshold requires higher odds."""
    below, above = (rule(*LONG_LIST)[1].decide(score) for score in (0.3, 0.5))
    assert below.log_likelihood_ratio > 0 and not below.same_speaker
    assert below.sentence.startswith("not accepted") and above.sentence.endswith("from two")


def test_odds_end_where_the_pairs_do():
    """900 pairs of one speaker support odds of 100 for two, 6,000 pairs of two support 1,000 for
    one.
    """
    contents = rule(*LONG_LIST)[0]
    contents["calibration"]["fits"][0] |= {"num_targets": 900, "num_nontargets": 6000}
    bounded = DecisionRule.of_model_file(contents, "m.pt")
    # 8 x 1.0 - 2 = 6 is below ln(1000), 6.91; 8 x 1.2 - 2 = 7.6 is above it.
    assert bounded.decide(1.0).log_likelihood_ratio == pytest.approx(6.0)
    assert not bounded.decide(1.0).is_at_bound
    above = bounded.decide(1.2)
    assert above.log_likelihood_ratio == pytest.approx(math.log(1000)) and above.is_at_bound
    assert "more than 1,000 times as likely from one speaker" in above.sentence
    below = bounded.decide(-0.5)
    assert below.log_likelihood_ratio == pytest.approx(-math.log(100))
    assert "more than 100 times as likely from two speakers" in below.sentence


def test_plda_is_shown_as_a_bounded_ratio():
    """With 2 x score - 1, a score of 4 has a ratio of 7, above the bound ln(1000); the threshold of
    1.5 has 2.
    """
    fit = AffineCalibration(np.array([2.0]), -1.0, SCORE_ONLY, 0.01)
    limits = ({"name": "far_1%", "threshold": 1.5},)
    bounds = (-math.log(100), math.log(1000))
    plda = DecisionRule(fit, limits, "calibrate", scores="PLDA", bounds=bounds)
    assert plda.decide(4.0).threshold_ratio == pytest.approx(2.0)
    assert "ratio more than 6.9078 reaches the threshold 2.0000" in plda.decide(4.0).sentence
    assert "ratio less than -4.6052" in plda.decide(-4.0).sentence
    assert "ratio 1.0000, threshold 2.0000" in plda.decide(1.0).sentence
    assert replace(plda, scores="cosine").decide(4.0).threshold_ratio is None


@pytest.mark.parametrize(("seconds", "is_made"), [(0.99, False), (1.0, True), (None, True)])
def test_too_little_speech(seconds, is_made):
    decision = rule(*LONG_LIST)[1].decide(0.9, speech_seconds=seconds)
    assert decision.is_made == decision.same_speaker == is_made
    assert (decision.log_likelihood_ratio is not None) == is_made
    assert ("times as likely" in decision.sentence) == is_made
    assert ("0.99 s of speech" in decision.sentence) != is_made


def test_files_of_both_kinds():
    """A file calibrated for speech decides about speech; one of 0.3.0 about whole recordings."""
    old = rule(*LONG_LIST)[0]
    new = copy.deepcopy(old)
    for entry in (*new["calibration"]["fits"], *new["thresholds"]):
        entry["backend"] = verifying_backend({}).describe(VERIFYING)
    for contents, kind in ((old, "whole"), (new, "detected"), ({}, "detected")):
        of_file = DecisionRule.of_model_file(contents, "m.pt")
        assert of_file.speech == kind
        assert ("speakernet calibrate" in of_file.caution) == (kind == "whole")
    both = {
        "calibration": {"fits": old["calibration"]["fits"] + new["calibration"]["fits"]},
        "thresholds": old["thresholds"] + new["thresholds"],
    }
    of_both = DecisionRule.of_model_file(both, "m.pt")
    assert of_both.speech == "detected" and list(of_both.thresholds) == new["thresholds"]


def test_decision_with_quality_measures(random_trials):
    """Short pairs have higher scores here, so the same score is enough for a long pair but not for
    a short one.
    """
    trials, scores, seconds = random_trials
    columns = quality_columns(NAMES, scores, {"duration": seconds}, trials.enrol, trials.test)
    plain = fit_scores(trials, scores, 0.5, WAY)
    fine = fit_scores(trials, scores, 0.5, WAY, columns, NAMES)
    contents = fine.changes(plain.changes({}))
    of_file = DecisionRule.of_model_file(contents, "m.pt")
    limits = {threshold["name"]: threshold["threshold"] for threshold in fine.thresholds}
    for pair in ((1.0, 1.0), (1.0, 8.0), (8.0, 8.0)):
        values = {"duration": np.array(pair)}
        row = quality_columns(NAMES, np.array([0.5]), values, np.array([0]), np.array([1]))
        decision = of_file.for_pair(values).decide(0.5)
        ratio = decision.log_likelihood_ratio
        assert ratio == pytest.approx(fine.calibration.apply(row)[0])
        assert decision.same_speaker == (ratio >= limits["far_1%"]) == (pair == (8.0, 8.0)), pair
        assert (decision.score, decision.false_accept_rate) == (0.5, 0.01)
    # A later calibration by score only is from a different list, so the one with quality measures
    # is removed.
    assert plain.changes(contents) == plain.changes({})
    assert fine.changes(contents) == contents


@pytest.fixture
def random_trials():
    random = np.random.default_rng(5)
    seconds = np.exp(random.uniform(0, 2, 60))
    enrol, test = random.integers(0, 60, (2, 4000))
    labels = random.random(4000) < 0.4
    length = np.log(seconds[enrol]) + np.log(seconds[test])
    scores = 0.4 * labels + 0.15 * random.normal(size=4000) - 0.1 * length + 0.4
    names = [f"u{row}" for row in range(60)]
    return trials_of(names, np.stack([enrol, test], axis=1), labels), scores, seconds


def test_decisions_are_finite():
    bad = float("nan")
    with pytest.raises(ValueError, match=r"finite"):
        rule(*LONG_LIST)[1].decide(bad)
    with pytest.raises(ValueError, match=r"finite"):
        rule(("far_1%", bad, 0.01))[1].decide(0.5)
    with pytest.raises(ValueError, match=r"finite"):
        rule(*LONG_LIST, calibration=(bad, 0.0))[1].decide(0.5)


def test_identify_refusals(tmp_path):
    network = tiny_resnet()
    # A score of 1 (the same recording) is below every threshold of the file except the lowest.
    strict = rule(("eer", 1.5, 0.0183), ("far_5%", 0.312, 0.05))[0]
    loose = ("eer", 0.05, 0.02), ("far_1%", 0.1, 0.01)
    unlikely = rule(*loose, calibration=(1.0, -5.0))[0]
    uncalibrated = rule(*loose, calibration=(0.0, 0.0))[0]
    clip = tiny_voice(0, 0, 2.0)

    def ask(contents, **limits):
        verifier = SpeakerVerifier(ModelFile(network, contents))
        with verifier.people(tmp_path / "p.db") as store:
            if not len(store):
                enroll(verifier, store, "Ada", [clip], sample_rate=16000)
            return identify(verifier, store, clip, sample_rate=16000, **limits)

    answer = ask(strict)
    assert answer.name is None and answer.decision.threshold == 1.5
    assert ask(strict, threshold="far_5%").name == "Ada"
    # Odds below one identify nobody, unless a threshold is given or there are no odds.
    answer = ask(unlikely)
    assert answer.decision.same_speaker and answer.decision.log_likelihood_ratio < 0
    assert answer.name is None
    assert ask(unlikely, threshold=0.1).name == ask(uncalibrated).name == "Ada"
