"""What guards share: a file that several tests of a module look at is parsed once."""

import ast
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def tree(path: Path) -> ast.Module:
    """The module's `path`, parsed; as long as it stays the same, tests of it follow each other."""
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def nodes(tree: ast.Module) -> list[ast.AST]:
    """All that stands in the file, from the outside in."""
    return list(ast.walk(tree))
