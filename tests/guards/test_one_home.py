"""An option is written once: no second default."""

import ast

from speakernet.config.schema import CHOICES, SECTIONS
from speakernet.options import Options
from tests.conftest import REPOSITORY

SOURCES = [*(REPOSITORY / "speakernet").rglob("*.py"), *(REPOSITORY / "data_prep").glob("*.py")]
COMPONENTS = [component for choice in CHOICES.values() for component in choice.table.values()]
OWNERS = {*SECTIONS.values(), *(component.options for component in COMPONENTS)}
OPTION_NAMES = {name for owner in OWNERS for name in owner.model_fields}
COMMON_WORDS = """name options seed style device scale channels threads metadata score window
normalize speech"""
# They have other meanings in code without configuration.
OPTION_NAMES -= set(COMMON_WORDS.split())


def owners_of(name):
    return ", ".join(sorted(owner.__name__ for owner in OWNERS if name in owner.model_fields))


def defaults_of(function):
    """Name and default of each argument that has one."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    yield from zip(reversed(positional), reversed(arguments.defaults), strict=False)
    yield from zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)


def test_defaults():
    for path in SOURCES:
        if "options" in path.with_suffix("").parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for argument, value in defaults_of(node):
                    is_literal = isinstance(value, ast.Constant) and value.value not in (None, "")
                    is_second = is_literal and argument.arg in OPTION_NAMES
                    assert not is_second, (
                        f"{path}:{node.lineno}: {argument.arg} is an option of "
                        f"{owners_of(argument.arg)}; remove this default or rename the option, or "
                        "add the name to COMMON_WORDS if it means something else"
                    )


def test_docstrings_of_options():
    for owner in OWNERS:
        assert issubclass(owner, Options) and (owner.__doc__ or "").strip().endswith("."), owner
