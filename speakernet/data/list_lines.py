"""A list file as blocks of lines, split into words; what becomes of lines that no list may hold.

What training and trial lists have in common below their grammar, which is in `lists.py`.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from speakernet.files import FileError, open_regular, own_command, reading
from speakernet.terminal import MAX_NAMED

BLOCK_BYTES = 8 << 20  # Lines are split by blocks of about this size, so that the masks stay small.
LONGEST_LINE_BYTES = 64 << 10  # A path has 4 KiB at most, a trial two of them.
NEWLINE, TAB, SPACE = 10, 9, 32
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SHOWN_CHARACTERS = 120  # of a malformed line
_WHITESPACE = np.zeros(256, dtype=bool)
_WHITESPACE[[9, 10, 11, 12, 13, 32]] = True


class ListError(FileError):
    """A list that cannot be used; the message names the file, the line and what was expected."""


@dataclass
class MalformedRows:
    """Rows that a list of their kind may not hold, found by the list's own reader.

    Attributes:
        limit: rows that are kept in words.
        count: how many there are.
        first: the first of them, as "line 7: expected 'speaker path', found 'b'".
    """

    limit: int = MAX_NAMED
    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, sentence: str) -> None:
        """Count one, and keep it if it is among the first."""
        self.count += 1
        if len(self.first) < self.limit:
            self.first.append(sentence)


class ListFile:
    """A list that is being read: its lines, its checksum, and what becomes of malformed ones."""

    def __init__(self, path: str | Path, malformed: MalformedRows | None) -> None:
        self.path = path
        self._malformed = malformed
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Of what was read so far."""
        return self._digest.hexdigest()

    def refuse(self, line: int, problem: str) -> None:
        """Note a malformed line, which is then left out; where nobody takes notes it ends the reading."""
        if self._malformed is None:
            raise ListError(f"{self.path}, line {line}: {problem}")
        self._malformed.add(f"line {line}: {problem}")

    def blocks(self, *, tabs_only_where_present: bool) -> Iterator["Lines"]:
        """The lines of the file, many at a time; those that are no text are blank."""
        expected = (
            f"a text file. Lists are made by {own_command('prepare folder')} of your recordings, by "
            f"{own_command('prepare voxceleb')} of VoxCeleb"
        )
        with reading(self.path, expected, ListError), open_regular(self.path) as file:
            rest, line = b"", 1
            is_old_mac: bool | None = None
            while True:
                data = file.read(BLOCK_BYTES)
                self._digest.update(data)
                if is_old_mac is None:
                    is_old_mac = b"\r" in data and b"\n" not in data
                # Lines that end in a carriage return alone would be one.
                block = rest + (data.replace(b"\r", b"\n") if is_old_mac else data)
                # The last line may go on in the next block; at the end of the file it need not end in a line break.
                cut = block.rfind(b"\n") + 1 if data else len(block)
                block, rest = block[:cut], block[cut:]
                self._refuse_long(rest, line + block.count(b"\n"))
                # A byte-order mark, as Windows' editors write it, would become part of the first name.
                block = block.removeprefix(BYTE_ORDER_MARK) if line == 1 else block
                if block:
                    lines = _split_lines(self._text_only(block, line), line, tabs_only_where_present)
                    longest = int(np.diff(lines.line_starts, append=len(block)).argmax())
                    self._refuse_long(block[lines.line_starts[longest] :].split(b"\n", 1)[0], line + longest)
                    yield lines
                    line += block.count(b"\n")
                if not data:
                    return

    def _refuse_long(self, content: bytes, line: int) -> None:
        """Refuse what is no list at all, before its one line takes fifty times its size."""
        if len(content) > LONGEST_LINE_BYTES:
            raise ListError(
                f"{self.path}, line {line}: longer than {LONGEST_LINE_BYTES:,} bytes; expected a list with a line for "
                "each utterance or trial"
            )

    def _text_only(self, block: bytes, first_line: int) -> bytes:
        if _is_text(block):
            return block
        lines = block.split(b"\n")
        for number, content in enumerate(lines):
            if not _is_text(content):
                self.refuse(first_line + number, "not UTF-8 text; save the list as UTF-8")
                lines[number] = b""
        return b"\n".join(lines)


def _is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


@dataclass
class Lines:
    """Whole lines, split into words.

    Attributes:
        content: their bytes, uint8 (bytes,).
        first_line: number of the first line in the file.
        has_tabs: whether some are split at tabs only, so that a word may have spaces around it.
        line_starts: first byte of each line, (lines,).
        starts: first byte of each word, (words,).
        ends: byte after each word, (words,).
        first: first word of each line, (lines,).
        count: number of words of each line, (lines,).
    """

    content: np.ndarray
    first_line: int
    has_tabs: bool
    line_starts: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    first: np.ndarray
    count: np.ndarray

    def number(self, line: int) -> int:
        """A line's number in the file."""
        return self.first_line + line

    def words(self) -> list[bytes]:
        """Every word, in order."""
        content = self.content.tobytes()
        if not self.has_tabs:
            # Splits at the very bytes of `_WHITESPACE`, four times as fast as slices.
            return content.split()
        return [content[one:end].strip() for one, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True)]

    def text(self, line: int) -> str:
        """A line for a message."""
        start = int(self.line_starts[line])
        stop = int(self.line_starts[line + 1]) if line + 1 < len(self.line_starts) else len(self.content)
        return self.content[start:stop].tobytes().decode("utf-8", "replace").strip()[:SHOWN_CHARACTERS]


class Column:
    """One word of every line (or several), collected from the blocks of a list."""

    def __init__(self) -> None:
        self._contents: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []

    def __len__(self) -> int:
        return sum(map(len, self._lengths))

    def add(self, content: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """Bytes `starts[i]:ends[i]` of a block, ascending."""
        # +1 where a string begins, -1 behind its end: the running sum marks the bytes of all at once.
        mark = np.zeros(len(content) + 1, dtype=np.int8)
        mark[starts] = 1
        mark[ends] = -1
        self._contents.append(content[np.cumsum(mark[:-1], dtype=np.int8).view(bool)])
        self._lengths.append(ends - starts)

    def joined(self) -> tuple[np.ndarray, np.ndarray]:
        """All of them end to end, and where each starts: what a `StringTable` is made of."""
        offsets = np.zeros(len(self) + 1, dtype=np.int64)
        np.cumsum(np.concatenate(self._lengths), out=offsets[1:])
        return np.concatenate(self._contents), offsets


class Numbers(dict[bytes, int]):
    """Words and their numbers, in order of first mention: a new word is given the next one."""

    def __missing__(self, word: bytes) -> int:
        number = self[word] = len(self)
        return number


def number_words(block: np.ndarray, starts: np.ndarray, ends: np.ndarray, names: dict[bytes, int]) -> np.ndarray:
    """Number of the words `starts[i]:ends[i]` in order of first mention, int32 (words,); grows `names`."""
    lengths = ends - starts
    width = int(lengths.max())
    columns = np.arange(width)
    # Zero-padded rows of equal width compare as NumPy byte strings; the text was checked to hold no zero byte.
    positions = np.minimum(starts[:, None] + columns, len(block) - 1)
    table = np.where(columns < lengths[:, None], block[positions], 0).astype(np.uint8)
    words = np.ascontiguousarray(table).view(f"S{width}")[:, 0]
    # Lists come grouped by speaker more often than not: only the first of each run is looked up.
    is_head = np.ones(len(words), dtype=bool)
    is_head[1:] = words[1:] != words[:-1]
    heads = np.array([names.setdefault(word, len(names)) for word in words[is_head].tolist()], dtype=np.int32)
    return heads[np.cumsum(is_head) - 1]


def _split_lines(block: bytes, first_line: int, tabs_only_where_present: bool) -> Lines:
    content = np.frombuffer(block, dtype=np.uint8)
    is_gap = _WHITESPACE[content]
    line_ends = np.flatnonzero(content == NEWLINE)
    if not len(line_ends) or line_ends[-1] != len(content) - 1:
        line_ends = np.append(line_ends, len(content))
    line_starts = np.concatenate([[0], line_ends[:-1] + 1])
    has_tabs = tabs_only_where_present and b"\t" in block
    if has_tabs:
        tabs = np.flatnonzero(content == TAB)
        has_tab = np.searchsorted(tabs, line_ends) > np.searchsorted(tabs, line_starts)
        lengths = np.diff(np.append(line_starts, len(content)))
        is_gap &= ~(np.repeat(has_tab, lengths) & (content == SPACE))
    # A word begins where a gap ends: both ends of all words from one array, without a Python loop over lines.
    padded = np.ones(len(content) + 2, dtype=bool)
    padded[1:-1] = is_gap
    starts = np.flatnonzero(padded[:-1] & ~padded[1:])[: len(content)]
    ends = np.flatnonzero(~padded[:-1] & padded[1:])
    first = np.searchsorted(starts, line_starts)
    count = np.searchsorted(starts, line_ends) - first
    return Lines(content, first_line, has_tabs, line_starts, starts, ends, first, count)


def one_word(speaker: str) -> str:
    """The speaker's name with white space turned to underscores, since a list ends the speaker at white space.

    >>> one_word("Anna Maria")
    'Anna_Maria'
    """
    return "_".join(speaker.split())
