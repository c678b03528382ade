"""Searching folders for recordings, noise and room impulse responses: one walk for all commands.

Links to folders are followed. Hidden files and folders and the `__MACOSX` of an archive made on a
Mac are ignored; whatever else is left out is counted by `LeftOut`. Names are as on disk;
`UnicodeNames` finds a file whose name on disk has the other Unicode form. No file is opened here.
"""

import logging
import os
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

from speakernet.data.audio import AUDIO_SUFFIXES
from speakernet.data.lists import StringTable
from speakernet.data.names import compose_accents

logger = logging.getLogger(__name__)

MAC_FOLDER = "__MACOSX"
"""A Mac puts companion files (`._1.wav`) into this folder of an archive."""
NAMED_KINDS = 5
"""Kinds of files left out that a message names."""


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is never a recording.

    >>> [name for name in ("1.wav", "._1.wav", ".DS_Store", "__MACOSX", ".") if is_hidden(name)]
    ['._1.wav', '.DS_Store', '__MACOSX']
    """
    return (name.startswith(".") and name != ".") or name == MAC_FOLDER


class LeftOut:
    """What a search did not take: for each kind, the number and the first name."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def add(self, kind: str, name: str) -> None:
        """Count one file or link."""
        self.counts[kind] += 1
        self.first.setdefault(kind, name)

    def __str__(self) -> str:
        """All kinds, the most frequent first; empty if nothing was left out."""
        kinds = self.counts.most_common()
        shown = []
        for kind, number in kinds[:NAMED_KINDS]:
            shown.append(f"{number:,} {kind} (first: {self.first[kind]})")
        if num_others := sum(number for _, number in kinds[NAMED_KINDS:]):
            shown.append(f"{num_others:,} of other kinds")
        return ", ".join(shown)

    def log(self, root: str | Path) -> None:
        """Log what was left out of `root`, if anything."""
        if self.counts:
            logger.info(
                "%s: left out, because they are not recordings by their names: %s", root, self
            )


def walk_recordings(root: str | Path, left_out: LeftOut | None = None) -> list[str]:
    """Relative names (forward slashes) of all recordings below `root`, sorted folder by folder;
    logs what was left out.
    """
    left_out = left_out or LeftOut()
    names = list(walk_files(root, AUDIO_SUFFIXES, left_out))
    left_out.log(root)
    return names


def walk_files(
    root: str | Path, suffixes: Collection[str], left_out: LeftOut | None = None
) -> Iterator[str]:
    """Relative names (forward slashes) of the files below `root` with these suffixes, sorted folder
    by folder.

    A folder is searched once: a link to one that is searched anyway, or back to one above, is left
    out.
    """
    root = Path(root)
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}; give the folder with the audio")
    root = root.resolve()
    yield from _walk(root, "", frozenset(suffixes), {root}, left_out or LeftOut())


# Links make a folder a graph, and a walk that follows them may never end or list a recording twice
# under two names, which would put it on both sides of a trial. So a folder is entered once: by its
# own name if it lies below one that is searched, else by the first link that leads to it.
def _walk(
    folder: Path, prefix: str, suffixes: frozenset[str], searched: set[Path], left_out: LeftOut
) -> Iterator[str]:
    """Names below `folder`, after `prefix`, which leads to it from the root; `searched` are the
    root and the folders that links led to.
    """
    with os.scandir(folder) as entries:
        shown = sorted(
            (entry for entry in entries if not is_hidden(entry.name)), key=lambda entry: entry.name
        )
    for entry in shown:
        name = entry.name
        is_link = entry.is_symlink()
        # `entry.is_dir` raises an error for a link to itself.
        is_folder = os.path.isdir(entry.path) if is_link else entry.is_dir()  # noqa: PTH112
        if not is_folder:
            # A Path per file would cost more than the walk.
            suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122
            if suffix in suffixes:
                yield prefix + name
            elif is_link and not os.path.exists(entry.path):  # noqa: PTH110
                left_out.add("links to nothing", prefix + name)
            else:
                left_out.add(suffix or "without a suffix", prefix + name)
            continue
        path = folder / name
        if is_link:
            path = path.resolve()
            if _is_below(path, searched):
                left_out.add("links to folders that are searched anyway", prefix + name)
                continue
            searched.add(path)
        elif path in searched:
            # Listed already, by the names that a link gave them.
            continue
        yield from _walk(path, f"{prefix}{name}/", suffixes, searched, left_out)


def _is_below(path: Path, searched: Collection[Path]) -> bool:
    """Whether a folder is one of those searched, or will be reached from one of them."""
    for parent in (path, *path.parents):
        if parent in searched:
            return True
        if is_hidden(parent.name):
            # Nothing enters a hidden folder from above.
            return False
    return False


class UnicodeNames:
    """Finds files whose names on disk are in another Unicode form than in a list.

    A Mac stores é as e and an accent, Linux and Windows as one character; on the screen they look
    the same.
    """

    def __init__(self, root: str | Path) -> None:
        self._root = str(root)
        self._folders: dict[str, dict[str, str]] = {}  # folder -> composed name -> name on disk

    def on_disk(self, name: str) -> str:
        """The name of an existing file or, if there is none in any form, the given name."""
        if name.isascii() or os.path.lexists(f"{self._root}/{name}"):
            return name
        path = "" if name.startswith("/") else self._root
        pieces = name.split("/")
        for place, piece in enumerate(pieces):
            if not os.path.lexists(f"{path}/{piece}"):
                pieces[place] = self._content(path).get(compose_accents(piece), piece)
            path = f"{path}/{pieces[place]}"
        return "/".join(pieces) if os.path.lexists(path) else name

    def table(self, names: StringTable) -> StringTable:
        """The names on disk of a list's files; the same object if they do not differ."""
        if names.is_ascii:
            return names
        on_disk = StringTable.from_strings(map(self.on_disk, names))
        return names if on_disk.equals(names) else on_disk

    def _content(self, folder: str) -> dict[str, str]:
        if folder not in self._folders:
            try:
                names = os.listdir(folder)  # noqa: PTH208
                self._folders[folder] = {compose_accents(name): name for name in names}
            except OSError:
                self._folders[folder] = {}
        return self._folders[folder]
