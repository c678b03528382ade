"""What the README promises: its figures, its table, its picture, its three lines; and the page of what a run leaves."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.report_picture import HEIGHT, MOST_BYTES, PICTURE, WIDTH, main
from speakernet.cli import EXIT_STATUSES
from tests.documentation.pages import ROOT, read_page
from tests.recipe_sources import __doc__ as RECIPE_SOURCES

README = read_page(ROOT / "README.md")
EVIDENCE = re.compile(r" \(\[[^\]]*\]\([^)]*\)[^)]*\)")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def wide_rows(name: str) -> list[str]:
    """Rows of the tables with a column for each toolkit, without their headings."""
    rows = [line for line in text_of(name).splitlines() if line.startswith("| ") and line.count("|") == 8]
    return [row for row in rows if not row.startswith("| |")]


def test_it_is_one_screen_or_two() -> None:
    lines = text_of("README.md").splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 400


def test_its_two_commands_stand_as_they_are_given() -> None:
    commands = [block.text.strip() for block in README.blocks if block.language == "sh"]
    assert commands == [
        "pip install -e . && python trainSpeakerNet.py --config exp01.yaml",
        "pip install -e '.[test]' && pytest",
    ]


@pytest.mark.parametrize("page", ["docs/performance.md", "docs/results.md"])
def test_its_figures_are_those_of_the_page_that_they_name(page: str) -> None:
    (table,) = re.findall(rf"from \[{page}\][^\n]*\n\|---\|---\|\n(.*?)\n\n", text_of("README.md"), flags=re.DOTALL)
    figures = re.findall(r"\*\*([\d.]+)", table)
    assert len(figures) >= 3
    for figure in figures:
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.])", text_of(page)), figure


def test_what_it_printed_is_what_results_say() -> None:
    (printed,) = [block.text for block in README.blocks if block.language == "text"]
    (result,) = re.findall(r"EER (\d\.\d\d) % \(95 % interval", printed)
    assert f"**{result} %** (1.9 to 5.0)" in text_of("docs/results.md")
    assert "1 min 36 s" in text_of("docs/results.md") and "a minute and a half" in README.prose


def test_its_rows_are_those_of_the_comparison_without_the_evidence() -> None:
    whole = [EVIDENCE.sub("", row) for row in wide_rows("docs/comparison.md")]
    short = wide_rows("README.md")
    assert len(short) >= 10 and all(row in whole for row in short)
    assert sum(row.split(" | ")[1].startswith("no") for row in short) >= 4, "what is missing here is said too"


def test_the_comparison_shows_where_each_toolkit_has_it() -> None:
    page = text_of("docs/comparison.md")
    commits = dict(re.findall(r"^\| \[(\S+)\]\(https://github.com/\S+\) \| ([0-9a-f]{7}) \|", page, flags=re.MULTILINE))
    assert len(commits) == 5
    for name in ("wespeaker", "3D-Speaker", "voxceleb_trainer"):
        assert f"{name} {commits[name]}" in (RECIPE_SOURCES or ""), name
    claims = [cell for row in wide_rows("docs/comparison.md") for cell in row.split(" | ")[2:]]
    claimed = [cell for cell in claims if cell.startswith("yes")]
    assert len(claimed) >= 30 and all("](https://github.com/" in cell for cell in claimed)
    linked = re.findall(r"https://github.com/[^/]+/([^/]+)/(?:blob|tree)/(\w+)/", page)
    assert linked and all(commits[name.replace("speechb", "SpeechB")] == commit for name, commit in linked)


def test_its_picture_is_small_and_of_the_size_that_its_command_draws() -> None:
    path = ROOT / PICTURE
    assert PICTURE.as_posix() in README.links() and path.stat().st_size <= MOST_BYTES
    with Image.open(path) as picture:
        assert picture.size == (WIDTH, HEIGHT)
        assert len(np.unique(np.asarray(picture.convert("L")))) > 20, "an empty page"


def test_a_picture_needs_a_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train first"):
        main([str(tmp_path), "--out", str(tmp_path / "a.png")])
    assert not list(tmp_path.iterdir())


def test_the_page_of_runs_has_every_exit_status() -> None:
    codes = re.findall(r"^\| (\d+) \|", text_of("docs/runs.md"), flags=re.MULTILINE)
    assert [int(code) for code in codes] == sorted(EXIT_STATUSES)
