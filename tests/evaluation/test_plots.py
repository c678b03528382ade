"""Figures draw what they are given, and their way into a page keeps them apart and without fixed colours."""

import re

import numpy as np
import pytest
from scipy.special import ndtri

from speakernet.evaluation import plots
from speakernet.evaluation.metrics import OperatingPoint, equal_error_point, error_rates
from speakernet.evaluation.plots import PALETTE, figure_svg


def overlapping_scores(random, num_trials=400):
    labels = np.arange(num_trials) % 4 == 0
    return random.standard_normal(num_trials) + 2.0 * labels, labels.astype(np.int8)


def test_det_axes(random):
    scores, labels = overlapping_scores(random)
    rates = error_rates(scores, labels)
    figure = plots.det_figure({"only": rates}, {"EER": equal_error_point(rates), "off": OperatingPoint(9.0, 1.0, 0.0)})
    curve, marked, off, diagonal = figure.axes[0].lines
    x, y = curve.get_data()
    assert np.isin(np.round(x, 9), np.round(ndtri(rates.false_accept_rates), 9)).all()
    assert (np.diff(x) <= 0).all() and (np.diff(y) >= 0).all()
    assert marked.get_label() == "EER" and marked.get_xdata()[0] == marked.get_ydata()[0]
    assert off.get_label() == "off: off the plot" and not len(off.get_xdata())
    assert np.array_equal(diagonal.get_xdata(), diagonal.get_ydata())


def test_det_band(random):
    scores, labels = overlapping_scores(random)
    band = {"false_accept_percent": [1.0, 10.0], "miss_low_percent": [5.0, 0.0], "miss_high_percent": [20.0, 8.0]}
    axes = plots.det_figure({"only": error_rates(scores, labels)}, {}, {"only": band}).axes[0]
    (filled,) = axes.collections
    corners = {(round(x, 9), round(y, 9)) for x, y in filled.get_paths()[0].vertices}
    assert {tuple(np.round(ndtri([x, y]), 9)) for x, y in ((0.01, 0.05), (0.01, 0.2), (0.1, 0.08))} <= corners
    # A band that reaches no misses at all goes beyond the plot, and does not stretch it.
    assert min(y for _, y in corners) < axes.get_ylim()[0] and np.isfinite(list(corners)).all()
    assert filled.get_label() == "95 % interval"


def test_rates_by_threshold(random):
    scores, labels = overlapping_scores(random)
    accepts, rejects = {}, {}
    for line in plots.threshold_figure(error_rates(scores, labels), 0.5).axes[0].lines:
        name, (x, y) = line.get_label(), line.get_data()
        {"false accepts": accepts, "false rejects": rejects}.get(name, {}).update(zip(x, y, strict=True))
    assert len(accepts) > 300
    for threshold in list(accepts)[::40]:
        assert accepts[threshold] == pytest.approx(100 * np.mean(scores[labels == 0] >= threshold))
        assert rejects[threshold] == pytest.approx(100 * np.mean(scores[labels == 1] < threshold))


def test_svg(random):
    scores, labels = overlapping_scores(random)
    rates = error_rates(scores, labels)
    texts = [figure_svg(plots.det_figure({"a": rates}, {}), name, 'of "a" & <b>') for name in ("one", "two")]
    assert not any(light in text for text in texts for light, _ in PALETTE.values())
    assert "var(--series-1)" in texts[0] and 'aria-label="of &quot;a&quot; &amp; &lt;b&gt;"' in texts[0]
    names = [set(re.findall(r'\bid="([^"]+)"', text)) for text in texts]
    assert names[0] and not names[0] & names[1]
    for text, known in zip(texts, names, strict=True):
        assert set(re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', text)) <= known
    again = figure_svg(plots.det_figure({"a": rates}, {}), "one", 'of "a" & <b>')
    assert again == texts[0]
