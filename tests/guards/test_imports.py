"""Imports point one way between packages and files; some libraries have one importer; late imports
give a reason.
"""

import ast
import functools
import graphlib
import re

import pytest

from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "speakernet"


def read_table(text):
    """Name -> names, of lines `name: name name …`."""
    rows = (line.partition(":") for line in text.strip().splitlines())
    return {name: set(names.split()) for name, _, names in rows}


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
ON_BASE = read_table("""
data:
corpora: data checks
frontend:
models: frontend
losses:
training:
evaluation: data
inference: data frontend models evaluation
checks: data evaluation
helpers: assembly training
assembly: config data corpora frontend models losses training evaluation checks inference
""")
"""Package -> packages it may import besides the base; `cli` may import everything."""
ALLOWED = {package: BASE | names for package, names in ON_BASE.items()}
ALLOWED |= read_table("""
options:
terminal:
files: terminal
random:
distributed:
machine: options files distributed
parallel: files machine distributed
checkpoint: files
run_folder: files checkpoint
""")
# Composes the option modules of the packages (`test_config_imports`).
ALLOWED["config"] = {"options", "files", "run_folder"} | OPTIONS
ONE_DOOR = read_table("""
torchaudio: frontend
soundfile: data/audio.py data/augment/codecs.py
pydantic: options.py config data evaluation losses machine models training
requests: corpora
jinja2: evaluation
tqdm: terminal.py
fsspec: training/mirror.py data/stores.py
onnx: inference
onnxruntime: inference
fastapi: inference
uvicorn: inference
silero_vad:
""")
"""Library -> packages or files that may import it (silero_vad sets torch to one thread)."""
HEAVY = {"torch", "numpy", "scipy", "torchaudio"}
POSIX = {"fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"}
MAX_LATE_IMPORTS = 28  # without those of the commands, all of which import late
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


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


def libraries_of(path):
    return {module.split(".")[0] for module in imported_modules(path)}


def name_of(path):
    return path.relative_to(PACKAGE).as_posix()


def package_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_table():
    packages = {package_of(path) for path in FILES}
    for path in FILES:
        package = package_of(path)
        if package not in ("cli", "__init__", "__main__"):
            inside = {module for module in imported_modules(path) if "speakernet." in module}
            imported = {module.split(".")[1] for module in inside} & packages
            refused = imported - {package} - ALLOWED[package]
            assert not refused, f"{path} may not import {refused}"


def is_option_module(name):
    """`package.options`, or a file of the folder of that name."""
    return "options" in name.split(".")[2:]


def test_config_imports():
    for path in (PACKAGE / "config").glob("*.py"):
        for module in imported_modules(path) & MODULES.keys():
            if module.count(".") > 1 and module.split(".")[1] in OPTIONS:
                assert is_option_module(module), f"{path.name} imports {module}"


def test_imports_of_option_modules():
    for name, path in MODULES.items():
        if is_option_module(name):
            assert not libraries_of(path) & HEAVY, name
            for module in imported_modules(path) & MODULES.keys():
                is_light = module == "speakernet.options" or is_option_module(module)
                assert is_light, f"{name} imports {module}"


def test_no_cycles():
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
                while lines[above].strip().startswith(("from ", "import ", "try:", ")")):
                    above -= 1
                has_reason = "#" in lines[node.lineno - 1] or lines[above].lstrip().startswith("#")
                yield node.lineno, has_reason


def test_late_imports():
    # A set, because an import in an inner function is seen twice.
    outside_commands = set()
    for path in FILES:
        for line, has_reason in late_imports(path):
            assert has_reason, f"no comment says why {name_of(path)}:{line} is late"
            if package_of(path) != "cli":
                outside_commands.add((path, line))
    assert len(outside_commands) <= MAX_LATE_IMPORTS


def test_libraries_with_one_importer():
    for path in FILES:
        for library in libraries_of(path) & ONE_DOOR.keys():
            doors = ONE_DOOR[library]
            assert {package_of(path), name_of(path)} & doors, f"{path} imports {library}"


def test_posix_modules():
    """POSIX modules imported at the top of a file end every command on Windows."""
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                assert not {alias.name for alias in node.names} & POSIX, path


def test_yaml_has_one_reader():
    """The one reader enforces the limits; writing is unrestricted."""
    for path in FILES:
        if path.name != "files.py":
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"yaml\.\w*(load|parse|compose|scan)|from yaml import", text), path
