"""How every plot looks: one palette for light and dark, figures made without pyplot, and their way into a page or PNG.

A figure is drawn once, in the light palette. Its PNG is that; for the page its SVG is taken and each colour of the
palette becomes a CSS variable, so that one drawing follows the reader's light or dark setting. What is drawn is
in `plots.py`.
"""

import io
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
"""Name -> (light, dark). Every colour occurs once: by its code it is found again in the SVG."""
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


def house_style() -> AbstractContextManager[None]:
    """The settings under which figures are drawn and saved."""
    return matplotlib.rc_context(_SETTINGS)


def new_figure(height_inches: float = HEIGHT_INCHES) -> tuple[Figure, Axes]:
    """An empty figure with one pair of axes; to be called in the house style, like all that draws on it."""
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    return figure, figure.add_subplot()


def legend_above(figure: Figure, axes: Axes, num_columns: int = 3) -> None:
    """Names of what is drawn, above the plot, where nothing can lie below them."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        options: dict[str, Any] = {"columnspacing": 1.0, "handlelength": 1.4, "handletextpad": 0.4}
        figure.legend(handles, labels, loc="outside upper left", ncols=num_columns, **options)


def series_colour(number: int) -> str:
    """The colour of a series; after the last the first comes again."""
    return SERIES[number % len(SERIES)]


def figure_svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an SVG element for a page: palette as CSS variables, names of its parts made unique by `name`.

    Args:
        figure: from `new_figure`.
        name: a word that no other figure of the page has.
        description: read out instead of the picture.
    """
    buffer = io.StringIO()
    with house_style():
        # SVG in the page: PNGs inlined would be twice the size and fixed to one background.
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # Names the time and the version of matplotlib: the same run would give other bytes.
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # All drawings share one document, whose ids must be unique.
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", text)
    for colour_name, (light, _) in PALETTE.items():
        text = text.replace(light, f"var(--{colour_name})")
    # Letters of the page's own fonts; the fixed size would keep the drawing from following the page's width.
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px; font-family: var(--font)", text)
    text = re.sub(r'^<svg ([^>]*?)width="[^"]*"', r"<svg \1", text, count=1)
    text = re.sub(r'^<svg ([^>]*?)height="[^"]*"', r"<svg \1", text, count=1)
    return text.replace("<svg ", f'<svg role="img" aria-label="{_attribute(description)}" ', 1)


def save_png(figure: Figure, path: str | Path) -> None:
    """The figure as a PNG on white, written atomically."""
    with house_style(), atomic_write(path, "wb") as file:
        figure.savefig(file, format="png", dpi=PNG_DOTS_PER_INCH, facecolor="white")


def colour_variables(is_dark: bool) -> str:
    """The palette as CSS declarations."""
    return " ".join(f"--{name}: {colours[is_dark]};" for name, colours in PALETTE.items())


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
