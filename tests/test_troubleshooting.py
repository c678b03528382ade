"""docs/troubleshooting.md: each message that it quotes is one that the code can print, so that it cannot go stale."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
GAP = "\0"
"""Stands in a template where a message has a value."""
PLACEHOLDER = re.compile(r"%%|%[-+ #0]*[\d.]*[sdgfr]")


def template_of(node: ast.expr) -> str:
    """A text of the code, with a gap for every value in it."""
    if isinstance(node, ast.Constant):
        text = node.value if isinstance(node.value, str) else GAP
        return PLACEHOLDER.sub(lambda found: "%" if found[0] == "%%" else GAP, text)
    if isinstance(node, ast.JoinedStr):
        return "".join(template_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template_of(node.left) + template_of(node.right)
    return GAP


@pytest.fixture(scope="module")
def files() -> list[str]:
    """For every file of the package, all texts in it, a line each."""
    found = []
    for path in sorted((ROOT / "speakernet").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
        texts = [
            template_of(node)
            for node in nodes
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and node not in docstrings
        ]
        found.append("\n".join(" ".join(text.split()) for text in texts))
    return found


def is_there(message: str, files: list[str]) -> bool:
    """Whether one file has all that is constant in the message, in its order and within one text."""
    pieces = [re.escape(piece.strip()) for piece in message.split("…") if piece.strip()]
    pattern = re.compile(r"[^\n]*".join(pieces))
    return any(pattern.search(text) for text in files)


def quoted() -> list[str]:
    """The first column of every table."""
    rows = re.findall(r"^\| `([^`]+)` \|", PAGE, flags=re.MULTILINE)
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| message |")]
    assert len(rows) == len(lines), "each row quotes one message"
    return rows


def test_every_message_of_the_page_is_in_the_code(files: list[str]) -> None:
    assert [message for message in quoted() if not is_there(message, files)] == []
    assert not is_there("no training list: set data.train_lists", files)
    assert not is_there("no training list: set … into the oven", files)


def test_no_message_stands_twice_and_none_says_nothing() -> None:
    rows = quoted()
    assert len(rows) == len(set(rows)) > 150
    # These are all that some messages have in common.
    short = {"…, line …: …", "unknown … …; …", "… is no … of …: …", "broken: …", "all are … trials"}
    assert {row for row in rows if max(len(piece.strip()) for piece in row.split("…")) < 9} == short


def test_the_twenty_five_are_all_there() -> None:
    numbers = re.findall(r"^### (\d+)\. ", PAGE, flags=re.MULTILINE)
    assert numbers == [str(number) for number in range(1, 26)]


def test_its_table_of_contents_leads_somewhere() -> None:
    headings = re.findall(r"^##+ (.+)$", PAGE, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    targets = re.findall(r"\]\(#([^)]+)\)", PAGE)
    assert targets and set(targets) <= anchors
