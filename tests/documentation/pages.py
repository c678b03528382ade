"""The pages of the project as tests see them: blocks of code, words in code, links, headings.

A block of code is fenced, or indented by four spaces after an empty line. What it holds is told by the language of the
fence, or by its first word.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = ("sh", "bash", "shell", "console")

FENCE = re.compile(r"^( *)(`{3,})(\S*)\s*$")
CODE_WORDS = re.compile(r"(?<!`)`([^`]+)`(?!`)")
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", flags=re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        page: where it stands, below the root.
        line: of its first line, from 1.
        language: of the fence; empty where it is indented.
        text: without the indentation.
    """

    page: str
    line: int
    language: str
    text: str


@dataclass(frozen=True)
class Page:
    """A page taken apart.

    Attributes:
        path: of the file.
        blocks: of code, in their order.
        prose: everything else.
    """

    path: Path
    blocks: tuple[Block, ...]
    prose: str

    @property
    def name(self) -> str:
        """Below the root."""
        return self.path.relative_to(ROOT).as_posix()

    def code_words(self) -> Iterator[str]:
        """What stands between backticks in the prose, each in one line."""
        for found in CODE_WORDS.findall(self.prose):
            yield " ".join(found.replace("\\|", "|").split())

    def links(self) -> list[str]:
        """Targets of links and pictures, as written."""
        return LINK.findall(CODE_WORDS.sub("", self.prose))

    @property
    def num_headings(self) -> int:
        """How many headings it has."""
        return len(HEADING.findall(self.prose))

    def anchors(self) -> set[str]:
        """What `#…` may name on this page, by the rule of GitHub, which the site follows."""
        return {anchor_of(heading) for heading in HEADING.findall(self.prose)}


def anchor_of(heading: str) -> str:
    """The name under which a heading is linked.

    >>> anchor_of("A `B.c`, and D"), anchor_of("How EER & minDCF differ")
    ('a-bc-and-d', 'how-eer--mindcf-differ')
    """
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


@functools.cache
def read_page(path: Path) -> Page:
    """Take a page apart."""
    return parse_page(path, path.read_text(encoding="utf-8"))


def parse_page(path: Path, text: str) -> Page:
    r"""Take the text of a page apart.

    >>> page = parse_page(ROOT / "a.md", "# A\n\n    ls\n\nSee `ls`.\n\n```python\nimport os\n```\n")
    >>> [(block.line, block.language, block.text) for block in page.blocks], list(page.code_words())
    ([(3, '', 'ls'), (8, 'python', 'import os')], ['ls'])
    """
    name = path.relative_to(ROOT).as_posix()
    blocks: list[Block] = []
    prose: list[str] = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        fence = FENCE.match(lines[number])
        if fence:
            indent, ticks, language = fence.groups()
            end = number + 1
            while end < len(lines) and lines[end].strip() != ticks:
                end += 1
            body = [line.removeprefix(indent) for line in lines[number + 1 : end]]
            blocks.append(Block(name, number + 2, language, "\n".join(body)))
            number = end + 1
        elif lines[number].startswith("    ") and (not prose or not prose[-1].strip()):
            end = number
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            body = [line[4:] for line in lines[number:end]]
            blocks.append(Block(name, number + 1, "", "\n".join(body).strip()))
            prose.append("")
            number = end
        else:
            prose.append(lines[number])
            number += 1
    return Page(path, tuple(blocks), "\n".join(prose))
