"""Imports point one way between packages and files; some libraries have one importer; late imports
give a reason.
"""

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "speakernet"

BASE = {
    "options",
    "terminal",
    "files",
    "random",
    "distributed",
    "machine",
    "parallel",
    "checkpoint",
    "run_folder",
}
OPTIONS = {"data", "evaluation", "frontend", "losses", "models", "training"}
ALLOWED = {
    "options": set(),
    "terminal": set(),
    "files": {"terminal"},
    "random": set(),
    "distributed": set(),
    "machine": {"options", "files", "distributed"},
    "parallel": {"files", "machine", "distributed"},
    "checkpoint": {"files"},
    "run_folder": {"files", "checkpoint"},
    # Composes the option modules of the packages (`test_config_imports`).
    "config": {"options", "files", "run_folder", *OPTIONS},
    "data": BASE,
    "corpora": {*BASE, "data"},
    "frontend": BASE,
    "models": {*BASE, "frontend"},
    "losses": BASE,
    "training": BASE,
    "evaluation": {*BASE, "data"},
    "inference": {*BASE, "data", "frontend", "models", "evaluation"},
    "checks": {*BASE, "data"},
    "helpers": {*BASE, "assembly", "training"},
    "assembly": {
        *BASE,
        "config",
        "data",
        "corpora",
        "frontend",
        "models",
        "losses",
        "training",
        "evaluation",
        "checks",
        "inference",
    },
}
"""Package -> packages it may import; `cli` may import everything."""

ONE_DOOR = {
    "torchaudio": {"frontend"},
    "soundfile": {"data/audio.py"},
    "pydantic": {
        "options.py",
        "config",
        "data",
        "evaluation",
        "losses",
        "machine",
        "models",
        "training",
    },
    "requests": {"corpora"},
    "jinja2": {"evaluation"},
    "tqdm": {"terminal.py"},
    "fsspec": {"training/mirror.py", "data/stores.py"},
    "onnx": {"inference"},
    "onnxruntime": {"inference"},
    # Importing it sets torch to one thread.
    "silero_vad": set(),
    "fastapi": {"inference"},
    "uvicorn": {"inference"},
}
"""Library -> packages or files that may import it."""

MAX_LATE_IMPORTS = 27  # without those of the commands, all of which import late
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


@functools.cache
def imported_modules(path):
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write speakernet.…"
            modules.add(node.module or "")
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def package_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_table():
    for path in FILES:
        package = package_of(path)
        if package in ("cli", "__init__", "__main__"):
            continue
        imported = {
            module.split(".")[1]
            for module in imported_modules(path)
            if module.startswith("speakernet.")
        }
        imported = {
            one for one in imported if (PACKAGE / one).is_dir() or (PACKAGE / f"{one}.py").is_file()
        }
        refused = imported - {package} - ALLOWED[package]
        assert not refused, f"{path} may not import {refused}"


def is_option_module(name):
    """`package.options`, or a file of the folder of that name."""
    return "options" in name.split(".")[2:]


def test_config_imports():
    for path in sorted((PACKAGE / "config").glob("*.py")):
        for module in imported_modules(path) & MODULES.keys():
            if module.count(".") > 1 and module.split(".")[1] in OPTIONS:
                assert is_option_module(module), f"{path.name} imports {module}"


def test_imports_of_option_modules():
    light = {"speakernet.options"}
    for name, path in MODULES.items():
        if is_option_module(name):
            for module in imported_modules(path):
                library = module.split(".")[0]
                assert library not in ("torch", "numpy", "scipy", "torchaudio"), (
                    f"{name} imports {module}"
                )
                assert module not in MODULES or module in light or is_option_module(module), (
                    f"{name}: {module}"
                )


def test_no_cycles():
    # Importing a file also runs the `__init__` of the folders above it.
    graph = {
        name: imported_modules(path) & MODULES.keys() - {name} for name, path in MODULES.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def late_imports(path):
    """Line of each import inside a function, and whether it has a comment on its line or above its
    block.
    """
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom):
                above = node.lineno - 2
                while above >= 0 and lines[above].strip().startswith(
                    ("from ", "import ", "try:", ")")
                ):
                    above -= 1
                yield (
                    node.lineno,
                    "#" in lines[node.lineno - 1] or lines[above].strip().startswith("#"),
                )


def test_late_imports():
    found = {
        (path.relative_to(PACKAGE).as_posix(), *one) for path in FILES for one in late_imports(path)
    }
    without = sorted(f"{name}:{line}" for name, line, has_reason in found if not has_reason)
    assert not without, f"no comment says why these are late: {', '.join(without)}"
    assert len([name for name, _, _ in found if not name.startswith("cli/")]) <= MAX_LATE_IMPORTS


def test_libraries_with_one_importer():
    for path in FILES:
        name = path.relative_to(PACKAGE).as_posix()
        libraries = {module.split(".")[0] for module in imported_modules(path)}
        for library, doors in ONE_DOOR.items():
            if library in libraries:
                assert package_of(path) in doors or name in doors, (
                    f"{name} imports {library}; only {doors} may"
                )


def test_posix_modules():
    """POSIX modules imported at the top of a file end every command on Windows."""
    for path in FILES:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        imported = {
            alias.name for node in body if isinstance(node, ast.Import) for alias in node.names
        }
        assert not imported & {"fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"}, path


def test_yaml_has_one_reader():
    """The one reader enforces the limits; writing is unrestricted."""
    for path in FILES:
        if path.name != "files.py":
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"yaml\.\w*(load|parse|compose|scan)|from yaml import", text), path
