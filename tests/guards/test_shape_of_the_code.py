"""Files and functions stay short, and nothing is unfinished or specific to a machine."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*ROOT.glob("*.py")]
for folder in ("speakernet", "benchmarks", "data_prep"):
    SOURCES += sorted((ROOT / folder).rglob("*.py"))
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 100
LONG_FUNCTION_LINES = 60
MAX_LONG_FUNCTIONS = 40
MAX_ARGUMENTS = 8
WITH_MORE_ARGUMENTS = {"who"}
"""Public API whose documented keywords have to stay."""
MAX_LOGGED_VALUES = 4
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LOG_METHODS = {"debug", "info", "warning", "error", "exception"}
UNTRACKED = (".wav", ".flac", ".m4a", ".pt", ".onnx", ".safetensors")


def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def functions_of(path):
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{path}:{node.name}", node


def test_size():
    long = []
    for path in SOURCES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES, path
        for name, node in functions_of(path):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, name
            if lines > LONG_FUNCTION_LINES:
                long.append(name)
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            names = {argument.arg for argument in arguments} - {"self", "cls"}
            assert len(names) <= MAX_ARGUMENTS or node.name in WITH_MORE_ARGUMENTS, name
    assert len(long) <= MAX_LONG_FUNCTIONS, long


def test_plain_expressions():
    for path in SOURCES:
        for node in ast.walk(parse(path)):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            for kind in (COMPREHENSIONS, ast.IfExp):
                if isinstance(node, kind):
                    nested = [inner for inner in ast.walk(node) if isinstance(inner, kind)]
                    assert nested == [node], where
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                is_log = node.func.attr in LOG_METHODS
                assert not is_log or len(node.args) <= 1 + MAX_LOGGED_VALUES, where


def test_docstrings_of_files():
    for path in SOURCES:
        assert len(ast.get_docstring(parse(path)) or "") > 20, path


def test_unfinished():
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\b(TODO|FIXME|XXX)\b|except:", text), path
        assert "NotImplementedError" not in text or "abstract" in text, path


def test_tracked_files():
    command = ["git", "ls-files"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    for path in (ROOT / name for name in listing.stdout.splitlines()):
        if path.is_file():
            assert path.stat().st_size < 1_000_000, path
            assert path.suffix not in UNTRACKED, path
