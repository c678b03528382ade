"""Every figure of docs/hardware.md stands on the page that it names as its origin."""

import re

from tests.documentation.pages import ROOT, read_page

PAGE = ROOT / "docs" / "hardware.md"
FIGURE = r"\d[\d,.]*\d|\d"


def test_figures_are_those_of_the_pages_that_are_named() -> None:
    checked = 0
    text = re.sub(r"`[^`]*`", "", read_page(PAGE).prose)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    paragraphs = [one for one in re.split(r"\n(?=\n|- )", text) if not one.strip().startswith("|")]
    for statement in rows + paragraphs:
        origins = re.findall(r"\]\((\w+\.md)(?:#[^)]*)?\)", statement)
        if not origins or "not measured" in statement:
            continue
        sources = " ".join(read_page(PAGE.parent / name).path.read_text(encoding="utf-8") for name in origins)
        words = re.sub(r"\[[^\]]*\]\([^)]*\)|\w*[A-Za-z_]+\d+\w*", "", statement)
        for figure in re.findall(FIGURE, words):
            if len(figure) > 1:
                assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?!\d)", sources), f"{figure} is in none of {origins}"
                checked += 1
    assert checked >= 25


def test_it_says_what_was_not_measured() -> None:
    assert "Not measured on a GPU" in read_page(PAGE).prose
