"""What only POSIX systems have is never imported as if every system had it."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
POSIX_ONLY = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}


def test_modules_import_where_there_is_no_posix() -> None:
    """At the top of a file such an import ends every command on Windows; in a branch or a function it is fine."""
    for path in (
        path for folder in ("speakernet", "data_prep", "benchmarks") for path in (ROOT / folder).rglob("*.py")
    ):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        imported = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module for node in body if isinstance(node, ast.ImportFrom) and node.module}
        assert not imported & POSIX_ONLY, f"{path} imports {imported & POSIX_ONLY} unconditionally"
