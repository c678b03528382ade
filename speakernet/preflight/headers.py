"""What the headers of a list's files say: unreadable ones, rates, channels, durations. No samples are read."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from speakernet.data.lists import StringTable
from speakernet.data.lookup import LookupTable
from speakernet.files import atomic_write
from speakernet.preflight.findings import Finding

NUM_EXAMPLES = 10
DEFAULT_MIN_SECONDS = 0.5
LONG_SECONDS = 60.0
BAR_WIDTH = 50
#: Edges in seconds that people think in; the last bin is open.
DURATION_EDGES = (0, 0.5, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 60)
PNG_BINS = 60


def header_findings(
    names: StringTable, lookup: LookupTable, check: str, min_seconds: float = DEFAULT_MIN_SECONDS
) -> list[Finding]:
    """Findings about rates, channels and durations of the files of one list.

    Args:
        names: the files.
        lookup: their headers, row for row.
        check: what the list is, as "training audio".
        min_seconds: shorter utterances are named.
    """
    findings = []
    bad = sorted(lookup.problems)
    if bad:
        findings.append(
            Finding(
                "error",
                check,
                f"{len(bad):,} of {len(names):,} files cannot be read",
                "replace them, or take them off the list: python data_prep/trials.py clean LIST --root ROOT",
                tuple(lookup.problems[row] for row in bad[:NUM_EXAMPLES]),
            )
        )
    is_good = np.ones(len(names), dtype=bool)
    is_good[bad] = False
    if not is_good.any():
        return findings
    findings += _format_findings(lookup, is_good, check)
    seconds = lookup.seconds
    hours = seconds[is_good].sum() / 3600
    middle = np.median(seconds[is_good])
    message = (
        f"{hours:,.1f} hours; {seconds[is_good].min():.2f} to {seconds[is_good].max():.1f} s, median {middle:.1f} s"
    )
    findings.append(Finding("ok", f"{check}: length", message))
    short = np.flatnonzero(is_good & (seconds < min_seconds))
    if len(short):
        findings.append(
            Finding(
                "warning",
                f"{check}: short",
                f"{len(short):,} files are shorter than {min_seconds:g} s",
                "they are repeated to fill a crop and teach little; leave them out with data.min_seconds",
                tuple(f"{names[int(row)]} ({seconds[row]:.2f} s)" for row in short[:NUM_EXAMPLES]),
            )
        )
    return findings


def duration_histogram(seconds: np.ndarray) -> str:
    """The durations as text, one bar a line."""
    edges = np.array([*DURATION_EDGES, np.inf])
    counts, _ = np.histogram(seconds, bins=edges)
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
        upper = float(np.quantile(seconds, 0.995)) if len(seconds) else 1.0
        axes.hist(np.minimum(seconds, upper), bins=PNG_BINS)
        axes.set_title(f"{title}: {len(seconds):,} files")
        axes.set_xlabel("duration in seconds (the longest 0.5 % in the last bar)")
        axes.set_ylabel("files")
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format="png", dpi=100)


def _format_findings(lookup: LookupTable, is_good: np.ndarray, check: str) -> list[Finding]:
    rates, rate_counts = np.unique(lookup.sample_rates[is_good], return_counts=True)
    shown = ", ".join(f"{rate} Hz ({count:,})" for rate, count in zip(rates, rate_counts, strict=True))
    num_other = int(rate_counts[rates != lookup.sample_rate].sum())
    findings = []
    if not num_other:
        findings.append(Finding("ok", f"{check}: rate", shown))
    else:
        low = rates.min() < lookup.sample_rate
        advice = "they are resampled on every read, which is slow: convert or pack them once (speakernet pack)"
        if low:
            advice += "; lower rates lack the upper band, and a network learns to tell speakers by that"
        findings.append(Finding("warning", f"{check}: rate", shown, advice))
    num_wide = int(np.count_nonzero(lookup.num_channels[is_good] > 1))
    if num_wide:
        message = f"{num_wide:,} files have up to {lookup.num_channels[is_good].max()} channels; they are mixed down"
        advice = "fine if the channels are copies; if each holds another speaker, split them first"
        findings.append(Finding("warning", f"{check}: channels", message, advice))
    return findings
