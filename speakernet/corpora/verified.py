"""MD5 sums, remembered: a file that was verified once is not read again while its size and time stay the same.

A verified file `vox1.zip` has a small note `.prepared/vox1.zip.json` beside it. The note is a shortcut only: without it
the file is read and summed again.
"""

import hashlib
import json
from pathlib import Path

from tqdm import tqdm

from speakernet.files import atomic_write

NOTES_FOLDER = ".prepared"
BLOCK_BYTES = 1 << 20
#: A file that is summed in less than a second or so needs no progress bar.
SHOWN_BYTES = 512 << 20


def md5_of(path: str | Path) -> str:
    """MD5 of a file's content as lower-case hex, read in blocks, with a progress bar where it takes a while."""
    path = Path(path)
    digest = hashlib.md5(usedforsecurity=False)
    num_bytes = path.stat().st_size
    bar = tqdm(
        total=num_bytes, desc=f"verify {path.name}", unit="B", unit_scale=True, dynamic_ncols=True, leave=False,
        disable=num_bytes < SHOWN_BYTES,
    )  # fmt: skip
    with path.open("rb") as file, bar:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            bar.update(len(block))
    return digest.hexdigest()


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
