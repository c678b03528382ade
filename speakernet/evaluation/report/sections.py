"""The parts of a report page, each from the data of one or several runs; a part with nothing to show is empty.

Several runs share plots and stand in columns; the first run's names lead. Which parts a page has is decided in
`report.py`, how they look in `page.py` and `plots.py`; the parts about errors are in `error_sections.py`.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from speakernet.evaluation.report import plots
from speakernet.evaluation.report.data import RunData, is_number
from speakernet.evaluation.report.page import Block, Card, Cards, Drawing, Paragraph, Table
from speakernet.evaluation.report.plot_style import figure_svg, save_png
from speakernet.evaluation.results import FEW_TARGETS, GroupResult, SweepResult

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
    "eer_percent": "On the validation list, which chooses the best checkpoint where the last one is not final.",
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

    def card(self, name: str, heading: str, figure: Figure, note: str = "", below: Sequence[Block] = ()) -> Card:
        """A card with the figure, which is also saved as `name`.png, and what stands below it."""
        save_png(figure, self._folder / f"{name}.png")
        # The SVG was made here from numbers; names in it went through matplotlib, which escapes them.
        return Card(heading, [Drawing(Markup(figure_svg(figure, name, heading))), *below], note)


def training_part(runs: Sequence[RunData], drawings: Drawings) -> list[Block]:
    """One small plot for each quantity that was recorded and did change; a sentence for those that did not."""
    cards: list[Card] = []
    constants: list[str] = []
    single: list[str] = []
    for kind, key, axis, heading in CURVES:
        is_evaluation = kind == "evaluation"
        where = "epoch" if is_evaluation else "step"
        scale = 100.0 if key.endswith("_share") else 1.0
        series, note = {}, CURVE_NOTES.get(key, "")
        for run in runs:
            records = [one for one in run.metrics if one.get("kind") == kind and is_number(one.get(key))]
            if records:
                after = f" of {run.name}" if len(runs) > 1 else ""
                x = np.array([one.get(where, 0) for one in records], dtype=np.float64)
                series[run.name] = (x, scale * np.array([one[key] for one in records]))
                begin = records[-1].get("second_stage_from")
                note += f" After {where} {begin[where]}{after}: the large-margin stage." if begin else ""
        values = np.concatenate([y for _, y in series.values()]) if series else np.empty(0)
        # A flat line takes a card and says one number.
        if len(values) and np.ptp(values) == 0:
            said = constants if max(len(y) for _, y in series.values()) > 1 else single
            said.append(f"{heading} {values[0]:.4g}{' %' if '%' in axis else ''}")
        elif len(values):
            bands = eer_bands(runs) if key == "eer_percent" else {}
            note += " Bands: 95 % intervals over speakers, from few draws." if bands else ""
            figure = plots.curve_figure(
                series, where, axis, bands, mark_lowest=key == "eer_percent", has_ticks_at_points=is_evaluation
            )
            cards.append(drawings.card(f"training_{key}", heading, figure, note.strip()))
    blocks: list[Block] = [Cards(cards)] if cards else []
    if constants:
        blocks.append(Paragraph(f"The same all the time, and not drawn: {', '.join(constants)}.", is_quiet=True))
    if single:
        blocks.append(Paragraph(f"Measured once: {', '.join(single)}.", is_quiet=True))
    return blocks


def eer_bands(runs: Sequence[RunData]) -> dict[str, np.ndarray]:
    """Name of a run -> epoch, lowest and highest EER of the evaluations during its training, (3, evaluations)."""
    bands = {}
    for run in runs:
        intervals = [(one.get("epoch", 0), *(one.get("eer_interval_percent") or ())) for one in run.evaluations]
        rows = [one for one in intervals if len(one) == 3 and all(map(is_number, one))]
        if rows:
            bands[run.name] = np.array(rows, dtype=np.float64).T
    return bands


def slices_part(runs: Sequence[RunData], drawings: Drawings) -> list[Block]:
    """Plot and table of each way the results were sliced, run by run."""
    cards, undivided = [], []
    for number, run in enumerate(runs):
        after = f": {run.name}" if len(runs) > 1 else ""
        for row, one in enumerate((run.results.slices if run.results else None) or []):
            if len(one.rows) == 1:
                undivided.append(f"By {one.by}{after}: all trials are in one group, {one.rows[0].label}.")
                continue
            suffix = f"{row + 1}_{number + 1}" if len(runs) > 1 else f"{row + 1}"
            remarks = [f"{r.label}: {r.note}." for r in one.rows if r.note and r.eer_percent is not None]
            weak = [place for place, r in enumerate(one.rows) if plots.is_weak(r)]
            grey = [f"Grey: fewer than {FEW_TARGETS} targets, too few to build on."] if weak else []
            cells = [[r.label, f"{r.num_trials or 0:,}", f"{r.num_targets or 0:,}", _eer_text(r)] for r in one.rows]
            table = Table(["slice", "trials", "targets", "EER"], cells, numbers=(1, 2, 3), weak=weak)
            note = " ".join([one.note, *grey, *remarks]).strip()
            figure = plots.slices_figure(one.rows)
            cards.append(drawings.card(f"slices_{suffix}", f"By {one.by}{after}", figure, note, [table]))
    blocks: list[Block] = [Cards(cards)] if cards else []
    return [*blocks, *(Paragraph(text, is_quiet=True) for text in undivided)]


def sweep_part(runs: Sequence[RunData], drawings: Drawings) -> list[Block]:
    """EER against the amount of each degradation."""
    kinds: dict[str, dict[str, SweepResult]] = {}
    for run in runs:
        for one in (run.results.sweep if run.results else None) or []:
            kinds.setdefault(one.kind, {})[run.name] = one
    cards = []
    for kind, by_run in kinds.items():
        first = next(iter(by_run.values()))
        figure = plots.sweep_figure({name: one.rows for name, one in by_run.items()}, first.axis or kind)
        cards.append(drawings.card(f"sweep_{kind}", kind.capitalize(), figure, first.note))
    return [Cards(cards)] if cards else []


def map_part(runs: Sequence[RunData], drawings: Drawings) -> list[Block]:
    """Where the utterances of some speakers lie."""
    cards = []
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
        cards.append(drawings.card(f"embeddings_{number + 1}", f"Embeddings{after}", figure, note))
    return [Cards(cards)] if cards else []


def _eer_text(row: GroupResult) -> str:
    if row.eer_percent is None:
        return row.note or "no EER"
    if row.eer_interval_percent is None:
        return f"{row.eer_percent:.2f} %"
    low, high = row.eer_interval_percent
    return f"{row.eer_percent:.2f} % ({low:.2f}–{high:.2f})"
