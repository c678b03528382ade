"""An option is written once: no second default."""

import ast
from pathlib import Path

from speakernet.config.schema import CHOICES, SECTIONS
from speakernet.options import Options

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*sorted((ROOT / "speakernet").rglob("*.py")), *sorted((ROOT / "data_prep").glob("*.py"))]

OWNERS = {
    *SECTIONS.values(),
    *(component.options for choice in CHOICES.values() for component in choice.table.values()),
}
OPTION_NAMES = {name for owner in OWNERS for name in owner.model_fields}
# Words with other meanings in code without configuration.
COMMON_WORDS = {
    "name",
    "options",
    "seed",
    "style",
    "device",
    "scale",
    "channels",
    "threads",
    "metadata",
    "score",
    "window",
    "normalize",
    "speech",
}


def defaults_of(function):
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    named = zip(
        positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True
    )
    only = [
        (one, value)
        for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if value
    ]
    return [(one.arg, value) for one, value in [*named, *only]]


def is_literal_default(value):
    """Whether a default is a literal, other than None and an empty string."""
    return isinstance(value, ast.Constant) and value.value not in (None, "")


def test_defaults():
    for path in SOURCES:
        if "options" in path.with_suffix("").parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for name, value in defaults_of(node):
                    is_second = name in OPTION_NAMES - COMMON_WORDS and is_literal_default(value)
                    assert not is_second, (
                        f"{path}:{node.lineno}: {name} has its default in an options class"
                    )


def test_docstrings_of_options():
    for owner in OWNERS:
        assert issubclass(owner, Options) and (owner.__doc__ or "").strip().endswith("."), owner
