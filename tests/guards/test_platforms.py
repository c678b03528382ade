"""What only POSIX systems have is never imported as if every system had it."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
POSIX_ONLY = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
FILES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("speakernet", "data_prep", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


@pytest.mark.parametrize("name", FILES)
def test_modules_import_where_there_is_no_posix(name: str) -> None:
    """At the top of a file such an import ends every command on Windows; in a branch or a function it may stand."""
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    imported = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module}
    assert not imported & POSIX_ONLY, f"{name} imports {imported & POSIX_ONLY} unconditionally"


def test_the_list_of_modules_is_of_this_language() -> None:
    assert set(sys.stdlib_module_names) >= POSIX_ONLY
