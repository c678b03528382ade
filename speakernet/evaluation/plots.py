"""The plots of an evaluation as matplotlib figures: one palette for light and dark, and their way into a page or PNG.

Arrays in, a figure out; nothing is read or computed again. A figure is drawn once, in the light palette. Its PNG is
that; for the page its SVG is taken and each colour of the palette becomes a CSS variable, so that one drawing follows
the reader's light or dark setting.
"""

import functools
import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator
from scipy.special import ndtri

from speakernet.evaluation.metrics import ErrorRates, OperatingPoint, det_points
from speakernet.evaluation.results import FEW_TARGETS, GroupResult, threshold_text
from speakernet.files import atomic_write

WIDTH_INCHES, HEIGHT_INCHES = 4.2, 3.0
"""Small on purpose: the page shows a plot 340 to 420 pixels wide, so that 8-point text stays readable on a phone."""
PNG_DOTS_PER_INCH = 200
PALETTE = {
    "ink": ("#1b2431", "#e7ebf1"),
    "muted": ("#566172", "#9eabbc"),
    "grid": ("#dde3ea", "#2f3a48"),
    "series-1": ("#1f5fb4", "#6ea8f7"),
    "series-2": ("#c2500c", "#f59a5c"),
    "series-3": ("#1d7a45", "#5fc98b"),
    "series-4": ("#8138ab", "#c792ea"),
    "series-5": ("#0f7886", "#55c7d6"),
    "series-6": ("#a8324e", "#f08aa0"),
}
"""Name -> (light, dark). Every colour occurs once, so that its code finds it in the SVG."""
SERIES = tuple(light for name, (light, _) in PALETTE.items() if name.startswith("series"))
INK, MUTED, GRID = (PALETTE[name][0] for name in ("ink", "muted", "grid"))

_SETTINGS: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.labelsize": 8.5,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.4,
    # Text stays text, in the page's fonts: as paths every letter would be drawn, and none could be selected.
    "svg.fonttype": "none",
    # The same drawing gives the same bytes.
    "svg.hashsalt": "speakernet",
}
DET_TICKS_PERCENT = (0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 20, 40, 60, 80, 95)
DET_MARGIN = 0.25
MIN_TICK_GAP = 0.08
"""Between two ticks, as a share of the axis: a label of three digits is about that wide."""
HISTOGRAM_BINS = 60
MAX_CURVE_POINTS = 600
MAX_TICKS = 9
MARKERS = ("o", "^", "s", "D", "v", "P")

P = ParamSpec("P")


def drawn_in_house_style(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draw under the settings of all plots, which legends and ticks read as they are made."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with house_style():
            figure = draw(*args, **kwargs)
            # Once for PNG and page: finding the layout takes as long as drawing.
            figure.draw_without_rendering()
            figure.set_layout_engine(None)
            return figure

    return drawn


@drawn_in_house_style
def det_figure(
    curves: Mapping[str, ErrorRates],
    points: Mapping[str, OperatingPoint],
    bands: Mapping[str, Mapping[str, Sequence[float]]] = MappingProxyType({}),
) -> Figure:
    """Detection error trade-off of systems by name: misses against false accepts, both in normal-deviate scale.

    Marks operating points of the first system; bands are the systems' `det_band`, the intervals of their misses.

    Source: Martin et al., The DET curve in assessment of detection task performance, 1997.
    """
    figure, axes = new_figure(3.6)
    shown: list[np.ndarray] = []
    for number, (name, rates) in enumerate(curves.items()):
        false_accept, miss = det_points(rates)
        if len(miss):
            label = name if len(curves) > 1 else None
            # Normal deviates: scores that are normal for both kinds give a straight line.
            axes.plot(ndtri(false_accept), ndtri(miss), color=series_colour(number), label=label)
            shown += [false_accept, miss]
            if name in bands:
                _draw_band(axes, bands[name], series_colour(number), "" if label else "95 % interval")
    for number, (name, point) in enumerate(points.items()):
        colour, marker = series_colour(number + len(curves)), MARKERS[number % len(MARKERS)]
        # Without misses or false accepts a point is infinitely far out.
        is_inside = 0 < point.miss < 1 and 0 < point.false_accept < 1
        position = ([ndtri(point.false_accept)], [ndtri(point.miss)]) if is_inside else ([], [])
        label = name if is_inside else f"{name}: off the plot"
        axes.plot(*position, marker, color=colour, markersize=5, label=label)
        if is_inside:
            shown.append(np.array([point.false_accept, point.miss]))
    _deviate_axes(axes, np.concatenate(shown) if shown else np.array([0.001, 0.5]))
    if not shown:
        axes.text(0.5, 0.5, "no errors at any threshold", transform=axes.transAxes, ha="center", color=MUTED)
    axes.set_xlabel("false accepts (%)")
    axes.set_ylabel("misses (%)")
    legend_above(figure, axes, 2)
    return figure


def _draw_band(axes: Axes, band: Mapping[str, Sequence[float]], colour: str, label: str) -> None:
    # Percentages to rates; a rate of nothing or all is infinitely far out, beyond whatever the axes show.
    places, low, high = (
        ndtri(np.clip(np.array(band[name]) / 100, 1e-9, 1 - 1e-9))
        for name in ("false_accept_percent", "miss_low_percent", "miss_high_percent")
    )
    axes.fill_between(places, low, high, color=colour, alpha=0.18, linewidth=0, label=label or None)


def _deviate_axes(axes: Axes, rates: np.ndarray) -> None:
    """Ticks at round percentages and the diagonal on which the EER lies."""
    low, high = float(ndtri(rates.min())) - DET_MARGIN, float(ndtri(rates.max())) + DET_MARGIN
    ticks: list[float] = []
    for percent in DET_TICKS_PERCENT:
        place = ndtri(percent / 100)
        # In a wide plot the small percentages would write over each other.
        if low <= place <= high and (not ticks or place - ndtri(ticks[-1] / 100) >= MIN_TICK_GAP * (high - low)):
            ticks.append(percent)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator([float(ndtri(percent / 100)) for percent in ticks]))
        axis.set_major_formatter(FixedFormatter([f"{percent:g}" for percent in ticks]))
        axis.set_minor_locator(NullLocator())
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.plot([low, high], [low, high], color=GRID, linewidth=1, zorder=1)


@drawn_in_house_style
def histogram_figure(
    scores: np.ndarray, labels: np.ndarray | None, threshold: float, score_name: str = "score"
) -> Figure:
    """Scores of targets and non-targets (or of all trials) as densities, with the threshold at the EER (NaN: none)."""
    kinds = [("trials", np.ones(len(scores), dtype=bool))]
    if labels is not None:
        kinds = [("non-targets", labels == 0), ("targets", labels == 1)]
    figure, axes = new_figure()
    # The same bins for both kinds, so that their areas compare.
    edges = np.histogram_bin_edges(scores, bins=HISTOGRAM_BINS)
    for number, (name, chosen) in enumerate(kinds):
        density, _ = np.histogram(scores[chosen], bins=edges, density=True)
        # Targets are blue on every page.
        colour = series_colour(len(kinds) - 1 - number)
        axes.stairs(density, edges, fill=True, color=colour, alpha=0.3)
        axes.stairs(density, edges, color=colour, linewidth=1.2, label=name)
    if np.isfinite(threshold):
        axes.axvline(
            threshold, color=INK, linewidth=1, linestyle="--", label=f"at the EER: {threshold_text(threshold, scores)}"
        )
    axes.set_xlabel(score_name)
    axes.set_ylabel("density")
    legend_above(figure, axes)
    return figure


@drawn_in_house_style
def threshold_figure(rates: ErrorRates, chosen: float) -> Figure:
    """False accepts and false rejects against the threshold; marks the threshold at the EER."""
    figure, axes = new_figure()
    rows = np.flatnonzero(np.isfinite(rates.thresholds))
    # A drawing is some hundred points wide. Evenly along both curves: most thresholds are scores of non-targets, among
    # which the steps of the few targets would be lost.
    travelled = np.abs(np.diff(rates.miss_rates[rows])) + np.abs(np.diff(rates.false_accept_rates[rows]))
    place = np.concatenate([[0.0], np.cumsum(travelled)])
    wanted = np.searchsorted(place, np.linspace(0.0, place[-1], MAX_CURVE_POINTS))
    rows = rows[np.unique(np.clip([0, *wanted, len(rows) - 1], 0, len(rows) - 1))]
    thresholds = rates.thresholds[rows]
    for number, (name, values) in enumerate(
        (("false rejects", rates.miss_rates), ("false accepts", rates.false_accept_rates))
    ):
        axes.plot(thresholds, 100 * values[rows], color=series_colour(number), drawstyle="steps-pre", label=name)
    if np.isfinite(chosen):
        axes.axvline(
            chosen, color=INK, linewidth=1, linestyle="--", label=f"at the EER: {threshold_text(chosen, thresholds)}"
        )
    axes.set_ylim(0, 102)
    axes.set_xlabel("threshold on the score")
    axes.set_ylabel("% of trials of each kind")
    legend_above(figure, axes)
    return figure


@drawn_in_house_style
def curve_figure(
    series: Mapping[str, tuple[np.ndarray, np.ndarray]],
    x_name: str,
    y_name: str,
    bands: Mapping[str, np.ndarray] = MappingProxyType({}),
    *,
    mark_lowest: bool = False,
    has_ticks_at_points: bool = False,
) -> Figure:
    """A quantity over training."""
    figure, axes = new_figure(2.5)
    for number, (name, (x, y)) in enumerate(series.items()):
        colour = series_colour(number)
        marker = "o" if len(x) <= 40 else None
        label = name if len(series) > 1 else ""
        if mark_lowest and np.isfinite(y).any():
            best = int(np.nanargmin(y))
            axes.plot(x[best], y[best], "o", markersize=8, markerfacecolor="none", markeredgecolor=colour)
            label += f"{': ' if label else ''}lowest {y[best]:.2f}"
        axes.plot(x, y, color=colour, marker=marker, markersize=2.5, label=label or None)
        if name in bands:
            where, low, high = bands[name]
            axes.fill_between(where, low, high, color=colour, alpha=0.18, linewidth=0)
    values = np.concatenate([*(y for _, y in series.values()), *(one[2] for one in bands.values())])
    values = values[np.isfinite(values)]
    if len(values) and values.min() >= 0:
        # From zero: a loss that falls from 6.0 to 5.9 must not look like success.
        axes.set_ylim(0, float(values.max()) * 1.12 or 1.0)
    axes.set_xlabel(x_name)
    axes.set_ylabel(y_name)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if has_ticks_at_points:
        places = np.unique(np.concatenate([x for x, _ in series.values()]))
        # From the last one backwards: the end of a training is what is read first.
        axes.xaxis.set_major_locator(FixedLocator(places[:: -max(1, -(-len(places) // MAX_TICKS))].tolist()))
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 5), useMathText=False)
    legend_above(figure, axes, 2)
    return figure


@drawn_in_house_style
def calibration_figure(x: np.ndarray, best_llrs: np.ndarray, x_name: str, *, is_llr: bool) -> Figure:
    """Log-likelihood ratios of the list's best monotonic mapping, (points,), against scores or calibrated ratios."""
    figure, axes = new_figure()
    axes.plot(x, best_llrs, color=series_colour(0), drawstyle="steps-mid", label="best monotonic mapping of this list")
    axes.axhline(0, color=MUTED, linewidth=0.6)
    if is_llr:
        ends = [float(np.min(x)), float(np.max(x))]
        axes.plot(ends, ends, color=series_colour(1), linestyle="--", label="perfect calibration")
    axes.set_xlabel(x_name)
    axes.set_ylabel("log-likelihood ratio (natural)")
    legend_above(figure, axes, 2)
    return figure


@drawn_in_house_style
def slices_figure(rows: Sequence[GroupResult]) -> Figure:
    """EER of each slice as a point with its 95 % interval; grey if a slice has few targets."""
    figure, axes = new_figure(max(1.5, 0.75 + 0.34 * len(rows)))
    for position, row in enumerate(rows):
        if row.eer_percent is None:
            axes.text(0, position, " no EER", va="center", color=MUTED, fontsize=8.5)
            continue
        colour = MUTED if is_weak(row) else series_colour(0)
        if row.eer_interval_percent is not None:
            axes.plot(row.eer_interval_percent, [position, position], color=colour, linewidth=2.5, alpha=0.45)
        axes.plot(row.eer_percent, position, "o", color=colour, markersize=5)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("EER (%)")
    return figure


def is_weak(row: GroupResult) -> bool:
    """Whether a group has too few targets for its error rate to be read closely: drawn in grey."""
    return row.num_targets is not None and row.num_targets < FEW_TARGETS


@drawn_in_house_style
def sweep_figure(series: Mapping[str, Sequence[GroupResult]], x_name: str) -> Figure:
    """EER of systems against the amount of a degradation (a row each), with 95 % intervals as bands."""
    figure, axes = new_figure(HEIGHT_INCHES)
    labels: list[str] = []
    for number, (name, rows) in enumerate(series.items()):
        labels = [row.label for row in rows]
        values = _numbers([row.eer_percent for row in rows])
        intervals = [row.eer_interval_percent or (None, None) for row in rows]
        low, high = _numbers([one[0] for one in intervals]), _numbers([one[1] for one in intervals])
        positions = np.arange(len(rows))
        colour = series_colour(number)
        axes.fill_between(positions, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.plot(positions, values, "o-", color=colour, markersize=4, label=name if len(series) > 1 else None)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x_name)
    axes.set_ylabel("EER (%)")
    legend_above(figure, axes, 2)
    return figure


@drawn_in_house_style
def embedding_figure(points: np.ndarray, speakers: np.ndarray, names: Sequence[str], shares: Sequence[float]) -> Figure:
    """Utterances of some speakers, (utterances, 2), in the plane of their two main axes.

    `speakers` are rows of `names`; `shares` are those of the variance on each axis.
    """
    figure, axes = new_figure(3.9)
    for number, name in enumerate(names):
        chosen = points[speakers == number]
        marker = MARKERS[number // 6 % len(MARKERS)]
        axes.plot(chosen[:, 0], chosen[:, 1], marker, color=series_colour(number), markersize=4, alpha=0.8, label=name)
    # Distances mean the same in both directions.
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_xlabel(f"first axis ({100 * shares[0]:.0f} % of the variance)")
    axes.set_ylabel(f"second axis ({100 * shares[1]:.0f} %)")
    legend_above(figure, axes, 4)
    return figure


def _numbers(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def house_style() -> AbstractContextManager[None]:
    """The settings with which figures are drawn and saved."""
    return matplotlib.rc_context(_SETTINGS)


def new_figure(height_inches: float = HEIGHT_INCHES) -> tuple[Figure, Axes]:
    """An empty figure with one pair of axes, for use within `house_style`."""
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    return figure, figure.add_subplot()


def legend_above(figure: Figure, axes: Axes, num_columns: int = 3) -> None:
    """A legend above the plot, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        options: dict[str, Any] = {"columnspacing": 1.0, "handlelength": 1.4, "handletextpad": 0.4}
        figure.legend(handles, labels, loc="outside upper left", ncols=num_columns, **options)


def series_colour(number: int) -> str:
    """The colour of a series; after the last comes the first again."""
    return SERIES[number % len(SERIES)]


def figure_svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an SVG element: palette as CSS variables, ids made unique by `name`, `description` for readers."""
    buffer = io.StringIO()
    with house_style():
        # SVG in the page: PNGs inlined would be twice the size and fixed to one background.
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # It holds the time and the version of matplotlib: the same run would give other bytes.
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # All drawings share one document, whose ids must be unique.
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", text)
    for colour_name, (light, _) in PALETTE.items():
        text = text.replace(light, f"var(--{colour_name})")
    # The page's own fonts; a fixed size would keep the drawing from following the page's width.
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px; font-family: var(--font)", text)
    text = re.sub(r'^<svg ([^>]*?)width="[^"]*"', r"<svg \1", text, count=1)
    text = re.sub(r'^<svg ([^>]*?)height="[^"]*"', r"<svg \1", text, count=1)
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(description)}" ', 1)


def save_png(figure: Figure, path: str | Path) -> None:
    """The figure as a PNG on white, written atomically."""
    with house_style(), atomic_write(path, "wb") as file:
        figure.savefig(file, format="png", dpi=PNG_DOTS_PER_INCH, facecolor="white")


def colour_variables(is_dark: bool) -> str:
    """The palette as CSS declarations."""
    return " ".join(f"--{name}: {colours[is_dark]};" for name, colours in PALETTE.items())
