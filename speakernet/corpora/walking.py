"""Walk audio trees in sorted order with flat memory."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

#: What soundfile reads itself; everything else that holds sound goes through ffmpeg.
READABLE_SUFFIXES = frozenset({".wav", ".flac", ".ogg", ".opus", ".mp3", ".aif", ".aiff", ".au", ".sph"})


def walk_files(root: str | Path, suffixes: Iterable[str]) -> Iterator[str]:
    """Relative names (forward slashes) of the files below `root` with these suffixes, sorted folder by folder.

    Hidden files and folders (also half-written ones) are passed over; links to folders are followed once.

    Raises:
        ValueError: there is no such folder.
    """
    root = Path(root)
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}; give the folder that holds the audio")
    wanted = frozenset(suffixes)
    # A link that leads back to one of its own parents would never end.
    yield from _walk(root, "", wanted, (root.resolve(),))


def _walk(folder: Path, prefix: str, wanted: frozenset[str], parents: tuple[Path, ...]) -> Iterator[str]:
    with os.scandir(folder) as entries:
        found = sorted((entry.name, entry.is_dir(), entry.is_symlink()) for entry in entries)
    for name, is_folder, is_link in found:
        if name.startswith("."):
            continue
        if not is_folder:
            if os.path.splitext(name)[1].lower() in wanted:  # noqa: PTH122 (a Path a file costs more than the walk)
                yield prefix + name
            continue
        if is_link and (folder / name).resolve() in parents:
            continue
        below = folder / name
        yield from _walk(below, f"{prefix}{name}/", wanted, (*parents, below.resolve()) if is_link else parents)
