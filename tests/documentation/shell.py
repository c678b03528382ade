"""From a block of commands to the words of each, as a shell would see them, with what stands for the reader's own.

What a page may write instead of something of the reader's:

- a word in capitals (`LIST`, `FOLDER`, `NAME`) is a name of theirs and is taken as it stands; where a number is
  wanted, `STANDS_FOR` says which one it is read as;
- `…` stands for options that are left out, and is left out;
- `$NAME` is what a line `NAME="…"` of the same page says, else a name;
- a configuration that begins with `my`, or lies in `data/`, `exps/` or a folder of the reader's, is theirs.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from tests.documentation.pages import SHELL, Block, Page

STANDS_FOR = {"N": "2", "I/N": "2/4", "--part=I/N": "--part=2/4", "FAR": "0.01", "SECONDS": "60"}
LEFT_OUT = ("…", "...")
ASSIGNMENT = re.compile(r"^(\w+)=(.*)$", flags=re.DOTALL)
PROGRAMS = ("speakernet", "python", "torchrun", "pip", "make", "srun", "sbatch", "git", "pytest", "export")
"""An indented block that begins with one of these, or with an assignment, holds commands."""


@dataclass(frozen=True)
class Command:
    """One command of a page.

    Attributes:
        where: page and line.
        text: as written, in one line.
        words: as the shell hands them on, placeholders replaced.
        is_partial: whether something is left out, so that a required option may be missing.
    """

    where: str
    text: str
    words: tuple[str, ...]
    is_partial: bool = False


def holds_commands(block: Block) -> bool:
    """Whether a block is one of commands."""
    first = block.text.split(maxsplit=1)[:1]
    return block.language in SHELL or (
        not block.language and bool(first) and (first[0] in PROGRAMS or bool(ASSIGNMENT.match(first[0])))
    )


def commands_in(page: Page) -> Iterator[Command]:
    """Every command in the blocks of a page."""
    variables: dict[str, str] = {}
    for block in page.blocks:
        if holds_commands(block):
            yield from _commands_of(block, variables)


def _commands_of(block: Block, variables: dict[str, str]) -> Iterator[Command]:
    number, joined = block.line, ""
    for offset, line in enumerate(block.text.splitlines()):
        if not joined:
            number = block.line + offset
        if line.endswith("\\"):
            joined += line[:-1].rstrip() + " "
            continue
        text, joined = (joined + line.strip()).strip(), ""
        if text and not text.startswith("#"):
            yield from split_commands(text, f"{block.page}, line {number}", variables)


def split_commands(text: str, where: str, variables: dict[str, str]) -> Iterator[Command]:
    """The commands of one line, between `&&`, `;` and `|`; assignments are kept in `variables`.

    >>> [one.words for one in split_commands("A='--b 1' && c $A | d N … # why", "a.md", {})]
    [('c', '--b', '1'), ('d', '2')]
    """
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in ("|", "||", "&&", ";", "&"):
            words.append(word)
            continue
        while words and (assigned := ASSIGNMENT.match(words[0])):
            variables[assigned[1]] = assigned[2]
            words.pop(0)
        if words:
            expanded = [part for word in words for part in _expanded(word, variables)]
            kept = [STANDS_FOR.get(part, part) for part in expanded if part not in LEFT_OUT]
            yield Command(where, text, tuple(kept), len(kept) < len(expanded))
        words = []


def _expanded(word: str, variables: dict[str, str]) -> list[str]:
    if word.startswith("$") and word.strip("${}") in variables:
        return shlex.split(variables[word.strip("${}")])
    return [word]


def commands_in_prose(page: Page) -> Iterator[Command]:
    """Commands of ours that the prose names between backticks; what they require may be left out there."""
    for text in page.code_words():
        if re.match(r"(speakernet|python|torchrun) \S", text) and "[--" not in text:
            for command in split_commands(text, page.name, {}):
                yield Command(command.where, text, command.words, is_partial=True)
