"""Metrics, scoring, normalisation, calibration and intervals: by hand, brute force, plain loops,
simulations.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from speakernet.evaluation import figures as boot
from speakernet.evaluation import metrics, scoring
from speakernet.evaluation.calibration import quality_columns, quality_inputs
from speakernet.evaluation.figures import figures
from speakernet.evaluation.fitting import REGULARIZATION, fit_calibration, named_thresholds
from speakernet.evaluation.metrics import (
    cllr,
    eer,
    error_rates,
    min_cllr,
    min_dcf_point,
)
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.speakers import speakers_of
from tests.evaluation.report_runs import trials_of

trial_lists = st.lists(
    st.tuples(st.integers(-5, 5), st.booleans()), min_size=2, max_size=40
).filter(lambda rows: 0 < sum(label for _, label in rows) < len(rows))


def brute_points(scores, labels):
    """(miss, false accept) at every threshold, by counting."""
    targets = scores[labels]
    others = scores[~labels]
    thresholds = [*sorted(set(scores.tolist())), np.inf]
    return [(float(np.mean(targets < t)), float(np.mean(others >= t))) for t in thresholds]


@given(trial_lists)
def test_rates_and_costs(rows):
    scores, labels = map(np.array, zip(*rows, strict=True))
    rates = error_rates(scores.astype(float), labels)
    points = brute_points(scores, labels)
    assert_allclose(rates.miss_rates, [miss for miss, _ in points])
    assert_allclose(rates.false_accept_rates, [accepted for _, accepted in points])
    for prior in (0.01, 0.5):
        costs = [prior * miss + (1 - prior) * accepted for miss, accepted in points]
        expected = min(costs) / min(prior, 1 - prior)
        assert min_dcf_point(rates, prior)[0] == pytest.approx(expected)
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[labels] for b in scores[~labels]]
    assert metrics.area_under_roc(rates) == pytest.approx(np.mean(pairs))
    # The ROCCH-EER is the largest Bayes error rate over all priors.
    miss, accepted = np.array(points).T
    priors = np.linspace(0, 1, 2001)[:, None]
    hull = (priors * miss + (1 - priors) * accepted).min(axis=1).max()
    assert metrics.hull_eer_percent(rates) / 100 == pytest.approx(hull, abs=1e-3)


@given(trial_lists)
def test_min_cllr(rows):
    isotonic = pytest.importorskip("scipy.optimize").isotonic_regression
    scores, labels = map(np.array, zip(*rows, strict=True))
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    posterior = isotonic(np.bincount(inverse, labels) / counts, weights=counts).x[inverse]
    with np.errstate(divide="ignore"):
        llrs = np.log(posterior) - np.log1p(-posterior) - np.log(labels.sum() / (~labels).sum())
    rates = error_rates(scores.astype(float), labels)
    assert min_cllr(rates) == pytest.approx(cllr(llrs, labels), abs=1e-9)


def test_figures_by_hand():
    # No misses costs a false-accept rate of one half: 0.99 * 0.5 / 0.01; rejecting 0.35 costs half
    # the targets.
    rates = error_rates(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1]))
    assert min_dcf_point(rates, 0.01)[0] == pytest.approx(0.5)


def test_figures_of_ratios():
    assert cllr(np.log([1 / 3, 3.0]), np.array([0, 1])) == pytest.approx(np.log2(4 / 3))
    # At a prior of 0.01 the threshold is ln 99 = 4.595, so one of two targets is missed.
    rates = error_rates(np.array([-6.0, -1.0, 5.0, 2.0]), np.array([0, 0, 1, 1]))
    assert metrics.act_dcf(rates, 0.01) == pytest.approx(0.5)


@pytest.mark.parametrize("seed", range(20))
def test_eer_of_voxceleb_trainer(seed):
    curves = pytest.importorskip(
        "sklearn.metrics", reason="scikit-learn, which that tool uses, is not installed"
    )
    random = np.random.default_rng(seed)
    labels = random.random(60) < 0.3
    scores = np.round(random.normal(size=60) + 1.2 * labels, 1 if seed % 2 else 6)
    accepted, hit, _ = curves.roc_curve(labels, scores, pos_label=1)
    miss = 1 - hit
    nearest = np.nanargmin(np.abs(miss - accepted))
    assert metrics.voxceleb_trainer_eer_percent(error_rates(scores, labels)) == pytest.approx(
        100 * max(accepted[nearest], miss[nearest])
    )


@pytest.mark.parametrize(
    ("last", "labels", "message"),
    [
        (0.2, [1, 1], "a non-target trial"),
        (0.2, [0, 0], "a target trial"),
        (np.nan, [0, 1], r"1 of 2 scores are NaN \(trials 2\)"),
        (0.2, [0, 1, 1], r"\(2,\) with labels of shape \(3,\)"),
    ],
)
def test_lists_without_error_rates(last, labels, message):
    with pytest.raises(ValueError, match=message):
        metrics.eer(np.array([0.1, last]), np.array(labels))


def trial_list(rows):
    names = list(dict.fromkeys(name for _, *pair in rows for name in pair))
    pairs = [(names.index(enrol), names.index(test)) for _, enrol, test in rows]
    return trials_of(names, pairs, [label for label, *_ in rows])


def test_cosine(random):
    embeddings = random.normal(size=(40, 16)).astype(np.float32)
    enrol, test = random.integers(0, 40, (2, 5000)).astype(np.int32)
    units = scoring.mean_embeddings(embeddings)
    expected = [
        embeddings[a]
        @ embeddings[b]
        / np.linalg.norm(embeddings[a])
        / np.linalg.norm(embeddings[b])
        for a, b in zip(enrol, test, strict=True)
    ]
    assert_allclose(scoring.cosine_scores(units, enrol, test), expected, atol=1e-5)


def test_cohort_on_a_device(random, monkeypatch):
    """The code for accelerators on a CPU device."""
    units = scoring.mean_embeddings(random.normal(size=(50, 16)).astype(np.float32))
    cohort = scoring.mean_embeddings(random.normal(size=(40, 16)).astype(np.float32))
    highest = scoring.highest
    expected = scoring.cohort_statistics(units, cohort, 7)
    monkeypatch.setattr(
        scoring, "highest", lambda *given, is_on_host: highest(*given, is_on_host=False)
    )
    found = scoring.cohort_statistics(units, cohort, 7)
    assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("normalize", [True, False])
def test_mean_distance(random, normalize):
    crops = torch.from_numpy(random.normal(size=(12, 10, 32)).astype(np.float32))
    enrol, test = random.integers(0, 12, (2, 700))
    table = torch.nn.functional.normalize(crops, dim=2) if normalize else crops
    expected = [
        -float(torch.cdist(table[a], table[b], compute_mode="donot_use_mm_for_euclid_dist").mean())
        for a, b in zip(enrol, test, strict=True)
    ]
    scores = scoring.mean_distance_scores(crops.numpy(), enrol, test, normalize=normalize)
    # A crop against itself: rounding of 1 - 1 under a square root.
    assert_allclose(scores, expected, atol=2e-4)


@pytest.mark.parametrize("method", ["z", "t", "s", "as"])
def test_score_normalisation(random, method):
    units = scoring.mean_embeddings(random.normal(size=(9, 8)).astype(np.float32))
    cohort = scoring.mean_embeddings(random.normal(size=(30, 8)).astype(np.float32))
    enrol, test = random.integers(0, 9, (2, 60))
    raw = scoring.cosine_scores(units, enrol, test)
    top = 7 if method == "as" else None
    expected = []
    for score, *pair in zip(raw, enrol, test, strict=True):
        sides = []
        for row in pair:
            against = np.sort(cohort @ units[row])[::-1][:top]
            sides.append((score - np.mean(against)) / np.std(against))
        expected.append({"z": sides[0], "t": sides[1]}.get(method, np.mean(sides)))
    statistics = scoring.cohort_statistics(units, cohort, top)
    found = scoring.normalize_scores(raw, enrol, test, statistics, method)
    assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_quality_calibration(random):
    """Equals scikit-learn with weights by the prior; C is 1 / (2 * our regularisation)."""
    linear_model = pytest.importorskip(
        "sklearn.linear_model", reason="scikit-learn is an extra of the tests"
    )
    seconds = np.exp(random.uniform(0, 2, 40))
    cohort = random.normal(0.1, 0.1, 40)
    enrol, test = random.integers(0, 40, (2, 2000))
    labels = random.random(2000) < 0.3
    scores = (
        random.normal(size=2000) + 1.5 * labels + np.log(np.minimum(seconds[enrol], seconds[test]))
    )
    names = quality_inputs(["duration", "cohort"])
    prior = 0.1
    columns = quality_columns(names, scores, {"duration": seconds, "cohort": cohort}, enrol, test)
    found = fit_calibration(columns, labels, prior, names)
    standard = (columns - columns.mean(axis=0)) / columns.std(axis=0)
    shares = np.where(labels, prior / labels.sum(), (1 - prior) / (~labels).sum())
    reference = linear_model.LogisticRegression(
        C=1 / (2 * REGULARIZATION), tol=1e-10, max_iter=10_000
    )
    expected = reference.fit(standard, labels, shares).decision_function(standard) - np.log(
        prior / (1 - prior)
    )
    assert_allclose(found.apply(columns), expected, atol=5e-3)


def test_named_thresholds(random):
    labels = np.arange(3000) < 500
    scores = random.normal(size=3000) + 2 * labels
    thresholds, refused = named_thresholds(error_rates(scores, labels), {"score": "cosine"})
    assert [limit["name"] for limit in thresholds] == ["eer", "far_5%", "far_1%"]
    for limit, rate in zip(thresholds[1:], (0.05, 0.01), strict=True):
        assert np.mean(scores[~labels] >= limit["threshold"]) == pytest.approx(rate)
    assert len(refused) == 2 and "2,500" in refused[0] and "10,000" in refused[0]
    assert thresholds[0]["backend"] == {"score": "cosine"}
    # Without errors, the threshold is half-way between the lowest target and the highest
    # non-target.
    rates = error_rates(np.array([0.1, 0.3, 0.7, 0.8]), np.array([0, 0, 1, 1]))
    (limit,) = named_thresholds(rates, {})[0]
    assert limit["threshold"] == 0.5 and limit["miss_rate"] == limit["false_accept_rate"] == 0


@pytest.mark.parametrize("counts", [[2, 0, 1, 3, 1, 0], [1] * 6])
def test_weights_of_a_draw(random, counts):
    labels = random.random(200) < 0.4
    scores = np.round(random.normal(size=200) + labels, 1)
    enrol = random.integers(0, 6, 200)
    test = np.where(labels, enrol, (enrol + 1 + random.integers(0, 5, 200)) % 6)
    drawn = np.array(counts)
    prepared = boot.SpeakerBootstrap(scores, labels, enrol, test, {"0.01": (0.01, 1.0, 1.0)})
    rows = np.repeat(np.arange(200), np.where(labels, 1, drawn[test]) * drawn[enrol])
    rates = error_rates(scores[rows], labels[rows])
    expected = eer(scores[rows], labels[rows]), min_dcf_point(rates, 0.01)[0]
    assert tuple(prepared.figures(drawn)[:2]) == pytest.approx(expected)


def test_speakers_by_name():
    rows = [(1, "dev/s1/a", "dev/s1/b"), (0, "dev/s1/a", "dev/s2/a"), (1, "dev/s2/a", "dev/s2/b")]
    found = speakers_of(trial_list(rows))
    assert found.rule.startswith("part 2 of")
    assert (found.count, found.ids.tolist()) == (2, [0, 0, 1, 1])
    assert list(found.names) == ["s1", "s2"] and found.sessions is None


def test_speakers_of_converted_recordings():
    anna, converted, bo = "Anna B/mon/1.wav", "/x/converted/Anna B/tue/2.m4a.wav", "Bo/mon/1.wav"
    speakers = speakers_of(trial_list([(1, anna, converted), (0, converted, bo)]))
    assert list(speakers.names) == ["Anna B", "Bo"]
    assert speakers.ids.tolist() == [0, 0, 1] and speakers.sessions.tolist() == [0, 1, 2]


def test_sessions(tmp_path):
    rows = [
        (1, "s1/v1/a", "s1/v1/b"),
        (1, "s1/v1/a", "s1/v2/a"),
        (0, "s1/v1/a", "s2/v1/a"),
        (1, "s2/v1/a", "s2/v1/b"),
    ]
    trials = trial_list(rows)
    (tmp_path / "t.csv").write_text(
        "path,speaker,session\n" + "".join(f"{n},{n[:2]},{n[3:5]}\n" for n in trials.names)
    )
    for speakers in (speakers_of(trials), speakers_of(trials, tmp_path / "t.csv")):
        found = figures(trials, np.arange(4.0), speakers, EvaluationOptions(bootstrap_samples=0), 0)
        assert (found.num_same_session_targets, found.num_targets) == (2, 3)
