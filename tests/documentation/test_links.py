"""Links between pages lead to a file and a heading that are there; what pages name of the code exists."""

import re
from pathlib import Path

import pytest

from tests.documentation.pages import PAGES, ROOT, Page, parse_page, read_page

ROOMS = {folder.name for folder in (ROOT / "speakernet").iterdir() if folder.is_dir()}
CODE_FOLDERS = (ROOT, ROOT / "speakernet", ROOT / "speakernet" / "data")


def broken_links(page: Page) -> list[str]:
    """Targets of a page that lead nowhere; those on the web are not asked."""
    found = []
    for target in page.links():
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.path.parent / name).resolve() if name else page.path
        if not path.exists():
            found.append(f"{page.name} links to {target}: no such file")
        elif anchor and anchor not in (page if path == page.path else read_page(path)).anchors():
            found.append(f"{page.name} links to {target}: no such heading")
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    found = broken_links(read_page(path))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_code_that_pages_name_exists(path: Path) -> None:
    for word in read_page(path).code_words():
        found = re.fullmatch(r"([\w/.]+/(?:\w+\.py)?)(?:::(\w+))?", word)
        if found is None or not (found[1].endswith(".py") or found[1].split("/")[0] in ROOMS):
            continue
        files = [folder / found[1] for folder in CODE_FOLDERS if (folder / found[1]).exists()]
        assert files, f"{path.name} names {word}"
        if found[2]:
            assert re.search(rf"\b(def|class) {found[2]}\b", files[0].read_text(encoding="utf-8")), word


def test_a_link_that_leads_nowhere_is_found() -> None:
    text = "# One\n\n[a](#one) [b](#two) [c](docs/data.md#lists) [d](docs/data.md#list) [e](docs/none.md) ![f](f.svg)\n"
    found = broken_links(parse_page(ROOT / "README.md", text))
    assert [line.split()[3] for line in found] == ["#two:", "docs/data.md#list:", "docs/none.md:", "f.svg:"]
