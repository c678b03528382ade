"""The notebook of the first hour: its cells run in order, on fewer voices, and draw what the text promises."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

LESS = {"SPEAKERS": 8, "TRIAL_SPEAKERS": 6, "EPOCHS": 2}
MOST_BYTES = 300_000


@pytest.fixture(scope="module")
def notebook(repository: Path) -> Path:
    return repository / "examples" / "first_hour.ipynb"


@pytest.fixture(scope="module")
def cells(notebook: Path) -> list[dict[str, Any]]:
    return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


def sources(cells: list[dict[str, Any]], kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


def shown_by(source: str, names: dict[str, Any]) -> Any:
    """Run a cell and return what a notebook would show below it: the value of the last line."""
    # Words to the notebook itself, such as where to draw.
    tree = ast.parse("\n".join(line for line in source.splitlines() if not line.startswith("%")))
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "first_hour.ipynb", "exec"), names)
    return last and eval(compile(ast.Expression(last.value), "first_hour.ipynb", "eval"), names)


def test_it_is_small_and_its_links_lead_somewhere(notebook, cells):
    assert notebook.stat().st_size < MOST_BYTES
    text = "\n".join(sources(cells, "markdown"))
    links = re.findall(r"\]\(([^)#]+)", text)
    assert len(links) >= 3 and all((notebook.parent / link).is_file() for link in links)
    assert "does not detect replayed or synthetic voices" in text
    first = sources(cells, "code")[0]
    assert all(f"{name} = " in first for name in LESS)


@pytest.mark.slow
def test_its_cells_run_in_order(cells, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    shown = []
    for number, source in enumerate(sources(cells, "code")):
        shown.append(shown_by(source, names))
        if number == 0:
            names.update(LESS)
    said = capsys.readouterr().out
    statuses = re.findall(r"exit status (\d)", said)
    assert len(statuses) == 7 and set(statuses) <= {"0", "1"} and statuses.count("1") <= 1
    figures = [one for one in shown if isinstance(one, Figure)]
    assert len(figures) == 5 and all(figure.axes[0].has_data() for figure in figures)
    assert re.search(r"equal error rate \d+\.\d % \(95 % interval", said)
    assert re.search(r"^(Ada|Bo|unknown) score \d", said, flags=re.MULTILINE)
    assert (tmp_path / "first_hour" / "run" / "report.html").is_file()
