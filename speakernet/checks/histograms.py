"""Histograms of durations, as text and as PNG; apart from the checks, since drawing loads matplotlib."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from speakernet.files import atomic_write

BAR_WIDTH = 50
#: Edges in seconds that people think in; the last bin is open.
DURATION_EDGES = (0, 0.5, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 60)
PNG_BINS = 60


def duration_histogram(seconds: np.ndarray) -> str:
    """The durations as text, one bar a line."""
    edges = np.array([*DURATION_EDGES, np.inf])
    counts, _ = np.histogram(seconds, bins=edges)
    # Empty bars at the end say nothing; those in between do.
    last = int(np.flatnonzero(counts)[-1]) + 1 if counts.any() else 1
    lines = []
    for row in range(last):
        label = (
            f"{edges[row]:>4g} s and more"
            if np.isinf(edges[row + 1])
            else f"{edges[row]:>4g} to {edges[row + 1]:<4g} s"
        )
        bar = "#" * int(np.ceil(BAR_WIDTH * counts[row] / max(1, counts.max())))
        lines.append(f"{label:<16} {counts[row]:>10,} {bar}")
    return "\n".join(lines)


def write_duration_png(path: str | Path, durations: dict[str, np.ndarray]) -> None:
    """One histogram a list (seconds), below each other, as PNG."""
    figure = Figure(figsize=(8, 3 * max(1, len(durations))), layout="constrained")
    FigureCanvasAgg(figure)
    for row, (title, seconds) in enumerate(durations.items()):
        axes = figure.add_subplot(len(durations), 1, row + 1)
        # One recording of an hour would press all others into the first bar.
        upper = float(np.quantile(seconds, 0.995)) if len(seconds) else 1.0
        axes.hist(np.minimum(seconds, upper), bins=PNG_BINS)
        axes.set_title(f"{title}: {len(seconds):,} files")
        axes.set_xlabel("duration in seconds (the longest 0.5 % in the last bar)")
        axes.set_ylabel("files")
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format="png", dpi=100)
