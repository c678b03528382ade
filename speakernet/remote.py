"""A folder elsewhere to copy files to and from: another disk, or an address of fsspec (`s3://…`, `gs://…`, `sftp://…`).

A file is copied under a temporary name, its length is compared, its checksum is written beside it, and only then does
it take its name; what had the name is kept as the one before. So a half-copied file is never taken for a whole one,
whatever ends the copy, and at every moment one whole file is there. Nothing here knows what the files are.
"""

import contextlib
import hashlib
import posixpath
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from speakernet.files import BLOCK_BYTES, FileError, atomic_write, error_line, open_regular

CHECKSUM_SUFFIX = ".sha256"
PREVIOUS_WORD = ".previous"
CHECKSUMS_KEPT = 8
"""Of a file: copies that were cut off after they were written may lie between the last two whole ones."""
MOST_CHECKSUM_BYTES = 2048


class _NotWhole(Exception):
    """What was fetched is no whole copy of anything."""


class RemoteError(FileError):
    """A folder elsewhere that cannot be used; the message names it and says why."""


def open_remote(address: str) -> "RemoteFolder":
    """The folder at a path or an address; nothing is made or asked for yet.

    Raises:
        RemoteError: an address without fsspec installed, or of a kind that nothing installed here knows.
    """
    if "://" not in address:
        return LocalFolder(address)
    try:
        # Late: an extra, which most runs do without.
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise RemoteError(
            f"{address}: fsspec is not installed, which copies to such addresses; pip install 'speakernet[remote]', or "
            "give a folder"
        ) from error
    try:
        system, root = url_to_fs(address, use_listings_cache=False)
    except ImportError as error:
        raise RemoteError(f"{address}: {error_line(error)}; install what it names") from error
    except Exception as error:
        # Every system has errors of its own for an address or a key that it cannot use.
        raise RemoteError(
            f"{address}: {error_line(error)}; expected a folder or an address that fsspec knows"
        ) from error
    return FsspecFolder(address, system, root)


def previous_name(name: str) -> str:
    """Under which name the file before this one is kept.

    >>> previous_name("large_margin/last.pt")
    'large_margin/last.previous.pt'
    """
    stem, suffix = posixpath.splitext(name)
    return f"{stem}{PREVIOUS_WORD}{suffix}"


class RemoteFolder(ABC):
    """What is asked of a folder elsewhere; names are relative, with `/`."""

    def __init__(self, address: str) -> None:
        self.address = address

    def put(self, source: Path, name: str, moved: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Copy a file there.

        Args:
            source: what it is now is copied, also where it is replaced meanwhile.
            name: of the copy.
            moved: called with the bytes of each block that went over; what it raises ends the copy.

        Raises:
            OSError: or whatever the folder answers with; what was there is untouched.
        """
        temporary = _temporary_beside(name)
        digest, num_bytes = hashlib.sha256(), 0
        try:
            with open_regular(source) as content, self.writing(temporary) as copy:
                while block := content.read(BLOCK_BYTES):
                    copy.write(block)
                    digest.update(block)
                    num_bytes += len(block)
                    moved(len(block))
            if self.size(temporary) != num_bytes:
                raise RemoteError(f"{self.address}: of {name} {self.size(temporary)} of {num_bytes} bytes arrived")
            # Whoever gave up waiting for this copy has begun another one.
            moved(0)
            # Before the file takes its name: from now on either of the two is known for a whole one.
            known = self._checksums(name)
            self._write_checksums(name, [f"{digest.hexdigest()} {num_bytes}", *known[: CHECKSUMS_KEPT - 1]])
            if self.size(name) is not None:
                self.move(name, previous_name(name))
            self.move(temporary, name)
        except BaseException:
            # The folder may be why it failed.
            with contextlib.suppress(Exception):
                self.remove(temporary)
            raise

    def get(self, name: str, target: Path, moved: Callable[[int], None] = lambda num_bytes: None) -> str | None:
        """Fetch a file that is whole: the one of that name, else the one before it.

        Returns:
            The name that was fetched; None where neither is there and whole.

        Raises:
            OSError: or whatever the folder answers with.
        """
        known = set(self._checksums(name))
        for one in (name, previous_name(name)):
            if self.size(one) is not None and self._fetch(one, target, known, moved):
                return one
        return None

    def _fetch(self, name: str, target: Path, known: set[str], moved: Callable[[int], None]) -> bool:
        digest, num_bytes = hashlib.sha256(), 0
        with contextlib.suppress(_NotWhole), self.reading(name) as content, atomic_write(target, "wb") as copy:
            while block := content.read(BLOCK_BYTES):
                copy.write(block)
                digest.update(block)
                num_bytes += len(block)
                moved(len(block))
            if f"{digest.hexdigest()} {num_bytes}" not in known:
                raise _NotWhole
            return True
        return False

    def names(self) -> list[str]:
        """Of every file that was copied here, whole or not."""
        return sorted(one.removesuffix(CHECKSUM_SUFFIX) for one in self.walk() if one.endswith(CHECKSUM_SUFFIX))

    def drop(self, name: str) -> None:
        """Remove a file, the one before it and their checksums; nothing where there is none."""
        for one in (name, previous_name(name), name + CHECKSUM_SUFFIX):
            if self.size(one) is not None:
                self.remove(one)

    def remove_leftovers(self) -> None:
        """Remove half-copied files; only where nobody else copies there."""
        for one in self.walk():
            base = posixpath.basename(one)
            if base.startswith(".") and base.endswith(".tmp"):
                self.remove(one)

    def _checksums(self, name: str) -> list[str]:
        """Those of a file and of the one before it."""
        if self.size(name + CHECKSUM_SUFFIX) is None:
            return []
        with self.reading(name + CHECKSUM_SUFFIX) as file:
            return file.read(MOST_CHECKSUM_BYTES).decode("ascii", "replace").splitlines()

    def _write_checksums(self, name: str, lines: list[str]) -> None:
        temporary = _temporary_beside(name)
        with self.writing(temporary) as file:
            file.write("".join(f"{line}\n" for line in lines).encode())
        self.move(temporary, name + CHECKSUM_SUFFIX)

    @abstractmethod
    def walk(self) -> list[str]:
        """Names of all files below; none where the folder is not there."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of a file, None where there is none."""

    @abstractmethod
    def reading(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """A file, open for reading."""

    @abstractmethod
    def writing(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """A new file, open for writing; folders are made."""

    @abstractmethod
    def move(self, name: str, to: str) -> None:
        """Give a file another name, which some other file may have had."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file."""


class LocalFolder(RemoteFolder):
    """A folder of this machine: another disk, or one that several machines share."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.root = Path(address)

    def walk(self) -> list[str]:
        """See `RemoteFolder.walk`."""
        return [one.relative_to(self.root).as_posix() for one in self.root.rglob("*") if one.is_file()]

    def size(self, name: str) -> int | None:
        """See `RemoteFolder.size`."""
        path = self.root / name
        return path.stat().st_size if path.is_file() else None

    def reading(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """See `RemoteFolder.reading`."""
        return open_regular(self.root / name)

    def writing(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """See `RemoteFolder.writing`."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("wb")

    def move(self, name: str, to: str) -> None:
        """See `RemoteFolder.move`."""
        (self.root / name).replace(self.root / to)

    def remove(self, name: str) -> None:
        """See `RemoteFolder.remove`."""
        (self.root / name).unlink()


class FsspecFolder(RemoteFolder):
    """A folder in a file system of fsspec.

    Args:
        address: as the user gave it.
        system: fsspec's file system.
        root: the folder's path in it.
    """

    def __init__(self, address: str, system: Any, root: str) -> None:
        super().__init__(address)
        self._system, self._root = system, root.rstrip("/")

    def walk(self) -> list[str]:
        """See `RemoteFolder.walk`."""
        begin = len(self._system._strip_protocol(self._root)) + 1
        try:
            return [one[begin:] for one in self._system.find(self._root)]
        except FileNotFoundError:
            return []

    def size(self, name: str) -> int | None:
        """See `RemoteFolder.size`."""
        try:
            found: int = self._system.info(self._path(name))["size"]
            return found
        except FileNotFoundError:
            return None

    def reading(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """See `RemoteFolder.reading`."""
        opened: contextlib.AbstractContextManager[IO[bytes]] = self._system.open(self._path(name), "rb")
        return opened

    def writing(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """See `RemoteFolder.writing`."""
        self._system.makedirs(posixpath.dirname(self._path(name)), exist_ok=True)
        opened: contextlib.AbstractContextManager[IO[bytes]] = self._system.open(self._path(name), "wb")
        return opened

    def move(self, name: str, to: str) -> None:
        """See `RemoteFolder.move`."""
        self._system.mv(self._path(name), self._path(to))

    def remove(self, name: str) -> None:
        """See `RemoteFolder.remove`."""
        self._system.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def _temporary_beside(name: str) -> str:
    folder, base = posixpath.split(name)
    return posixpath.join(folder, f".{base}.{secrets.token_hex(4)}.tmp")
