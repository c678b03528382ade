"""The page of a report: sections in plain values, rendered as HTML, and their tables and plots as
files.

A page is a mapping of sections. A section has `cards` and optionally `tiles`, `warnings` and
`remarks`; a card has a `heading` and a `note`, `drawing`, `table`, `facts`, `code` or `lines`; a
table cell is text, or a mapping with `text`, `note` and `audio`. `templates/page.html.j2` renders
them and escapes all text.
"""

import csv
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from matplotlib.figure import Figure

from speakernet.evaluation import plots
from speakernet.files import atomic_write

logger = logging.getLogger(__name__)

Card = dict[str, Any]
Section = dict[str, Any]
MISSING = "–"
SECTIONS = {
    "result": "Result",
    "trials": "Trials",
    "difference": "Differences",
    "errors": "Errors",
    "data": "Data",
    "training": "Training",
    "slices": "Slices",
    "robustness": "Robustness",
    "hardest": "Hardest trials",
    "embeddings": "Embeddings",
    "settings": "Settings that differ",
    "facts": "How this was made",
}
"""Anchor -> heading, in page order."""
FOLDED = {"data", "training", "hardest", "embeddings", "facts"}
"""Sections collapsed until clicked."""
LATEX = str.maketrans(
    {one: f"\\{one}" for one in "&%$#_{}"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
)
INVISIBLE = {
    code: f"\\u{code:04x}"
    for code in (
        0x061C,
        0x200E,
        0x200F,
        *range(0x202A, 0x202F),
        *range(0x2066, 0x206A),
        *range(0x20),
    )
    if chr(code) not in "\t\n\r"
}
"""Control and bidirectional characters are shown as escapes, so that no name can be mistaken for
another."""


def drawn(
    folder: Path, name: str, heading: str, figure: Figure, note: str = "", **more: Any
) -> Card:
    """A card with the figure, which is also saved as `name`.png."""
    plots.save_figure(figure, folder / f"{name}.png")
    # Safe as markup: matplotlib escapes the names in it.
    drawing = Markup(plots.figure_svg(figure, name, heading))
    return {"heading": heading, "note": note, "drawing": drawing, "figure": figure, **more}


def write_page(
    path: Path,
    title: str,
    subtitle: str,
    lead: Sequence[str],
    sections: Mapping[str, Section],
    export: Path | None,
) -> Path:
    shown = {
        name: one
        for name, one in sections.items()
        if any(one.get(part) for part in ("cards", "remarks", "warnings"))
    }
    template = Environment(loader=PackageLoader(__package__ or ""), autoescape=True).get_template(
        "page.html.j2", globals={"headings": SECTIONS, "folded": FOLDED, "palette": plots.PALETTE}
    )
    with atomic_write(path) as file:
        file.write(
            template.render(title=title, subtitle=subtitle, lead=lead, sections=shown).translate(
                INVISIBLE
            )
        )
    logger.info("report: %s", path)
    if export is not None:
        _export(export, shown)
    return path


def _export(folder: Path, sections: Mapping[str, Section]) -> None:
    """Write each table as CSV and as a LaTeX table with booktabs rules, each plot as SVG and
    PDF.
    """
    for name, section in sections.items():
        for number, card in enumerate(section.get("cards", ()), start=1):
            heading = re.sub(r"[^a-z0-9]+", "_", card["heading"].lower()).strip("_")
            path = folder / f"{name}_{number}_{heading}"
            if table := card.get("table"):
                rows = [
                    [one["text"] if isinstance(one, Mapping) else one for one in row]
                    for row in table["rows"]
                ]
                with atomic_write(path.with_suffix(".csv")) as file:
                    csv.writer(file, lineterminator="\n").writerows([table["header"], *rows])
                head, *body = (
                    " & ".join(str(one).translate(LATEX) for one in row) + r" \\"
                    for row in [table["header"], *rows]
                )
                sides = "".join(
                    "r" if one in table.get("numbers", ()) else "l"
                    for one in range(len(table["header"]))
                )
                lines = [
                    rf"\begin{{tabular}}{{{sides}}}",
                    r"\toprule",
                    head,
                    r"\midrule",
                    *body,
                    r"\bottomrule",
                ]
                with atomic_write(path.with_suffix(".tex")) as file:
                    file.write("\n".join([*lines, r"\end{tabular}", ""]))
            if "figure" in card:
                for suffix in (".svg", ".pdf"):
                    plots.save_figure(card["figure"], path.with_suffix(suffix))
    logger.info("tables and plots: %s", folder)
