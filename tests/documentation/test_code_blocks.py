"""Blocks that are no commands: Python compiles and imports what there is, YAML configures, JSON is JSON."""

import ast
import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from speakernet.config import load_config
from tests.documentation.pages import PAGES, ROOT, SHELL, Block, parse_page, read_page
from tests.documentation.shell import holds_commands

BLOCKS = [block for path in PAGES for block in read_page(path).blocks]
LANGUAGES = (*SHELL, "python", "yaml", "json", "text", "diff", "toml")
NO_CONFIGURATION = {"apiVersion": "of Kubernetes", "reference": "of a study", "repos": "of pre-commit"}
"""The first key of a YAML file that is none of ours -> whose it is."""


def missing_names(text: str) -> Iterator[str]:
    """What a piece of Python imports, or takes from a module that it has imported, and does not exist."""
    modules = {}
    tree = ast.parse(text)
    for node in ast.walk(tree):
        names = [(one.name, one.asname) for one in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        for name, other in names:
            try:
                if isinstance(node, ast.ImportFrom):
                    getattr(importlib.import_module(node.module or ""), name)
                else:
                    modules[other or name.partition(".")[0]] = importlib.import_module(name)
            except (ImportError, AttributeError):
                yield f"{node.module}.{name}" if isinstance(node, ast.ImportFrom) else name
    for node in ast.walk(tree):
        is_of_name = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if is_of_name and node.value.id in modules and not hasattr(modules[node.value.id], node.attr):
            yield f"{node.value.id}.{node.attr}"


def identity(block: Block) -> str:
    return f"{block.page}:{block.line}"


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


@pytest.mark.parametrize("block", of("python"), ids=identity)
def test_python_names_what_there_is(block: Block) -> None:
    assert list(missing_names(block.text)) == []


@pytest.mark.parametrize("block", of("yaml"), ids=identity)
def test_yaml_is_a_configuration(block: Block, tmp_path: Path) -> None:
    values = yaml.safe_load(block.text)
    if next(iter(values)) not in NO_CONFIGURATION:
        (tmp_path / "page.yaml").write_text(block.text, encoding="utf-8")
        load_config(["--config", str(tmp_path / "page.yaml")])


@pytest.mark.parametrize("block", of("json"), ids=identity)
def test_json_is_json(block: Block) -> None:
    json.loads(block.text)


def test_every_block_says_what_it_holds() -> None:
    """So that no command hides in a block that no test reads."""
    odd = [identity(block) for block in BLOCKS if block.language not in LANGUAGES and not holds_commands(block)]
    assert not odd, f"fence these with one of {', '.join(LANGUAGES)}: {', '.join(odd)}"


def test_a_name_that_does_not_exist_is_found() -> None:
    page = parse_page(ROOT / "made.md", "```python\nimport json\nfrom os import pathe\njson.lode('')\n```\n")
    assert list(missing_names(page.blocks[0].text)) == ["os.pathe", "json.lode"]
