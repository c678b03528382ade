"""The shell and the building blocks of a report page: one HTML file that needs no network, no script, no second file.

Light or dark follows the reader's setting. All text that comes from outside goes through `escape` here. What stands on
a page is decided in `report.py`.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Literal

from speakernet.evaluation.report.plot_style import colour_variables

STYLE = """
:root { --font: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  --page: #f3f5f8; --card: #ffffff; --accent: #1f5fb4; color-scheme: light dark; LIGHT }
@media (prefers-color-scheme: dark) { :root { --page: #11161d; --card: #1a212b; --accent: #6ea8f7; DARK } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 var(--font);
  -webkit-text-size-adjust: 100%; overflow-wrap: anywhere; }
main, header, footer { max-width: 1240px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 28px; }
footer { padding-bottom: 40px; color: var(--muted); font-size: 13px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; }
h2 { font-size: 19px; margin: 34px 0 10px; }
h3 { font-size: 14px; margin: 0 0 6px; }
p { margin: 6px 0; max-width: 90ch; }
.quiet { color: var(--muted); font-size: 13px; }
nav { margin: 10px 0 0; display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 14px; }
a { color: var(--accent); }
.tiles, .cards { display: grid; gap: 14px; }
.tiles { grid-template-columns: repeat(auto-fill, minmax(148px, 1fr)); }
.cards { grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); align-items: start; }
.halves { grid-template-columns: repeat(auto-fill, minmax(min(480px, 100%), 1fr)); }
.wide { grid-template-columns: minmax(0, 1fr); }
.card, .tile { background: var(--card); border: 1px solid var(--grid); border-radius: 8px; padding: 14px;
  min-width: 0; }
.card svg { display: block; width: 100%; height: auto; max-width: 520px; margin: 0 auto; }
.tile b { display: block; font-size: 24px; line-height: 1.25; font-weight: 650; font-variant-numeric: tabular-nums; }
.tile .name { color: var(--muted); font-size: 13px; }
.tile.main { grid-column: span 2; }
.tile.main b { font-size: 32px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
th { color: var(--muted); font-weight: 600; overflow-wrap: normal; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td:last-child, th:last-child { padding-right: 0; }
pre { margin: 6px 0; padding: 12px; overflow-x: auto; background: var(--page); border-radius: 6px; font-size: 12.5px;
  line-height: 1.45; white-space: pre-wrap; }
details > summary { cursor: pointer; color: var(--accent); }
.warning { border-left: 4px solid var(--series-2); margin: 14px 0; }
@media (max-width: 560px) { main, header, footer { padding-left: 12px; padding-right: 12px; }
  .tiles { grid-template-columns: 1fr 1fr; } th, td { padding-right: 8px; } }
@media print { body { background: none; } .card, .tile { break-inside: avoid; } }
"""


def page(title: str, subtitle: str, sections: Sequence[tuple[str, str, str]]) -> str:
    """A whole page.

    Args:
        title: plain text.
        subtitle: plain text below it.
        sections: (anchor, heading, HTML) of each part that has something to show.
    """
    style = STYLE.replace("LIGHT", colour_variables(False)).replace("DARK", colour_variables(True))
    links = "".join(f'<a href="#{anchor}">{escape(heading)}</a>' for anchor, heading, _ in sections)
    body = "".join(
        f'<section id="{anchor}"><h2>{escape(heading)}</h2>{content}</section>' for anchor, heading, content in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # The page says itself that nothing may be loaded from anywhere.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>"
        f'<header><h1>{escape(title)}</h1><p class="quiet">{escape(subtitle)}</p><nav>{links}</nav></header>'
        f"<main>{body}</main><footer><p>Made by speakernet. Intervals are 95 % and drawn over speakers.</p></footer>"
        "</body></html>\n"
    )


def tiles(entries: Iterable[tuple[str, str, str]]) -> str:
    """Headline numbers: (name, value, small print); the first one is large."""
    parts = []
    for number, (name, value, note) in enumerate(entries):
        kind = "tile main" if number == 0 else "tile"
        small = f'<div class="quiet">{escape(note)}</div>' if note else ""
        parts.append(f'<div class="{kind}"><div class="name">{escape(name)}</div><b>{escape(value)}</b>{small}</div>')
    return f'<div class="tiles">{"".join(parts)}</div>'


def cards(contents: Iterable[str], kind: Literal["thirds", "halves", "wide"] = "thirds") -> str:
    """Cards side by side where the screen has room for them; `wide` ones take a line each."""
    return f'<div class="cards {kind}">{"".join(contents)}</div>'


def card(heading: str, content: str, note: str = "") -> str:
    """A framed part: heading, HTML content, and a note in plain text below."""
    below = f'<p class="quiet">{escape(note)}</p>' if note else ""
    return f'<div class="card"><h3>{escape(heading)}</h3>{content}{below}</div>'


def warning(text: str) -> str:
    """A sentence that must not be overlooked."""
    return f'<div class="card warning"><p>{escape(text)}</p></div>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """A table that scrolls by itself where it is wider than the screen.

    Args:
        header: plain text.
        rows: plain text cells.
        numbers: columns that are set to the right.
    """
    right = set(numbers)

    def cell(kind: str, column: int, text: str) -> str:
        attribute = ' class="number"' if column in right else ""
        return f"<{kind}{attribute}>{escape(text)}</{kind}>"

    head = "".join(cell("th", column, text) for column, text in enumerate(header))
    body = "".join(
        "<tr>" + "".join(cell("td", column, text) for column, text in enumerate(row)) + "</tr>" for row in rows
    )
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def facts(entries: Iterable[tuple[str, str]]) -> str:
    """Names and values, a row each."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in entries)
    return f'<div class="scroll" tabindex="0"><table><tbody>{rows}</tbody></table></div>'


def code(text: str, summary: str = "") -> str:
    """Text as it is written; folded away behind `summary` where that is given."""
    block = f"<pre>{escape(text)}</pre>"
    return f"<details><summary>{escape(summary)}</summary>{block}</details>" if summary else block


def paragraph(text: str, *, is_quiet: bool = False) -> str:
    """A paragraph of plain text."""
    attribute = ' class="quiet"' if is_quiet else ""
    return f"<p{attribute}>{escape(text)}</p>"
