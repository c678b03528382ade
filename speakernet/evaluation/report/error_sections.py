"""The parts of a report page about errors: DET curve, score histograms, thresholds, calibration, operating points."""

from collections.abc import Mapping, Sequence

import numpy as np

from speakernet.evaluation.calibration import EER_NAME, AffineCalibration, named_thresholds, threshold_label
from speakernet.evaluation.figures import ALWAYS_SHOWN_PRIORS
from speakernet.evaluation.metrics import (
    ErrorRates,
    OperatingPoint,
    bayes_threshold,
    equal_error_point,
    error_rates,
    min_dcf_point,
)
from speakernet.evaluation.report import plots
from speakernet.evaluation.report.data import RunData
from speakernet.evaluation.report.page import Block, Card, Cards, Paragraph, Table
from speakernet.evaluation.report.sections import Drawings

HISTOGRAM_NOTE = "Each kind has an area of one."


def rates_of(run: RunData) -> ErrorRates | None:
    """Error rates of a run's scores; None where they have no labels of both kinds."""
    if run.labels is None or run.scores is None:
        return None
    return error_rates(run.scores, run.labels)


def errors_part(runs: Sequence[RunData], rates: Mapping[str, ErrorRates], drawings: Drawings) -> list[Block]:
    """DET curve, then for each run histograms, error rates by threshold, operating points and calibration."""
    if not rates:
        return []
    cards = [_det_card(runs, rates, drawings)]
    shown = [run for run in runs if run.name in rates]
    for number, run in enumerate(shown):
        suffix, after = (f"_{number + 1}", f": {run.name}") if len(shown) > 1 else ("", "")
        threshold = equal_error_point(rates[run.name]).threshold
        assert run.scores is not None and run.labels is not None
        figure = plots.histogram_figure(run.scores, run.labels, threshold)
        cards.append(drawings.card(f"scores{suffix}", f"Scores{after}", figure, HISTOGRAM_NOTE))
        figure = plots.threshold_figure(rates[run.name], threshold)
        note = "A higher threshold lets fewer impostors pass and refuses more true pairs."
        cards.append(drawings.card(f"thresholds{suffix}", f"Errors by threshold{after}", figure, note))
        cards += _calibration_cards(run, rates[run.name], drawings, suffix, after)
    points = [_operating_points_card(run, rates[run.name], f": {run.name}" if len(shown) > 1 else "") for run in shown]
    return [Cards(cards), Cards(points, "wide")]


def _det_card(runs: Sequence[RunData], rates: Mapping[str, ErrorRates], drawings: Drawings) -> Card:
    points = {}
    if len(rates) == 1:
        ((name, only),) = rates.items()
        points["EER"] = equal_error_point(only)
        for prior, (_, point) in _cheapest_points(next(run for run in runs if run.name == name), only).items():
            points[f"minDCF at {prior:g}"] = point
    bands = {run.name: run.results.det_band for run in runs if run.results is not None and run.results.det_band}
    note = "Lower left is better; the EER lies where a curve meets the diagonal."
    note += " Bands: 95 % intervals of the misses, over speakers." if bands else ""
    return drawings.card("det", "Detection error trade-off", plots.det_figure(rates, points, bands), note)


def _cheapest_points(run: RunData, rates: ErrorRates) -> dict[float, tuple[float, OperatingPoint]]:
    """Target prior -> minDCF and where it is reached, for the priors and costs that the run reports."""
    priors = sorted(map(float, run.results.min_dcf)) if run.results and run.results.min_dcf else ALWAYS_SHOWN_PRIORS
    costs = (run.results.dcf_costs if run.results else None) or {}
    return {prior: min_dcf_point(rates, prior, **costs) for prior in priors}


def _operating_points_card(run: RunData, rates: ErrorRates, after: str) -> Card:
    """What a threshold on the score does: at the EER, at the lowest costs, at named false-accept rates."""
    equal = equal_error_point(rates)
    rows = [_point_row(threshold_label(EER_NAME), equal, "")]
    for prior, (cost, point) in reversed(_cheapest_points(run, rates).items()):
        rows.append(_point_row(f"lowest cost, target prior {prior:g}", point, f"{cost:.3f}"))
    named, refused = named_thresholds(rates, {})
    # The first is the EER, which stands above.
    for one in named[1:]:
        at = OperatingPoint(one["threshold"], one["miss_rate"], one["false_accept_rate"])
        rows.append(_point_row(threshold_label(one["name"]), at, ""))
    header = ["threshold chosen for", "threshold", "true pairs refused", "impostors accepted", "minDCF"]
    note = "Measured on this very list: on other speakers a threshold gives other rates."
    if refused:
        rarest = "; ".join(refused[:1])
        note += f" {rarest[:1].upper()}{rarest[1:]}."
    return Card(f"Operating points{after}", [Table(header, rows, numbers=(1, 2, 3, 4))], note)


def _point_row(name: str, point: OperatingPoint, cost: str) -> list[str]:
    threshold = f"{point.threshold:.4f}" if np.isfinite(point.threshold) else "refuse all"
    return [name, threshold, f"{100 * point.miss:.2f} %", f"{100 * point.false_accept:.2f} %", cost or "–"]


def _calibration_cards(run: RunData, rates: ErrorRates, drawings: Drawings, suffix: str, after: str) -> list[Card]:
    """What the list itself says a score is worth, against the calibrated score or, without calibration, the score."""
    assert run.scores is not None and run.labels is not None
    llrs, cards = run.llrs, []
    fit = run.results.calibration if run.results else None
    if llrs is None and fit is not None and len(fit.get("weights", ())) == 1:
        llrs = AffineCalibration.from_dict(fit).apply(run.scores)
    name = "score"
    note = "Not calibrated: the curve shows which log-likelihood ratio each score stands for on this list."
    if llrs is not None:
        rates, name = error_rates(llrs, run.labels), "log-likelihood ratio as calibrated"
        note = "On the dashed line a log-likelihood ratio means what it says."
        figure = plots.histogram_figure(
            llrs, run.labels, equal_error_point(rates).threshold, "log-likelihood ratio (natural)"
        )
        text = f"{HISTOGRAM_NOTE} Right of {bayes_threshold(0.01):.1f} accepting pays at a target prior of 0.01."
        cards.append(drawings.card(f"llrs{suffix}", f"Log-likelihood ratios{after}", figure, text))
    x, best = _best_mapping(rates)
    if len(x) < 2:
        text = "The two kinds of trials do not overlap: nothing to calibrate on."
        return [*cards, Card(f"Calibration{after}", [Paragraph(text, is_quiet=True)])]
    figure = plots.calibration_figure(x, best, name, is_llr=llrs is not None)
    return [*cards, drawings.card(f"calibration{suffix}", f"Calibration{after}", figure, note)]


def _best_mapping(rates: ErrorRates) -> tuple[np.ndarray, np.ndarray]:
    """Scores and log-likelihood ratios of the best monotonic mapping: edges of the convex hull with a finite ratio."""
    targets = np.diff(rates.misses[rates.hull]) / rates.num_targets
    nontargets = -np.diff(rates.false_accepts[rates.hull]) / rates.num_nontargets
    rows = rates.hull
    # An edge covers the scores from its first threshold to just below its last.
    middles = (rates.thresholds[rows[:-1]] + rates.thresholds[np.maximum(rows[1:] - 1, rows[:-1])]) / 2
    is_finite = (targets > 0) & (nontargets > 0)
    return middles[is_finite], np.log(targets[is_finite]) - np.log(nontargets[is_finite])
