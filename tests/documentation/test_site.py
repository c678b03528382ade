"""The site has every page once, under the same headings as GitHub; pages and pictures made from the code are fresh."""

import importlib.util
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from speakernet.cli import main
from tests.documentation.pages import PAGES, ROOT, read_page

DOCS = ROOT / "docs"


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name Python objects, as plain values."""


Loader.add_multi_constructor("", lambda loader, suffix, node: suffix)


def site() -> dict[str, Any]:
    """mkdocs.yml."""
    return yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)


def pages_in(nav: Any) -> Iterator[str]:
    """Every file that the navigation names."""
    if isinstance(nav, str):
        yield nav
    for one in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        yield from pages_in(one)


def test_every_page_is_in_the_navigation_once() -> None:
    named = Counter(pages_in(site()["nav"]))
    assert set(named) == {path.relative_to(DOCS).as_posix() for path in PAGES if DOCS in path.parents}
    assert max(named.values()) == 1
    assert next(iter(named)) == "index.md"


def test_the_index_leads_to_every_page() -> None:
    linked = {target.partition("#")[0] for target in read_page(DOCS / "index.md").links()}
    assert linked >= {path.name for path in DOCS.glob("*.md")} - {"index.md"}


def test_the_site_loads_nothing_from_elsewhere_and_fails_at_broken_links() -> None:
    settings = site()
    assert settings["theme"]["font"] is False and settings["strict"] is True
    assert "extra_javascript" not in settings
    assert all((DOCS / name).is_file() for name in settings["extra_css"])
    assert set(settings["validation"]["links"].values()) == {"warn"}


def test_headings_are_linked_by_one_rule() -> None:
    """That of GitHub; two headings that come to one anchor are told apart by each in its own way."""
    for path in PAGES:
        page = read_page(path)
        assert len(page.anchors()) == page.num_headings, f"{page.name} has two headings of one name"


def test_the_page_of_all_options_is_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show-config", "--reference"]) == 0
    assert capsys.readouterr().out == (DOCS / "configuration.md").read_text(encoding="utf-8"), "run `make pages`"


def test_the_picture_of_the_rooms_is_fresh() -> None:
    specification = importlib.util.spec_from_file_location("draw_rooms", DOCS / "pictures" / "draw_rooms.py")
    assert specification is not None and specification.loader is not None
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    assert script.PICTURE.read_text(encoding="utf-8") == script.draw(), "run `make pages`"
    assert {path.name for path in (ROOT / "speakernet").iterdir() if (path / "__init__.py").is_file()} <= {
        *script.ROOMS,
        *script.floor(script.imports()),
    }


def test_pages_link_to_nothing_outside_the_site() -> None:
    for path in DOCS.rglob("*.md"):
        outside = [target for target in read_page(path).links() if target.startswith("../..") or (
            target.startswith("../") and path.parent == DOCS)]  # fmt: skip
        assert not outside, f"{path.name}: {outside}; name the file instead"


def test_pictures_are_small() -> None:
    for path in DOCS.rglob("*"):
        assert path.suffix not in (".svg", ".png") or path.stat().st_size < 200_000, path


def test_rows_of_tables_have_as_many_cells_as_their_heads() -> None:
    """Within code, too, a `|` ends a cell unless a backslash stands before it."""
    odd = []
    for path in PAGES:
        cells = 0
        for line in read_page(path).prose.splitlines():
            found = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
            odd += [f"{path.name}: {line[:60]}"] if cells and found and found != cells else []
            cells = found
    assert not odd, "\n".join(odd)
