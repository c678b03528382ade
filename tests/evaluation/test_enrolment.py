"""Models with several recordings: reading, scoring by hand, slices, refusals; thresholds that hold
for several recordings of a person.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from numpy.testing import assert_allclose

from speakernet.data.lists import (
    ListError,
    read_model_trials,
)
from speakernet.evaluation.calibration import SCORE_ONLY, AffineCalibration
from speakernet.evaluation.embedding import Embedder
from speakernet.evaluation.evaluate import score_trials
from speakernet.evaluation.fitting import Fit
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.scoring import VERIFYING, Backend, Plda, verifying_backend
from speakernet.evaluation.several import (
    SeveralRecordings,
    fit_several,
    fit_several_on_people,
)
from speakernet.evaluation.speakers import speakers_of
from speakernet.inference.decision import DecisionRule
from speakernet.inference.people import StoredRecording, voices_of
from tests.commands import run_command
from tests.outcomes import results_of
from tests.tiny_recipe import write_recipe

TRIALS = "1 ann a/3.wav\n0 bob a/3.wav\n1 bob b/2.wav\n0 ann b/2.wav\n"
ENROLMENT = "ann a/1.wav a/2.wav\nbob b/1.wav\n"
EMBEDDINGS = {
    "a/1.wav": [3.0, 0.0],
    "a/2.wav": [0.0, 1.0],
    "a/3.wav": [0.0, 2.0],
    "b/1.wav": [0.8, 0.6],
    "b/2.wav": [1.0, 0.0],
}


@pytest.fixture
def lists(tmp_path):
    (tmp_path / "trials.txt").write_text(TRIALS)
    (tmp_path / "enrolment.txt").write_text(ENROLMENT)
    return tmp_path


def modelled(lists):
    return read_model_trials(lists / "trials.txt", lists / "enrolment.txt")


def test_reading(lists):
    trials = modelled(lists)
    assert trials.models is not None
    assert list(trials.names) == ["ann", "a/3.wav", "bob", "b/2.wav"]
    assert list(trials.recordings) == ["a/1.wav", "a/2.wav", "a/3.wav", "b/1.wav", "b/2.wav"]
    assert trials.models.counts.tolist() == [2, 1, 1, 1]
    pairs, trial_of = trials.by_recording()
    assert trial_of.tolist() == [0, 0, 1, 2, 3, 3]
    assert pairs.labels is not None and pairs.labels.tolist() == [1, 1, 0, 1, 0, 0]
    last = trials.take(np.array([3]))
    assert list(last.recordings) == ["a/1.wav", "a/2.wav", "b/2.wav"]
    (lists / "enrolment.txt").write_text("ann a/1.wav\nbob b/1.wav\nann\ta/2.wav\n")
    assert modelled(lists).checksum == trials.checksum, "one recording a line is the same"
    assert speakers_of(trials).ids.tolist() == [0, 0, 1, 1], "of the first recording"
    (lists / "enrolment.txt").write_text("cy c/1.wav\n")
    assert modelled(lists).models is None, "a list that names no model has recordings"


@pytest.mark.parametrize(
    ("enrolment", "message"),
    [
        ("ann\nbob b/1.wav\n", "enrolment.txt, line 1: found 'ann'"),
        ("bob b/1.wav\nann a/1.wav\nann a/1.wav\n", "line 3: .*'a/1.wav' twice"),
        ("ann a/1.wav\n", "1 of 2 enrolment names .*'bob'"),
        ("ann a/1.wav\nbob b/1.wav\na/3.wav a/3.wav\n", None),
        ("", "is empty"),
    ],
)
def test_mistakes(lists, enrolment, message):
    (lists / "enrolment.txt").write_text(enrolment)
    if message is None:
        (lists / "trials.txt").write_text("1 ann a/3.wav\n0 a/3.wav ann\n")
        message = "'ann' is a model"
    with pytest.raises(ListError, match=message):
        modelled(lists)


def scores_of(trials, **settings):
    def embed(_net, _source, names, *_, **__):
        return np.array([[EMBEDDINGS[name]] for name in names], dtype=np.float32)

    options = EvaluationOptions(eval_frames=0, **settings)
    cohort = np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]], dtype=np.float32)
    embedder = Embedder(None, options, embed_with=embed)
    backend = Backend(options, cohort=cohort if options.score_norm != "none" else None)
    source = SimpleNamespace(levels_db=lambda names: np.zeros(len(names)))
    return score_trials(embedder, backend, trials, source).scores


def test_scores_by_hand(lists):
    trials = modelled(lists)
    # The mean of (3, 0) and (0, 1) has the direction (3, 1).
    expected = [1 / 10**0.5, 0.6, 0.8, 3 / 10**0.5]
    assert_allclose(scores_of(trials), expected, atol=1e-6)
    by_scores = scores_of(trials, enrolment="scores")
    assert_allclose(by_scores, [0.5, 0.6, 0.8, 0.5], atol=1e-6)
    # Z-norm of the pairs, then their mean: (1, 0) has the cohort scores 1, 0 and 0.6.
    normalised = scores_of(trials, enrolment="scores", score_norm="z")
    mean, deviation = 1.6 / 3, np.std([1.0, 0.0, 0.6])
    other_mean, other_deviation = 1.8 / 3, np.std([0.0, 1.0, 0.8])
    first = ((0 - mean) / deviation + (1 - other_mean) / other_deviation) / 2
    assert_allclose(normalised[0], first, atol=1e-5)


@pytest.mark.slow
def test_evaluation(tiny_corpus, tmp_path, refuse):
    lines = [line.split() for line in (tiny_corpus / "trials.txt").read_text().splitlines()]
    names = sorted({name for _, *pair in lines for name in pair})
    speakers = sorted({name.split("/")[-2] for name in names})
    of = {who: [name for name in names if name.split("/")[-2] == who] for who in speakers}
    enrolment = tmp_path / "enrolment.txt"
    enrolment.write_text("".join(f"m-{who} {' '.join(rows[1:])}\n" for who, rows in of.items()))
    rows = [f"{int(a == b)} m-{a} {of[b][0]}\n" for a in speakers for b in speakers]
    (tmp_path / "trials.txt").write_text("".join(rows))
    data = {
        "data": {"test_list": str(tmp_path / "trials.txt"), "enrolment_list": str(enrolment)},
        "training": {"max_epochs": 1},
        "evaluation": {"eval_frames": 60, "bootstrap_samples": 20},
    }
    recipe = write_recipe(tmp_path / "run.yaml", tiny_corpus, tmp_path / "run", data)
    run_command(f"train --config {recipe}")
    results = results_of(tmp_path / "run")
    assert results["num_trials"] == len(speakers) ** 2
    assert {"trials", "enrolment"} <= {listed["role"] for listed in results["lists"]}
    assert results["slices"][0]["by"] == "recordings of the model"
    assert f"m-{speakers[0]} " in (tmp_path / "run" / "scores.txt").read_text()
    enrolment.write_text("stranger a/1.wav\n")
    assert "none of the models" in refuse(f"train --config {recipe} --eval")


def test_fit_by_hand():
    # Each of 20 people has the recordings (1, 0) and (0, 1), whose mean has the squared length 1/2,
    # so they deviate from it by 1 in all. Scores with strangers are 2 and 4, which deviate by 2.
    units = np.tile(np.eye(2), (20, 1))
    people = np.repeat(np.arange(20), 2)
    is_compared = people[:, None] != people
    scores = np.where(np.arange(40) % 2, 4.0, 2.0)[:, None].repeat(40, axis=1)
    # Their variance is 1, so the share of 2 is bounded.
    assert fit_several(scores, units, people, is_compared) == SeveralRecordings(3.0, 1.0)
    # Strangers who differ by 4 among themselves: a variance of 1 + 4, a share of 2 / 5.
    scores = scores + np.where(np.arange(20) % 2, 2.0, -2.0).repeat(2)
    fitted = fit_several(scores, units, people, is_compared)
    assert fitted is not None and fitted.share == pytest.approx(0.4, abs=1e-3)
    # 1 - 0.4 (1 - 0.5) = 0.8, so 6 becomes 4 + 2 / sqrt(0.8); one recording stays as it is.
    as_one = SeveralRecordings(4.0, 0.4).as_one(np.array([6.0, 6.0]), np.array([0.5, 1.0]))
    assert_allclose(as_one, [4 + 2 / 0.8**0.5, 6.0])


def voices(random, num_people, each):
    people = np.repeat(np.arange(num_people), each)
    # All voices have something in common, so that strangers are alike too.
    rows = 0.5 + random.normal(size=(num_people, 24))[people]
    rows = rows + 0.8 * random.normal(size=rows.shape)
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return units.astype(np.float32), people


@pytest.mark.parametrize("number", [2, 3, 5])
def test_thresholds_hold_for_several(random, number):
    units, people = voices(random, 120, 6)
    scores = units @ units.T
    threshold = np.quantile(scores[people[:, None] != people], 0.99)
    several = fit_several_on_people(units, people, None)
    assert several is not None
    # Other people; each is enrolled with the first recordings.
    units, people = voices(random, 300, 6)
    means = units.reshape(300, 6, -1)[:, :number].mean(axis=1)
    lengths = np.square(means).sum(axis=1, keepdims=True)
    is_stranger = np.arange(300)[:, None] != people

    def false_accepts(scores):
        return float((scores >= threshold)[is_stranger].mean())

    found = false_accepts(several.as_one(means @ units.T, lengths))
    assert found == pytest.approx(0.01, abs=0.002)
    of_mean = means / np.linalg.norm(means, axis=1, keepdims=True)
    assert false_accepts(of_mean @ units.T) > 1.1 * found > 1.3 * false_accepts(means @ units.T)


def test_decisions():
    backend = verifying_backend({}).describe(VERIFYING)
    calibration = AffineCalibration(np.array([10.0]), -4.0, SCORE_ONLY, 0.01)
    fit = Fit(calibration, [], [], backend, {}, SeveralRecordings(0.2, 0.5))
    rule = DecisionRule.of_model_file(fit.changes({}), "m.pt")
    assert rule.several == SeveralRecordings(0.2, 0.5)
    scores = np.array([0.5, 0.3])
    units = np.eye(2)
    # Equal weights: a squared length of 1/2, so 0.2 + 0.2 / sqrt(0.75). Weights 3 and 1: 10/16.
    assert rule.score_of_several(scores, units, np.ones(2)) == pytest.approx(0.2 + 0.2 / 0.75**0.5)
    weighted = 0.2 + 0.25 / (1 - 0.5 * 6 / 16) ** 0.5
    assert rule.score_of_several(scores, units, np.array([3.0, 1.0])) == pytest.approx(weighted)
    assert rule.score_of_several(np.array([0.97, 0.98]), units, np.ones(2)) == 1.0
    old = fit.changes({})
    del old["calibration"]["fits"][0]["several_recordings"]
    rule = DecisionRule.of_model_file(old, "m.pt")
    assert rule.score_of_several(scores, units, np.ones(2)) == pytest.approx(0.4), "their mean"


def test_mean_scores_of_people():
    random = np.random.default_rng(1)
    recordings = [
        StoredRecording(name, random.normal(size=4).astype(np.float32), weight)
        for name, weight in (("ann", 1.0), ("ann", 3.0), ("bob", 2.0))
    ]
    everybody = voices_of(recordings, None)
    test = everybody.units[:1]
    plda = Plda(np.array([3.0, 2.0, 1.0, 0.5]), np.ones(4))
    each = plda.scores(test, everybody.units)
    expected = [[(each[0, 0] + 3 * each[0, 1]) / 4, each[0, 2]]]
    assert_allclose(everybody.mean_scores(test, plda), expected, rtol=1e-5)
    assert everybody.squared_lengths[1] == pytest.approx(1.0)
