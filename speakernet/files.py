"""Small facts about files: atomic writes, hashes, sizes and errors in words. Knows no audio, lists or checkpoints."""

import contextlib
import hashlib
import itertools
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def atomic_write(path: str | Path, mode: str = "w") -> Iterator[IO]:
    """Open a temporary file beside `path`; on success flush it to the disk and rename it, on failure remove it.

    Whoever reads `path` sees the old content or the whole new one. Text is UTF-8 with Unix line ends.

    Raises:
        OSError: the disk is full or the folder is not writable; the old file is untouched.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile: its files are private to their owner, and a run folder is often shared.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
    try:
        with temporary.open(mode.replace("w", "x"), **text) as file:  # type: ignore[call-overload]
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def place(source: str | Path, target: str | Path) -> None:
    """Give a file a second name, at once taking the place of what had it; a copy where the disk knows no links.

    Raises:
        OSError: the folder is not writable, or a copy does not fit; what had the name is untouched.
    """
    target = Path(target)
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        temporary.hardlink_to(source)
    except OSError:
        with Path(source).open("rb") as content, atomic_write(target, "wb") as copy:
            shutil.copyfileobj(content, copy)
        return
    temporary.replace(target)
    # Of two names of one file renaming does nothing, and leaves both.
    temporary.unlink(missing_ok=True)


def free_name(path: Path, word: str) -> Path:
    """The first free one of `<name>.<word>-1`, `<name>.<word>-2` … beside `path`."""
    numbers = itertools.count(1)
    return next(free for number in numbers if not (free := path.with_name(f"{path.name}.{word}-{number}")).exists())


def sha256_of(path: str | Path) -> str:
    """SHA-256 of a file's content, read in blocks, as lower-case hex."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def human_bytes(num_bytes: float) -> str:
    """A size for people, in powers of 1024.

    >>> human_bytes(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def error_line(error: BaseException) -> str:
    """An error in one line: its type and the beginning of its message, which may be empty."""
    line = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
