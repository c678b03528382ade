"""The parts of a report page, each from the data of one or several runs; a part with nothing to show is empty.

Several runs share plots and stand in columns; the first run's names lead. Which parts a page has is decided in
`report.py`, how they look in `page.py` and `plots.py`.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from speakernet.evaluation.calibration import AffineCalibration
from speakernet.evaluation.metrics import ErrorRates, equal_error_point, error_rates, min_dcf_point
from speakernet.evaluation.report import page, plots
from speakernet.evaluation.report.data import RunData
from speakernet.evaluation.report.plot_style import figure_svg, save_png

logger = logging.getLogger(__name__)

NUM_HARDEST = 12
CURVES = (
    ("evaluation", "eer_percent", "EER on held-out speakers (%)", "Held-out EER"),
    ("step", "loss", "loss", "Training loss"),
    ("step", "accuracy_percent", "accuracy (%)", "Training accuracy"),
    ("step", "learning_rate", "learning rate", "Learning rate"),
    ("step", "margin", "margin", "Margin"),
    ("step", "utterances_per_second", "utterances a second", "Speed"),
    ("step", "data_wait_share", "waiting for data (% of time)", "Data wait"),
)
"""Kind of record, key, axis, heading of every training curve."""
CURVE_NOTES = {
    "accuracy_percent": "With a margin, accuracy is low by design: look at the held-out EER.",
    "data_wait_share": "Near 0 % the device is the limit; well above 10 % reading and augmenting are.",
}


class Drawings:
    """Turns figures into cards and keeps each as a PNG in a folder.

    Args:
        folder: for the PNGs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def card(self, name: str, heading: str, figure: Figure, note: str = "") -> str:
        """A card with the figure, which is also saved as `name`.png."""
        save_png(figure, self._folder / f"{name}.png")
        return page.card(heading, figure_svg(figure, name, heading), note)


def rates_of(run: RunData) -> ErrorRates | None:
    """Error rates of a run's scores; None where they have no labels of both kinds."""
    if run.labels is None or run.scores is None:
        return None
    return error_rates(run.scores, run.labels)


def training_part(runs: Sequence[RunData], drawings: Drawings) -> str:
    """One small plot for each quantity that was recorded."""
    parts = []
    for kind, key, axis, heading in CURVES:
        series, note = {}, CURVE_NOTES.get(key, "")
        scale = 100.0 if key.endswith("_share") else 1.0
        for run in runs:
            records = [one for one in run.metrics if one.get("kind") == kind and _is_number(one.get(key))]
            if records:
                where = "epoch" if kind == "evaluation" else "step"
                after = f" of {run.name}" if len(runs) > 1 else ""
                x = np.array([one.get(where, 0) for one in records], dtype=np.float64)
                series[run.name] = (x, scale * np.array([one[key] for one in records]))
                begin = records[-1].get("second_stage_from")
                note += f" After {where} {begin[where]}{after}: the large-margin stage." if begin else ""
        if series:
            axis_x = "epoch" if kind == "evaluation" else "step"
            figure = plots.curve_figure(series, axis_x, axis, mark_lowest=key == "eer_percent")
            parts.append(drawings.card(f"training_{key}", heading, figure, note.strip()))
    return page.cards(parts) if parts else ""


def errors_part(runs: Sequence[RunData], rates: Mapping[str, ErrorRates], drawings: Drawings) -> str:
    """DET curve, histograms and calibration."""
    if not rates:
        return ""
    parts = [_det_card(runs, rates, drawings)]
    for number, run in enumerate(run for run in runs if run.name in rates):
        suffix = f"_{number + 1}" if len(rates) > 1 else ""
        after = f": {run.name}" if len(rates) > 1 else ""
        threshold = equal_error_point(rates[run.name]).threshold
        assert run.scores is not None and run.labels is not None
        figure = plots.histogram_figure(run.scores, run.labels, threshold)
        parts.append(drawings.card(f"scores{suffix}", f"Scores{after}", figure, "Each kind has an area of one."))
        parts.append(_calibration_card(run, rates[run.name], drawings, suffix, after))
    return page.cards(parts)


def _det_card(runs: Sequence[RunData], rates: Mapping[str, ErrorRates], drawings: Drawings) -> str:
    points = {}
    if len(rates) == 1:
        ((name, only),) = rates.items()
        points["EER"] = equal_error_point(only)
        for prior in priors_of(next(run for run in runs if run.name == name)):
            points[f"minDCF at {prior:g}"] = min_dcf_point(only, prior)[1]
    note = "Lower left is better; the EER lies where a curve meets the diagonal."
    return drawings.card("det", "Detection error trade-off", plots.det_figure(rates, points), note)


def priors_of(run: RunData) -> list[float]:
    """Target priors of the minDCFs that a run reports."""
    reported = run.results.get("min_dcf")
    return sorted(float(one) for one in reported) if isinstance(reported, Mapping) and reported else [0.01, 0.05]


def _calibration_card(run: RunData, rates: ErrorRates, drawings: Drawings, suffix: str, after: str) -> str:
    """What the list itself says a score is worth, against the calibrated score or, without calibration, the score."""
    assert run.scores is not None and run.labels is not None
    llrs = run.llrs
    entry = run.results.get("calibration")
    if llrs is None and isinstance(entry, Mapping) and len(entry.get("weights", ())) == 1:
        llrs = AffineCalibration.from_dict(entry).apply(run.scores)
    is_llr = llrs is not None
    if llrs is not None:
        rates = error_rates(llrs, run.labels)
    x, best = _best_mapping(rates)
    name = "log-likelihood ratio as calibrated" if is_llr else "score"
    note = (
        "On the dashed line a log-likelihood ratio means what it says."
        if is_llr
        else "Not calibrated: the curve shows which log-likelihood ratio each score stands for on this list."
    )
    if len(x) < 2:
        note = "The two kinds of trials do not overlap: nothing to calibrate on."
        return page.card(f"Calibration{after}", page.paragraph(note, is_quiet=True))
    figure = plots.calibration_figure(x, best, name, is_llr=is_llr)
    return drawings.card(f"calibration{suffix}", f"Calibration{after}", figure, note)


def _best_mapping(rates: ErrorRates) -> tuple[np.ndarray, np.ndarray]:
    """Scores and log-likelihood ratios of the best monotonic mapping: edges of the convex hull with a finite ratio."""
    targets = np.diff(rates.misses[rates.hull]) / rates.num_targets
    nontargets = -np.diff(rates.false_accepts[rates.hull]) / rates.num_nontargets
    rows = rates.hull
    # An edge covers the scores from its first threshold to just below its last.
    middles = (rates.thresholds[rows[:-1]] + rates.thresholds[np.maximum(rows[1:] - 1, rows[:-1])]) / 2
    is_finite = (targets > 0) & (nontargets > 0)
    return middles[is_finite], np.log(targets[is_finite]) - np.log(nontargets[is_finite])


def slices_part(runs: Sequence[RunData], drawings: Drawings) -> str:
    """Plot and table of each way the results were sliced, run by run."""
    parts = []
    for number, run in enumerate(runs):
        after = f": {run.name}" if len(runs) > 1 else ""
        for row, one in enumerate(run.results.get("slices") or []):
            rows = one["rows"]
            suffix = f"{row + 1}_{number + 1}" if len(runs) > 1 else f"{row + 1}"
            heading = f"By {one['by']}{after}"
            remarks = [
                f"{r['label']}: {r['note']}." for r in rows if r.get("note") and r.get("eer_percent") is not None
            ]
            note = " ".join([one.get("note", ""), *remarks]).strip()
            svg = drawings.card(f"slices_{suffix}", heading, plots.slices_figure(rows), note)
            cells = [[str(r["label"]), f"{r['num_trials']:,}", f"{r['num_targets']:,}", _eer_text(r)] for r in rows]
            header = ["slice", "trials", "targets", "EER"]
            parts.append(svg.removesuffix("</div>") + page.table(header, cells, numbers=(1, 2, 3)) + "</div>")
    return page.cards(parts) if parts else ""


def sweep_part(runs: Sequence[RunData], drawings: Drawings) -> str:
    """EER against the amount of each degradation."""
    series: dict[str, dict[str, Any]] = {}
    for run in runs:
        for one in run.results.get("sweep") or []:
            entry = series.setdefault(one["kind"], {"axis": one.get("axis", one["kind"]), "note": one.get("note", "")})
            entry.setdefault("runs", {})[run.name] = one["rows"]
    parts = [
        drawings.card(
            f"sweep_{kind}", kind.capitalize(), plots.sweep_figure(entry["runs"], entry["axis"]), entry["note"]
        )
        for kind, entry in series.items()
    ]
    return page.cards(parts) if parts else ""


def hardest_part(run: RunData) -> str:
    """The highest-scoring non-targets and the lowest-scoring targets."""
    if run.labels is None or run.scores is None or run.trials is None:
        return ""
    parts = []
    for kind, label, sign in (("False accepts", 0, -1), ("False rejects", 1, 1)):
        rows = np.flatnonzero(run.labels == label)
        keys = sign * run.scores[rows]
        few = min(NUM_HARDEST, len(rows))
        nearest = np.argpartition(keys, few - 1)[:few]
        rows = rows[nearest[np.lexsort((rows[nearest], keys[nearest]))]]
        cells = [
            [run.trials.names[int(run.trials.enrol[row])], run.trials.names[int(run.trials.test[row])], score]
            for row, score in zip(rows, (f"{run.scores[row]:.4f}" for row in rows), strict=True)
        ]
        what = "non-targets with the highest scores" if label == 0 else "targets with the lowest scores"
        parts.append(page.card(f"{kind}: {what}", page.table(["enrolment", "test", "score"], cells, numbers=(2,))))
    return page.cards(parts, kind="halves")


def map_part(runs: Sequence[RunData], drawings: Drawings) -> str:
    """Where the utterances of some speakers lie."""
    parts = []
    for number, run in enumerate(run for run in runs if run.embedding_map is not None):
        drawn = run.embedding_map
        assert drawn is not None
        figure = plots.embedding_figure(drawn.points, drawn.speakers, drawn.names, drawn.shares)
        note = (
            f"The {len(drawn.names)} speakers with the most utterances, on the two main axes of their embeddings. "
            "Principal components, since they are linear: what is apart here is apart in the embeddings; what overlaps "
            "here may still be apart in the other dimensions."
        )
        after = f": {run.name}" if len(runs) > 1 else ""
        parts.append(drawings.card(f"embeddings_{number + 1}", f"Embeddings{after}", figure, note))
    return page.cards(parts) if parts else ""


def _eer_text(row: Mapping[str, Any]) -> str:
    value = row.get("eer_percent")
    if value is None:
        return str(row.get("note") or "no EER")
    low, high = row.get("eer_interval_percent") or (None, None)
    return f"{value:.2f} %" + ("" if low is None or high is None else f" ({low:.2f}–{high:.2f})")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))
