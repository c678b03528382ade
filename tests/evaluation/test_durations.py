"""Calibrations with seconds of speech: inputs, cut recordings, and gains for speakers left out."""

import math
from dataclasses import replace

import numpy as np
import pytest
import soundfile

from speakernet.data.opening import open_source
from speakernet.evaluation.calibration import BY_DURATION, AffineCalibration, quality_columns
from speakernet.evaluation.durations import (
    WHOLE,
    compare_left_out,
    cut_trials,
    fit_durations,
    helps,
)
from speakernet.evaluation.embedding import Embedder, Forward
from speakernet.evaluation.fitting import fit_scores
from speakernet.evaluation.scoring import VERIFYING, verifying_backend
from speakernet.inference.decision import DecisionRule
from tests.evaluation.report_runs import trials_of

RATE = 16000
SECONDS = (0.9, 2.5, 4.0)
SPEAKERS = np.repeat(np.arange(20), len(SECONDS))
BACKEND = verifying_backend({})
WAY = BACKEND.describe(VERIFYING)


class NoisyEmbedder(Embedder):
    """A speaker's direction plus noise, of which short recordings have more."""

    noise = 0.0

    def embed(self, names, source, mode, stem):
        seconds = source.lookup_table(names).seconds
        embeddings = np.random.default_rng(len(names)).standard_normal((len(names), 1, 20))
        embeddings *= 0.2 + self.noise / seconds[:, None, None]
        for row, name in enumerate(names):
            embeddings[row, 0, int(name[1:3])] += 1
        return embeddings.astype(np.float32), False


@pytest.fixture(params=[0.0, 0.3])
def cut(tmp_path, request, monkeypatch):
    """Trials of recordings of 0.9, 2.5 and 4 s, and the noise of short ones."""
    monkeypatch.setattr(NoisyEmbedder, "noise", request.param)
    names = [f"s{speaker:02d}_{row}.wav" for row, speaker in enumerate(SPEAKERS)]
    for row, name in enumerate(names):
        soundfile.write(tmp_path / name, np.zeros(round(SECONDS[row % 3] * RATE)), RATE)
    enrol, test = np.triu_indices(len(names), 1)
    labels = SPEAKERS[enrol] == SPEAKERS[test]
    trials = trials_of(names, np.stack([enrol, test], axis=1), labels)
    source = open_source(tmp_path)
    embedder = NoisyEmbedder(None, VERIFYING, Forward())
    whole, _ = embedder.embed(trials.names, source, "whole", "list")
    return trials, cut_trials(embedder, BACKEND, whole, trials, source), request.param


def test_calibration_with_durations(cut):
    trials, shortened, noise = cut
    # Forty recordings are longer than 1 and 2 s, twenty than 3 s, none than 5 s.
    assert np.bincount(shortened.recordings).tolist() == [1, 3, 4] * 20
    is_long = np.arange(len(SPEAKERS)) % 3 > 0
    for length, number in ((WHOLE, len(trials)), (1.0, is_long[trials.test].sum()), (5.0, 0)):
        assert np.count_nonzero(shortened.test_seconds == length) == number
    assert shortened.seconds == (1.0, 4.0)
    # 0.9 s counts as 1 s.
    assert shortened.columns[:, 1].min() == 0 and shortened.columns[:, 2].max() == math.log(4)
    lengths = compare_left_out(shortened, SPEAKERS, 0.05)
    assert [length.label for length in lengths] == ["1 s", "2 s", "3 s", "whole", "all"]
    without, with_durations = lengths[-1].cllr
    assert helps(lengths) == (with_durations < without)
    assert without - with_durations > 0.05 if noise else abs(without - with_durations) < 0.05
    plain = fit_scores(trials, shortened.scores[: len(trials)], 0.05, WAY)
    fit = fit_durations(shortened, plain, WAY)
    names = [threshold["name"] for threshold in fit.thresholds]
    assert names == ["eer", "far_5%", "far_1%"], "as many as the list supports"
    rule = DecisionRule.of_model_file(fit.changes(plain.changes({})), "m.pt")
    assert rule.quality[0].to_dict() == fit.calibration.to_dict()
    # Speech that the list does not have counts as the nearest that it has.
    decisions = [rule.for_seconds(*sides).decide(0.5) for sides in ((1, 4), (0.2, 60), (60, 0.2))]
    assert decisions[0] == decisions[1] == decisions[2] != rule.decide(0.5)


def test_inputs():
    values = {"duration": np.array([1.0, 4.0])}
    sides = np.array([0]), np.array([1])
    row = quality_columns(BY_DURATION, np.array([0.5]), values, *sides)
    assert row == pytest.approx(np.array([[0.5, 0, math.log(4), 0, 0.5 * math.log(4)]]))


def test_none_is_given_alone(refuse):
    words = "calibrate --model m.pt --trials t.txt --quality none duration"
    assert "none duration" in refuse(words)


LIMITS = {"name": "far_1%", "false_accept_rate": 0.01}
PLAIN = AffineCalibration(np.array([8.0]), -2.0, ("score",), 0.5)
RULE = DecisionRule(
    PLAIN,
    [{**LIMITS, "threshold": 0.5}],
    "",
    quality=(
        AffineCalibration(np.array([6.0, -1.0, 0, 2.0, 0]), -2.0, BY_DURATION, 0.5, (1.0, 8.0)),
        [{**LIMITS, "threshold": 3.0}],
    ),
)


@pytest.mark.parametrize(
    ("seconds", "ratio", "threshold"),
    [
        # The ratio is (6 + 2 ln s) score - 2 - ln s.
        ((1.0, 5.0), 1.0, 5 / 6),
        ((math.e, 5.0), 1.0, 6 / 8),
        ((100.0, 8.0), 1.0, (5 + math.log(8)) / (6 + 2 * math.log(8))),
        # Unknown: the score alone, 8 score - 2.
        ((0.0, 5.0), 2.0, 0.5),
        ((5.0, math.inf), 2.0, 0.5),
    ],
)
def test_rule_for_seconds(seconds, ratio, threshold):
    decision = RULE.for_seconds(*seconds).decide(0.5)
    assert decision.log_likelihood_ratio == pytest.approx(ratio)
    assert decision.threshold == pytest.approx(threshold)


def test_calibrations_without_a_range():
    """Those of earlier versions are not extrapolated to a minute against a word."""
    inputs = ("score", "duration min", "duration difference")
    earlier = AffineCalibration(np.array([6.0, 1.0, 9.0]), 0.0, inputs, 0.5)
    rule = replace(RULE, quality=(earlier, RULE.quality[1]))
    decision = rule.for_seconds(2.0, 60.0).decide(0.5)
    assert decision.log_likelihood_ratio == pytest.approx(3 + math.log(2))
    noisy = replace(earlier, inputs=("score", "duration min", "snr min"))
    for other in (replace(rule, quality=(noisy, [])), replace(rule, speech="whole")):
        assert other.for_seconds(2.0, 3.0) is other
