"""Files and functions stay small, public names are documented, nothing of one machine or half done is left behind."""

import ast
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "speakernet"
SOURCES = [
    *sorted(PACKAGE.rglob("*.py")),
    *sorted((ROOT / "benchmarks").rglob("*.py")),
    *sorted((ROOT / "data_prep").glob("*.py")),
    *sorted(ROOT.glob("*.py")),
]

MAX_FILE_LINES = 420
MAX_FUNCTION_LINES = 60


def identity(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module", params=SOURCES, ids=identity)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_size(path: Path, nodes: list[ast.AST]) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_FILE_LINES, "the file has outgrown its room: make it a folder"
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


def test_public_names_are_documented(tree: ast.Module, nodes: list[ast.AST]) -> None:
    assert len(ast.get_docstring(tree) or "") > 20, "the file does not say what it is for"
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            members = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            if node.name.startswith("_"):
                continue
            assert ast.get_docstring(node), f"class {node.name}"
            for member in members:
                is_trivial = member.name.startswith("_") or member.name in ("forward", "extra_repr", "problems")
                assert is_trivial or ast.get_docstring(member), f"{node.name}.{member.name}"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"function {node.name}"


def test_nothing_unfinished(path: Path, nodes: list[ast.AST]) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)
    assert "NotImplementedError" not in text or "abstract" in text
    for node in nodes:
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"bare except on line {node.lineno}"


def test_tracked_files_are_small_and_name_no_machine() -> None:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    for name in listing.stdout.splitlines():
        path = ROOT / name
        if not path.is_file():
            continue
        assert path.stat().st_size < 1_000_000, name
        assert path.suffix not in (".wav", ".flac", ".m4a", ".pt", ".onnx", ".safetensors"), name


def changed_at_import(body: Sequence[ast.stmt]) -> Iterator[str]:
    """What the statements of a file set in other modules when it is imported."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
            continue
        for node in ast.walk(statement):
            is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if is_set or (isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr"):
                yield ast.unparse(node)


def test_importing_a_test_changes_no_other_module() -> None:
    """Every file of the tests is imported by pytest, to look for examples; programs for other processes are too."""
    assert list(changed_at_import(ast.parse("part, other.build = other.build, part").body)) == ["other.build"]
    assert list(changed_at_import(ast.parse("if part:\n    setattr(other, 'build', part)").body))
    found = {
        identity(file): changes
        for file in sorted((ROOT / "tests").rglob("*.py"))
        if (changes := list(changed_at_import(ast.parse(file.read_text(encoding="utf-8")).body)))
    }
    assert not found
