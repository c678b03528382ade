"""Files and functions stay short, public names are documented, and nothing is unfinished or
machine-specific.
"""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for place in ("speakernet", "benchmarks", "data_prep", ".")
    for path in (ROOT / place).glob("**/*.py" if place != "." else "*.py")
)
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 100
LONG_FUNCTION_LINES = 60
MAX_LONG_FUNCTIONS = 45
MAX_ARGUMENTS = 10


def identity(path):
    return path.relative_to(ROOT).as_posix()


def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def functions_of(path):
    """Name, number of lines and number of arguments of every function in a file."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [
                one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            ]
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield f"{identity(path)}:{node.name}", lines, len({*names} - {"self", "cls"})


def test_size():
    long_files = [
        identity(path) for path in SOURCES if len(path.read_text().splitlines()) > MAX_FILE_LINES
    ]
    sizes = [one for path in SOURCES for one in functions_of(path)]
    lengths = {name: length for name, length, _ in sizes}
    assert not long_files
    assert not [name for name, length in lengths.items() if length > MAX_FUNCTION_LINES]
    assert sum(length > LONG_FUNCTION_LINES for length in lengths.values()) <= MAX_LONG_FUNCTIONS
    of_package = [
        name for name, _, count in sizes if count > MAX_ARGUMENTS and name.startswith("speakernet/")
    ]
    assert len(of_package) <= 1, of_package


def test_docstrings_of_files():
    assert not [
        identity(path) for path in SOURCES if len(ast.get_docstring(parse(path)) or "") <= 20
    ]


def test_unfinished():
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\b(TODO|FIXME|XXX)\b", text), path
        assert "NotImplementedError" not in text or "abstract" in text, path
        bare = [
            node
            for node in ast.walk(parse(path))
            if isinstance(node, ast.ExceptHandler) and node.type is None
        ]
        assert not bare, f"{path}: bare except"


def test_tracked_files():
    listing = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    for path in (ROOT / name for name in listing.stdout.splitlines()):
        if path.is_file():
            assert path.stat().st_size < 1_000_000, path
            assert path.suffix not in (".wav", ".flac", ".m4a", ".pt", ".onnx", ".safetensors"), (
                path
            )
