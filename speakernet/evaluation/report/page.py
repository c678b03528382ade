"""What a report page is made of, as plain data, and the template that turns it into one HTML file.

The file needs no network, no script, no second file; light or dark follows the reader's setting. The template escapes
all text; what stands on a page is decided in `report.py` and `sections.py`.
"""

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from speakernet.evaluation.report.plot_style import colour_variables


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of plain text."""

    text: str
    is_quiet: bool = False
    kind: ClassVar[str] = "paragraph"


@dataclass(frozen=True)
class Notice:
    """A sentence that must not be overlooked."""

    text: str
    kind: ClassVar[str] = "warning"


@dataclass(frozen=True)
class Drawing:
    """An SVG element that was made here and is not escaped."""

    svg: Markup
    kind: ClassVar[str] = "drawing"


@dataclass(frozen=True)
class Cell:
    """A cell of a table with more in it than its text.

    Attributes:
        text: plain text.
        note: small print below.
        audio: address of a recording to be played; a `data:` address, for a page loads nothing.
    """

    text: str
    note: str = ""
    audio: str = ""


@dataclass(frozen=True)
class Table:
    """A table that scrolls by itself where it is wider than the screen.

    Attributes:
        header: plain text.
        rows: cells, most of them plain text.
        numbers: columns that are set to the right.
        weak: rows that are greyed.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    numbers: Collection[int] = ()
    weak: Collection[int] = ()
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Facts:
    """Names and values, a row each."""

    entries: Sequence[tuple[str, str]]
    kind: ClassVar[str] = "facts"


@dataclass(frozen=True)
class Code:
    """Text as it is written; folded away behind `summary` where that is given."""

    text: str
    summary: str = ""
    kind: ClassVar[str] = "code"


@dataclass(frozen=True)
class Range:
    """An interval on a line from 0 to `end`, in percent of the line."""

    low: float
    width: float
    middle: float
    end: str


@dataclass(frozen=True)
class Tile:
    """A headline number.

    Attributes:
        name: what it is.
        value: with its unit.
        note: small print below.
        range: its interval, drawn.
        caveats: sentences that belong beside it.
    """

    name: str
    value: str
    note: str = ""
    range: Range | None = None
    caveats: Sequence[str] = ()


@dataclass(frozen=True)
class Tiles:
    """Headline numbers; the first one is large."""

    tiles: Sequence[Tile]
    kind: ClassVar[str] = "tiles"


@dataclass(frozen=True)
class Card:
    """A framed part: heading, contents, and a note in plain text below."""

    heading: str
    blocks: "Sequence[Block]"
    note: str = ""
    kind: ClassVar[str] = "card"


@dataclass(frozen=True)
class Cards:
    """Cards side by side where the screen has room for them; `wide` ones take a line each."""

    cards: Sequence[Card]
    width: Literal["thirds", "halves", "wide"] = "thirds"
    kind: ClassVar[str] = "cards"


Block = Paragraph | Notice | Drawing | Table | Facts | Code | Tiles | Card | Cards


@dataclass(frozen=True)
class Section:
    """A part of the page with an anchor and a heading; one without blocks has nothing to show and is left out."""

    anchor: str
    heading: str
    blocks: Sequence[Block] = field(default_factory=tuple)


def render(title: str, subtitle: str, lead: str, sections: Sequence[Section]) -> str:
    """A whole page.

    Args:
        title: plain text.
        subtitle: small print below it.
        lead: the result in a sentence.
        sections: in their order.
    """
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            title=title,
            subtitle=subtitle,
            lead=lead,
            sections=[section for section in sections if section.blocks],
            light=colour_variables(False),
            dark=colour_variables(True),
        )
        .translate(INVISIBLE)
    )


INVISIBLE = {
    code: f"\\u{code:04x}"
    for code in (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0x20))
    if chr(code) not in "\t\n\r"
}
"""Characters that change the order in which others are shown, or are no text: written out, so that a name cannot look
like another one.
"""


@functools.cache
def _environment() -> Environment:
    # A name that a template misspells must not become an empty place on the page.
    return Environment(loader=PackageLoader(__package__ or ""), autoescape=True, undefined=StrictUndefined)
