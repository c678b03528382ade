"""The page of a report: sections in plain values, rendered as HTML, and their tables and plots as
files.

Sections hold cards, and a card holds a drawing, a table or text; `templates/page.html.j2` is the
only renderer and escapes all text.
"""

import csv
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from speakernet.evaluation import plots
from speakernet.files import atomic_write

logger = logging.getLogger(__name__)

MISSING = "–"
SECTIONS = {
    "result": "Result",
    "trials": "Trials",
    "errors": "Errors",
    "data": "Data",
    "training": "Training",
    "slices": "Slices",
    "robustness": "Robustness",
    "hardest": "Hardest trials",
    "embeddings": "Embeddings",
    "facts": "How this was made",
    "words": "Words",
}
"""Anchor -> heading, in page order."""
FOLDED = {"data", "training", "hardest", "embeddings", "facts", "words"}
"""Sections collapsed until clicked."""
WORDS = (
    ("trial", "a pair of recordings, compared to decide whether one person speaks in both"),
    ("target", "a trial of one person; a non-target is a trial of two people"),
    ("score", "how similar the two voices are; higher is more similar"),
    ("threshold", "the lowest score at which a trial is accepted as one person"),
    ("miss", "one person is rejected: a true attempt fails"),
    ("false accept", "two people are accepted as one: a stranger passes"),
    (
        "EER",
        "equal error rate: the error rate at the threshold where misses and false accepts are "
        "equally frequent; 50 % is guessing",
    ),
    (
        "DCF(0.01)",
        "detection cost if one trial in 100 is a target: misses and false accepts, weighed by how "
        "often each can occur; 1 is the cost of always giving the same answer",
    ),
    ("minDCF", "the cost at the best threshold of this list"),
    ("actual DCF", "the cost at the threshold that calibration gives"),
    (
        "log-likelihood ratio",
        "how many times as likely the score is from one person as from two, as a natural "
        "logarithm; above 0 favours one person",
    ),
    ("calibration", "turns scores into log-likelihood ratios"),
    (
        "Cllr",
        "how far the log-likelihood ratios mislead, in bits; 0 is perfect, 1 is no information",
    ),
    ("target prior", "the share of targets that is expected in use"),
    ("cohort", "recordings of other people, by which each trial's score is normalised"),
    ("95 % interval", "the range to expect with other speakers of the same kind"),
)
"""Words that readers new to the field will not know; docs/glossary.md explains the same."""
LATEX = str.maketrans(
    {letter: f"\\{letter}" for letter in "&%$#_{}"}
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


@dataclass(frozen=True)
class Cell:
    """A table cell with more than its text."""

    text: str
    note: str = ""
    audio: str = ""
    """Address of a sound to play."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header."""

    header: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    numbers: Collection[int] = ()
    """Columns aligned to the right."""
    weak: Collection[int] = ()
    """Rows shown in grey."""


@dataclass(frozen=True)
class Card:
    """A box of the page; empty parts are not shown."""

    heading: str
    note: str = ""
    table: Table | None = None
    facts: Sequence[tuple[str, str]] = ()
    code: str = ""
    figure: Figure | None = None
    drawing: Markup | str = ""
    """The figure as SVG."""
    is_wide: bool = False


@dataclass(frozen=True)
class Tile:
    """A figure in large letters."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page under one heading; left out if it has neither cards nor texts."""

    cards: Sequence[Card] = ()
    tiles: Sequence[Tile] = ()
    warnings: Sequence[str] = ()
    remarks: Sequence[str] = ()
    is_open: bool = False
    """Shown at once even if sections of its name are folded."""


def draw_card(folder: Path, name: str, heading: str, figure: Figure, note: str) -> Card:
    """A card with the figure, which is also saved in the folder as `name`.png."""
    # PNG for slides and trackers; SVG for the page, because it scales and follows the reader's
    # light or dark setting.
    plots.save_figure(figure, folder / f"{name}.png")
    # Safe as markup: matplotlib escapes the names in it.
    drawing = Markup(plots.figure_svg(figure, name, heading))
    return Card(heading, note, figure=figure, drawing=drawing)


def write_page(
    path: Path,
    title: str,
    subtitle: str,
    lead: Sequence[str],
    sections: Mapping[str, Section],
    export: Path | None,
) -> Path:
    """Render the sections that have contents."""
    # Otherwise an empty section would have a heading and a link to it.
    shown = {
        name: section
        for name, section in sections.items()
        if section.cards or section.remarks or section.warnings
    }
    # Names of recordings come from users and may contain markup, so everything but the drawings is
    # escaped.
    environment = Environment(loader=PackageLoader(__package__ or ""), autoescape=True)
    environment.filters["code"] = mark_code
    constants = {"headings": SECTIONS, "folded": FOLDED, "palette": plots.PALETTE}
    template = environment.get_template("page.html.j2", globals=constants)
    text = template.render(title=title, subtitle=subtitle, lead=lead, sections=shown)
    with atomic_write(path) as file:
        file.write(text.translate(INVISIBLE))
    logger.info("report: %s", path)
    if export is not None:
        _export(export, shown)
    return path


def mark_code(text: str) -> Markup:
    """Escape a text, in which commands stand between backticks.

    >>> mark_code("`speakernet models` < all")
    Markup('<code>speakernet models</code> &lt; all')
    """
    return Markup(re.sub("`(.+?)`", r"<code>\1</code>", str(escape(text))))


def _export(folder: Path, sections: Mapping[str, Section]) -> None:
    """Write each table as CSV and LaTeX, each plot as SVG and PDF."""
    for name, section in sections.items():
        for number, card in enumerate(section.cards, start=1):
            # Numbered, because two cards may have the same heading.
            heading = re.sub(r"[^a-z0-9]+", "_", card.heading.lower()).strip("_")
            path = folder / f"{name}_{number}_{heading}"
            if card.table:
                with atomic_write(path.with_suffix(".csv")) as file:
                    writer = csv.writer(file, lineterminator="\n")
                    writer.writerows([card.table.header, *card.table.rows])
                with atomic_write(path.with_suffix(".tex")) as file:
                    file.write(latex(card.table))
            if card.figure:
                for suffix in (".svg", ".pdf"):
                    plots.save_figure(card.figure, path.with_suffix(suffix))
    logger.info("tables and plots: %s", folder)


def latex(table: Table) -> str:
    """A LaTeX table with booktabs rules."""
    lines = []
    for row in (table.header, *table.rows):
        # Names and units contain characters such as _ and %, which LaTeX does not take literally.
        lines.append(" & ".join(str(cell).translate(LATEX) for cell in row) + r" \\")
    columns = range(len(table.header))
    sides = "".join("r" if column in table.numbers else "l" for column in columns)
    body = "\n".join([r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"])
    return f"\\begin{{tabular}}{{{sides}}}\n{body}\n\\end{{tabular}}\n"
