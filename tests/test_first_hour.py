"""The notebook of the first hour: its cells run in order on fewer voices and draw the figures of
the text.
"""

import ast
import json
import re

import pytest
from matplotlib.figure import Figure

LESS = {"SPEAKERS": 8, "TRIAL_SPEAKERS": 6, "EPOCHS": 2}


@pytest.fixture(scope="module")
def notebook(repository):
    return repository / "examples" / "first_hour.ipynb"


def sources(notebook, kind):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


def shown_by(source, names):
    """Run a cell and return the value of its last line, which a notebook would show."""
    tree = ast.parse("\n".join(line for line in source.splitlines() if not line.startswith("%")))
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "first_hour.ipynb", "exec"), names)
    return last and eval(compile(ast.Expression(last.value), "first_hour.ipynb", "eval"), names)


@pytest.mark.parametrize("name", ["first_hour", "your_own_voices"])
def test_links(repository, name):
    notebook = repository / "examples" / f"{name}.ipynb"
    links = re.findall(r"\]\(([^)#]+)", "\n".join(sources(notebook, "markdown")))
    assert len(links) >= 3 and all((notebook.parent / link).is_file() for link in links)
    assert notebook.stat().st_size < 300_000


@pytest.mark.slow
def test_cells(notebook, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "erste Stunde, là"
    folder.mkdir()
    monkeypatch.chdir(folder)
    names = {}
    shown = []
    for number, source in enumerate(sources(notebook, "code")):
        shown.append(shown_by(source, names))
        if number == 0:
            assert names.keys() > LESS.keys()
            names.update(LESS)
    out = capsys.readouterr().out
    statuses = re.findall(r"exit status (\d)", out)
    assert len(statuses) == 7 and set(statuses) <= {"0", "1"} and statuses.count("1") <= 1
    figures = [value for value in shown if isinstance(value, Figure)]
    assert len(figures) == 5 and all(figure.axes[0].has_data() for figure in figures)
    assert len(re.findall(r"(?m)^(same speaker|different speakers): score", out)) == 3
    assert re.search(r"^(Ada|Bo|unknown) score \d", out, flags=re.MULTILINE)
    assert (folder / "first_hour" / "run" / "report.html").is_file()
