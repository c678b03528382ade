"""The notebooks: their links, and how a test runs their cells; `documentation/test_site.py` runs
those of the first hour.
"""

import ast
import json
import re

import pytest


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
