"""Long pages begin with their contents: every section of them, in its order."""

import re

import pytest

from tests.documentation.pages import ROOT


@pytest.mark.parametrize("name", ["performance", "decisions"])
def test_the_contents_are_the_headings(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    contents = re.findall(r"^- \[(.+)\]\(#[^)]+\)$", text.split("\n## ")[0], flags=re.MULTILINE)
    assert contents == re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
