"""Pages that are generated when the site is built: options by section, the help of each command,
and the notebooks.
"""

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter
from nbconvert.preprocessors import ExecutePreprocessor

from speakernet.cli import COMMANDS, main
from speakernet.config.reference import reference

ROOT = Path(__file__).resolve().parents[1]
HELP_WIDTH = "80"
EXECUTED = ("first_hour",)
"""Notebooks that need no recordings of the reader."""
WIDE_TABLE = "|---|---|---|---|---|---|"
CODE_OR_PERCENT = re.compile(r"<code>.*?</code>|(?<=\d)\s%", flags=re.DOTALL)
TAG = re.compile(r"<[^>]*>")
ALIGNED = re.compile(r"\S {2,}\S")
OPTION = re.compile(r"(?<![\w-])--\w[\w.-]*(?![^<]*>)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the generated pages to the navigation."""
    config.extra["generated"] = made = {title: list(pages()) for title, pages in PAGES.items()}
    for title, pages in made.items():
        config.nav.append({title: [name for name, _ in pages if name.endswith(".md")]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and their pictures to the site."""
    for pages in config.extra["generated"].values():
        for name, content in pages:
            files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> None:
    """Pages without sections, or with wide tables, use the place of the table of contents."""
    if "\n## " not in markdown or WIDE_TABLE in markdown:
        page.meta["hide"] = ["toc"]


def on_page_content(html: str, **_: Any) -> str:
    """Keep percent signs beside their numbers, and mark what site.css does not break: options,
    after whose hyphens browsers end lines, and aligned columns.
    """

    def mark(match: re.Match[str]) -> str:
        if match[0].endswith("%"):
            return "\N{NO-BREAK SPACE}%"
        code = OPTION.sub(r'<span class="option">\g<0></span>', match[0])
        if ALIGNED.search(TAG.sub("", code)):
            code = code.replace("<code>", '<code class="aligned">', 1)
        return code

    return CODE_OR_PERCENT.sub(mark, html)


def options() -> Iterator[tuple[str, str]]:
    """A page for each section of a configuration, after one that lists them."""
    head, *sections = reference().split("\n## ")
    yield "configuration.md", re.sub(r"\(#(\w+)\)", r"(configuration_\1.md)", head)
    for section in sections:
        name = section.partition("\n")[0]
        yield f"configuration_{name}.md", "# " + section.replace("\n### ", "\n## ")


def commands() -> Iterator[tuple[str, str]]:
    """A page for each command: its help."""
    os.environ["COLUMNS"] = HELP_WIDTH
    for command in COMMANDS:
        with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
            main([command, "--help"])
        head = f"# {command}\n\n`speakernet {command}`: {COMMANDS[command]}."
        yield f"command_{command}.md", f"{head}\n\n```text\n{text.getvalue()}```\n"


def notebooks() -> Iterator[tuple[str, str | bytes]]:
    """The notebooks as pages, with their output if they can be run here, and the pictures in it."""
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            if path.stem in EXECUTED:
                ExecutePreprocessor(timeout=None).preprocess(
                    notebook, {"metadata": {"path": folder}}
                )
        resources: dict[str, Any] = {"output_files_dir": path.stem}
        text, resources = MarkdownExporter().from_notebook_node(notebook, resources)
        yield f"notebook_{path.stem}.md", text.replace("](../docs/", "](").replace(f"{ROOT}/", "")
        yield from resources["outputs"].items()


PAGES = {"Options": options, "Commands": commands, "Notebooks": notebooks}
