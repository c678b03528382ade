"""MD5 sums, remembered: a file that was verified once is not read again while its size and time stay the same.

A verified file `vox1.zip` has a small note `.prepared/vox1.zip.json` beside it. The note is a shortcut only: without it
the file is read and summed again.
"""

import json
from pathlib import Path

from speakernet.files import atomic_write, md5_of

NOTES_FOLDER = ".prepared"


def remember(path: Path, md5: str) -> None:
    """Note that `path`, as it is now, has this sum."""
    status = path.stat()
    note = {"md5": md5, "num_bytes": status.st_size, "modified_ns": status.st_mtime_ns}
    with atomic_write(_note_path(path)) as file:
        json.dump(note, file)


def known_md5(path: Path) -> str | None:
    """The remembered sum where the file is unchanged since, else None."""
    try:
        note = json.loads(_note_path(path).read_text(encoding="utf-8"))
        status = path.stat()
    except (OSError, ValueError):
        return None
    unchanged = note.get("num_bytes") == status.st_size and note.get("modified_ns") == status.st_mtime_ns
    return note.get("md5") if unchanged else None


def has_md5(path: Path, md5: str | None) -> bool:
    """Whether the file is there with this sum; without a published sum (None) a file that is not empty counts.

    Reads the file only where its sum is not remembered, and then remembers it.
    """
    if not path.is_file():
        return False
    if md5 is None:
        return path.stat().st_size > 0
    found = known_md5(path)
    if found is None:
        found = md5_of(path)
        remember(path, found)
    return found == md5


def _note_path(path: Path) -> Path:
    return path.parent / NOTES_FOLDER / f"{path.name}.json"
