"""Metrics against hand-worked cases and brute force."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speakernet.evaluation import metrics

HAND_SCORES = np.array([0.1, 0.4, 0.35, 0.8])
HAND_LABELS = np.array([0, 0, 1, 1])

trial_lists = st.lists(st.tuples(st.integers(-5, 5), st.booleans()), min_size=2, max_size=40).filter(
    lambda rows: 0 < sum(label for _, label in rows) < len(rows)
)


def brute_points(scores, labels):
    """(miss, false accept) at every threshold, by counting."""
    targets, others = scores[labels], scores[~labels]
    thresholds = [*sorted(set(scores.tolist())), np.inf]
    return [(float(np.mean(targets < t)), float(np.mean(others >= t))) for t in thresholds]


@given(trial_lists)
def test_rates_and_costs_equal_brute_force(rows):
    scores = np.array([score for score, _ in rows], dtype=float)
    labels = np.array([label for _, label in rows])
    rates = metrics.error_rates(scores, labels)
    points = brute_points(scores, labels)
    np.testing.assert_allclose(rates.miss_rates, [miss for miss, _ in points])
    np.testing.assert_allclose(rates.false_accept_rates, [accepted for _, accepted in points])
    for prior in (0.01, 0.5):
        expected = min(prior * miss + (1 - prior) * accepted for miss, accepted in points) / min(prior, 1 - prior)
        assert metrics.min_dcf(scores, labels, prior) == pytest.approx(expected)
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[labels] for b in scores[~labels]]
    assert metrics.area_under_roc(rates) == pytest.approx(np.mean(pairs))


@given(trial_lists)
def test_hull_eer_equals_the_maximum_over_priors_of_the_minimum_cost(rows):
    # The ROCCH-EER is the largest Bayes error rate over all priors, whichever way it is computed.
    scores = np.array([score for score, _ in rows], dtype=float)
    labels = np.array([label for _, label in rows])
    miss, accepted = np.array(brute_points(scores, labels)).T
    priors = np.linspace(0, 1, 2001)[:, None]
    expected = (priors * miss + (1 - priors) * accepted).min(axis=1).max()
    assert metrics.hull_eer_percent(metrics.error_rates(scores, labels)) / 100 == pytest.approx(expected, abs=1e-3)


@given(trial_lists)
def test_min_cllr_equals_pool_adjacent_violators(rows):
    isotonic = pytest.importorskip("scipy.optimize").isotonic_regression
    scores = np.array([score for score, _ in rows], dtype=float)
    labels = np.array([label for _, label in rows])
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    share = np.bincount(inverse, labels) / counts
    posterior = isotonic(share, weights=counts).x[inverse]
    with np.errstate(divide="ignore"):
        llrs = np.log(posterior) - np.log1p(-posterior) - np.log(labels.sum() / (~labels).sum())
    assert metrics.min_cllr(metrics.error_rates(scores, labels)) == pytest.approx(metrics.cllr(llrs, labels), abs=1e-9)


def test_hand_worked_figures():
    assert metrics.eer(HAND_SCORES, HAND_LABELS) == 50
    assert metrics.hull_eer_percent(metrics.error_rates(HAND_SCORES, HAND_LABELS)) == pytest.approx(25)
    assert metrics.min_dcf(HAND_SCORES, HAND_LABELS, 0.5) == 0.5
    # all misses avoided costs a false-accept rate of one half: 0.99 * 0.5 / 0.01; rejecting 0.35 costs half the targets
    assert metrics.min_dcf(HAND_SCORES, HAND_LABELS, 0.01) == pytest.approx(0.5)
    assert metrics.cllr(np.log([1 / 3, 3.0]), np.array([0, 1])) == pytest.approx(np.log2(4 / 3))


def test_actual_cost_uses_the_theoretical_threshold():
    llrs, labels = np.array([-6.0, -1.0, 5.0, 2.0]), np.array([0, 0, 1, 1])
    # prior 0.01: threshold ln 99 = 4.595; one of two targets is missed
    assert metrics.bayes_threshold(0.01) == pytest.approx(4.59512)
    assert metrics.act_dcf(metrics.error_rates(llrs, labels), 0.01) == pytest.approx(0.5)


@pytest.mark.parametrize("seed", range(20))
def test_voxceleb_trainers_eer_equals_its_recipe(seed):
    curves = pytest.importorskip("sklearn.metrics", reason="scikit-learn, which that tool uses, is not installed")
    random = np.random.default_rng(seed)
    labels = random.random(60) < 0.3
    scores = np.round(random.normal(size=60) + 1.2 * labels, 1 if seed % 2 else 6)
    accepted, hit, _ = curves.roc_curve(labels, scores, pos_label=1)
    miss = 1 - hit
    nearest = np.nanargmin(np.abs(miss - accepted))
    assert metrics.voxceleb_trainer_eer_percent(metrics.error_rates(scores, labels)) == pytest.approx(
        100 * max(accepted[nearest], miss[nearest])
    )


def test_thresholds_at_a_false_accept_rate():
    scores = np.concatenate([np.arange(100) / 100, [2.0]])
    labels = np.array([0] * 100 + [1])
    rates = metrics.error_rates(scores, labels)
    point = metrics.point_at_false_accept_rate(rates, 0.05)
    assert (point.threshold, point.false_accept) == (0.95, 0.05)
    assert metrics.point_at_threshold(rates, 0.945).false_accept == 0.05


@pytest.mark.parametrize(
    ("last", "labels", "found"),
    [
        (0.2, [1, 1], "a non-target trial"),
        (0.2, [0, 0], "a target trial"),
        (np.nan, [0, 1], "scores are NaN: trials 2"),
    ],
)
def test_what_has_no_error_rate_is_refused(last, labels, found):
    with pytest.raises(ValueError, match=found):
        metrics.eer(np.array([0.1, last]), np.array(labels))


def test_det_points_are_thinned_and_monotonic():
    random = np.random.default_rng(0)
    labels = random.random(50_000) < 0.5
    accepted, miss = metrics.det_points(metrics.error_rates(random.normal(size=50_000) + 2 * labels, labels), 300)
    assert 100 < len(miss) <= 300
    assert (np.diff(accepted) <= 0).all() and (np.diff(miss) >= 0).all()
