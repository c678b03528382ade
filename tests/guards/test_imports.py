"""Imports between rooms run one way, and some libraries have one door."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "speakernet"

BASE = {"registry", "files", "seeding", "distributed", "machine"}
ALLOWED = {
    "registry": set(),
    "files": set(),
    "seeding": set(),
    "distributed": set(),
    "machine": {"files"},
    "config": {"registry", "files"},
    "data": BASE,
    "frontend": {"registry", "seeding"},
    "models": {"frontend", "registry", "files"},
    "losses": {"registry", "distributed"},
    "performance": {"registry", "files", "distributed", "machine"},
    "training": {*BASE, "performance"},
    "evaluation": {*BASE, "data", "performance"},
    "preflight": {"registry", "files", "machine", "data", "performance"},
    "build": {
        *BASE,
        *("config", "data", "frontend", "models", "losses", "performance", "training", "evaluation", "preflight"),
    },
}
"""Room -> the rooms that it may import; `cli` may import everything."""

ONE_DOOR = {
    "torchaudio": {"frontend"},
    # The classic pipeline is measured as it reads: whole float64 files, which our own door does not give.
    "soundfile": {"data/audio.py", "performance/baseline.py"},
    "jsonargparse": {"config"},
}
"""Library -> the rooms or files that may import it."""

FILES = sorted(PACKAGE.rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    """Every module that a file imports, also inside functions."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write speakernet.…"
            modules.add(node.module or "")
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_rooms_import_only_what_the_table_allows(path: Path) -> None:
    room = room_of(path)
    if room in ("cli", "__init__", "__main__"):
        return
    rooms = {module.split(".")[1] for module in imported_modules(path) if module.startswith("speakernet.")}
    rooms = {one for one in rooms if (PACKAGE / one).is_dir() or (PACKAGE / f"{one}.py").is_file()}
    assert rooms - {room} <= ALLOWED[room], f"{room} may not import {rooms - {room} - ALLOWED[room]}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_libraries_with_one_door(path: Path) -> None:
    name = path.relative_to(PACKAGE).as_posix()
    libraries = {module.split(".")[0] for module in imported_modules(path)}
    for library, doors in ONE_DOOR.items():
        if library in libraries:
            assert room_of(path) in doors or name in doors, f"{name} imports {library}; only {doors} may"


def test_the_guard_sees_an_import_inside_a_function(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text("def load():\n    from speakernet.data import lists\n")
    assert "speakernet.data" in imported_modules(file)
