"""The plots of an evaluation as matplotlib figures, and their export to the page and to PNG.

Functions turn arrays into figures; nothing is read or recomputed here. A figure is drawn once, in
the light palette, which the PNG keeps. In the SVG for the page, each colour becomes a CSS variable,
so that the same drawing follows the reader's light or dark setting.
"""

import functools
import html
import io
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator
from scipy.special import ndtri

from speakernet.evaluation.metrics import ErrorRates, OperatingPoint, det_points
from speakernet.evaluation.results import NO_INTERVAL, Band, GroupResult
from speakernet.files import atomic_write

WIDTH_INCHES = 4.2
HEIGHT_INCHES = 3.0
"""Small, since the page shows plots 340 to 420 pixels wide: 8-point text stays readable on a
phone."""
PNG_DOTS_PER_INCH = 200
MAX_LEVEL_LABELS = 8
"""Labels that fit below a sweep; more are turned."""
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
"""Name -> (light, dark). Every colour is unique, so that it can be found in the SVG by its code."""
SERIES = tuple(light for name, (light, _) in PALETTE.items() if name.startswith("series"))
INK = PALETTE["ink"][0]
MUTED = PALETTE["muted"][0]
GRID = PALETTE["grid"][0]

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
    "legend.columnspacing": 1.0,
    "legend.handlelength": 1.4,
    "legend.handletextpad": 0.4,
    "lines.linewidth": 1.4,
    "axes.prop_cycle": matplotlib.cycler(color=SERIES),  # type: ignore[attr-defined]
    # Keep text as text, in the page's fonts: paths are larger and cannot be selected.
    "svg.fonttype": "none",
    # The same drawing always gives the same bytes.
    "svg.hashsalt": "speakernet",
}
DET_TICKS_PERCENT = (0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 20, 40, 60, 80, 95)
DET_MARGIN = 0.25
MIN_TICK_GAP = 0.08
"""Smallest gap between two ticks, as a share of the axis: about the width of a three-digit
label."""
HISTOGRAM_BINS = 60
MAX_TICKS = 9
MAX_MARKED_POINTS = 40
"""The markers of more points would merge into a thick line."""
LEGEND_CHARACTERS = 66
"""Characters that fit in a line of the legend; the line or marker before a label takes four."""
MAX_LEGEND_COLUMNS = 4
BAND: dict[str, Any] = {"alpha": 0.18, "linewidth": 0}
THRESHOLD: dict[str, Any] = {"color": INK, "linewidth": 1, "linestyle": "--"}
MARKERS = ("o", "^", "s", "D", "v", "P")

P = ParamSpec("P")


def drawn_in_house_style(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draw with the settings that all plots share, and with the legend above the plot, where it
    covers nothing.
    """

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with matplotlib.rc_context(_SETTINGS):
            figure = draw(*args, **kwargs)
            # Outside the axes, because curves differ and no place inside is always free.
            handles, labels = figure.axes[0].get_legend_handles_labels()
            if handles:
                num_columns = LEGEND_CHARACTERS // (4 + max(map(len, labels)))
                num_columns = min(MAX_LEGEND_COLUMNS, max(1, num_columns))
                figure.legend(handles, labels, loc="outside upper left", ncols=num_columns)
            # Lay out once for both PNG and page: it takes as long as drawing.
            figure.draw_without_rendering()
            figure.set_layout_engine(None)
            return figure

    return drawn


class Plot(Figure):
    """A figure that notebooks display; by default they display only those made by pyplot."""

    def _repr_png_(self) -> bytes:
        with io.BytesIO() as file:
            self.savefig(file, format="png")
            return file.getvalue()


def new_figure(
    x_name: str, y_name: str = "", height_inches: float = HEIGHT_INCHES
) -> tuple[Figure, Axes]:
    """An empty figure with one set of axes."""
    figure = Plot(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    return figure, figure.add_subplot(xlabel=x_name, ylabel=y_name)


@drawn_in_house_style
def det_figure(
    rates: ErrorRates, points: Mapping[str, OperatingPoint], band: Band | None = None
) -> Figure:
    """Detection error trade-off: misses against false accepts, both on normal-deviate axes, with
    operating points and the intervals of the miss rate.

    Source: Martin et al., The DET curve in assessment of detection task performance, 1997.
    """
    figure, axes = new_figure("false accepts (%)", "misses (%)", 3.6)
    # On normal-deviate axes, normally distributed scores give a straight line.
    curve = ndtri(det_points(rates))  # (2, points): false accepts, misses
    axes.plot(*curve, color="C0")
    drawn = [curve]
    if band:
        # Percentages to rates, kept off 0 and 1, whose normal deviates are infinite.
        rows = band["false_accept_percent"], band["miss_low_percent"], band["miss_high_percent"]
        deviates = ndtri(np.clip(np.array(rows) / 100, 1e-9, 1 - 1e-9))
        axes.fill_between(*deviates, color="C0", label="95 % interval", **BAND)
    for number, (name, point) in enumerate(points.items()):
        place = ndtri([[point.false_accept], [point.miss]])  # (2, 1)
        # Without misses or false accepts, a point is infinitely far away.
        if not np.isfinite(place).all():
            place = np.empty((2, 0))
            name = f"{name}: off the plot"
        marker = MARKERS[number % len(MARKERS)]
        axes.plot(*place, marker, color=f"C{number + 1}", markersize=5, label=name)
        drawn.append(place)
    _set_det_axes(axes, np.concatenate(drawn, axis=1))
    return figure


def _set_det_axes(axes: Axes, deviates: np.ndarray) -> None:
    """Ticks in percent on normal-deviate axes that include all these deviates."""
    if not deviates.size:
        # Without errors there are no finite points, but the axes still need limits.
        deviates = ndtri([0.001, 0.5])
    low = float(deviates.min()) - DET_MARGIN
    high = float(deviates.max()) + DET_MARGIN
    ticks: dict[float, str] = {}
    for percent in DET_TICKS_PERCENT:
        place = float(ndtri(percent / 100))
        # Over a wide range the labels of small percentages would overlap.
        gap = place - max(ticks, default=-np.inf)
        if low <= place <= high and gap >= MIN_TICK_GAP * (high - low):
            ticks[place] = f"{percent:g}"
    axes.set(xlim=(low, high), ylim=(low, high))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(list(ticks), list(ticks.values()))
    # The diagonal, on which the EER lies.
    axes.plot([low, high], [low, high], color=GRID, linewidth=1, zorder=1)


@drawn_in_house_style
def histogram_figure(
    scores: np.ndarray, labels: np.ndarray, threshold: float, score_name: str = "score"
) -> Figure:
    """Densities of target and non-target scores, with the threshold."""
    # Targets are always blue.
    kinds = [("non-targets", "C1", labels == 0), ("targets", "C0", labels == 1)]
    figure, axes = new_figure(score_name, "density")
    # The same bins for both kinds, so that their areas can be compared.
    edges = np.histogram_bin_edges(scores, bins=HISTOGRAM_BINS)
    for name, colour, chosen in kinds:
        density, _ = np.histogram(scores[chosen], bins=edges, density=True)
        axes.stairs(density, edges, fill=True, color=colour, alpha=0.3)
        axes.stairs(density, edges, color=colour, linewidth=1.2, label=name)
    axes.axvline(threshold, label=f"threshold: {threshold:.4f}", **THRESHOLD)
    return figure


@drawn_in_house_style
def curve_figure(
    series: Mapping[str, tuple[np.ndarray, np.ndarray]],
    x_name: str,
    y_name: str,
    *,
    mark_lowest: bool = False,
    has_ticks_at_points: bool = False,
) -> Figure:
    """Quantities over the course of training."""
    figure, axes = new_figure(x_name, y_name, 2.5)
    for number, (name, (x, y)) in enumerate(series.items()):
        colour = f"C{number}"
        label = name if len(series) > 1 else ""
        if mark_lowest and np.isfinite(y).any():
            best = int(np.nanargmin(y))
            axes.plot(
                x[best], y[best], "o", markersize=8, markerfacecolor="none", markeredgecolor=colour
            )
            lowest = f"lowest {y[best]:.2f}"
            label = f"{label}: {lowest}" if label else lowest
        marker = "o" if len(x) <= MAX_MARKED_POINTS else None
        axes.plot(x, y, color=colour, marker=marker, markersize=2.5, label=label or None)
    if axes.dataLim.y0 >= 0:
        # Start at zero, so that a loss falling from 6.0 to 5.9 does not look like success.
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if has_ticks_at_points:
        places = np.unique(np.concatenate([x for x, _ in series.values()]))
        # Counted back from the last point, so that the end of training always has a tick.
        step = max(1, math.ceil(len(places) / MAX_TICKS))
        axes.xaxis.set_major_locator(FixedLocator(places[::-step].tolist()))
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 5), useMathText=False)
    return figure


@drawn_in_house_style
def slices_figure(rows: Sequence[GroupResult], weak: Collection[int] = ()) -> Figure:
    """The EER of each slice as a point with its 95 % interval; the rows in `weak` are grey."""
    figure, axes = new_figure("EER (%)", height_inches=max(1.5, 0.75 + 0.34 * len(rows)))
    for position, row in enumerate(rows):
        if row.eer_percent is None:
            axes.text(0, position, " no EER", va="center", color=MUTED, fontsize=8.5)
            continue
        colour = MUTED if position in weak else SERIES[0]
        if row.eer_interval_percent is not None:
            axes.plot(
                row.eer_interval_percent,
                [position, position],
                color=colour,
                linewidth=2.5,
                alpha=0.45,
            )
        axes.plot(row.eer_percent, position, "o", color=colour, markersize=5)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    # The vertical axis is reversed, so that the first row is at the top as in the table.
    axes.set(xlim=(0, None), ylim=(len(rows) - 0.5, -0.5))
    axes.grid(axis="y", visible=False)
    return figure


@drawn_in_house_style
def sweep_figure(rows: Sequence[GroupResult], x_name: str) -> Figure:
    """The EER at each level of a degradation, with its 95 % interval."""
    figure, axes = new_figure(x_name, "EER (%)")
    # Unknown values become NaN, which is not drawn.
    values = np.array(
        [(row.eer_percent, *(row.eer_interval_percent or NO_INTERVAL)) for row in rows],
        dtype=float,
    )
    eer, low, high = values.T
    axes.fill_between(range(len(rows)), low, high, color="C0", **BAND)
    axes.plot(range(len(rows)), eer, "o-", color="C0", markersize=4)
    # Many labels would overlap if they were horizontal.
    degrees = 90 if len(rows) > MAX_LEVEL_LABELS else 0
    axes.set_xticks(range(len(rows)), [row.label for row in rows], rotation=degrees)
    axes.set_ylim(bottom=0)
    return figure


@drawn_in_house_style
def embedding_figure(
    points: np.ndarray, speakers: np.ndarray, names: Sequence[str], shares: Sequence[float]
) -> Figure:
    """Utterances of some speakers, (utterances, 2), on their first two principal components.

    `speakers` are rows of `names`; `shares` are the shares of the variance on each axis.
    """
    first, second = (f"{100 * share:.0f} %" for share in shares)
    figure, axes = new_figure(
        f"first axis ({first} of the variance)", f"second axis ({second})", 3.9
    )
    for number, name in enumerate(names):
        x, y = points[speakers == number].T
        marker = MARKERS[number // len(SERIES) % len(MARKERS)]
        axes.plot(x, y, marker, color=f"C{number}", markersize=4, alpha=0.8, label=name)
    # With different scales, distances in the plot would depend on their direction.
    axes.set_aspect("equal", adjustable="datalim")
    return figure


def figure_svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an SVG element: colours as CSS variables, ids prefixed by `name`, `description`
    as its label.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context(_SETTINGS):
        # SVG for the page: inlined PNGs would be twice the size and fixed to one background.
        figure.savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    replacements = [
        # The metadata hold the time and the matplotlib version, so the bytes would differ between
        # equal runs.
        (r"<metadata>.*?</metadata>", ""),
        # All drawings share one document, in which ids must be unique.
        (r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{name}-"),
        # Use the page's fonts and no fixed size, so that the drawing scales with the page.
        (r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px; font-family: var(--font)"),
        (r'^<svg ([^>]*?)width="[^"]*"', r"<svg \1"),
        (r'^<svg ([^>]*?)height="[^"]*"', r"<svg \1"),
    ]
    for name_of_colour, (light, _) in PALETTE.items():
        replacements.append((light, f"var(--{name_of_colour})"))
    for pattern, replacement in replacements:
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(description)}" ', 1)


def save_figure(figure: Figure, path: Path) -> None:
    """Save the figure on white in the format of the path's suffix (png, svg, pdf), atomically."""
    with matplotlib.rc_context(_SETTINGS), atomic_write(path, "wb") as file:
        figure.savefig(file, format=path.suffix[1:], dpi=PNG_DOTS_PER_INCH, facecolor="white")
