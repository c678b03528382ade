"""The SQLite file that people are kept in: made, opened and checked, backed up, wiped.

A rollback journal, not a write-ahead log: one file beside the store while something is written and none after, also on
network disks and in folders that can only be read. What is deleted is overwritten with zeros at once. What the rows
mean is `people.py`'s knowledge.
"""

import contextlib
import glob
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from speakernet.files import FileError, free_name, open_regular

APPLICATION_ID = 0x53504B4E  # "SPKN", which `file` shows too
SCHEMA_VERSION = 1
BUSY_SECONDS = 30.0
"""How long a process waits while another one writes."""
PRIVATE = 0o600
"""Voices are personal data: a new store is its owner's alone."""
SQLITE_MARK = b"SQLite format 3\0"
BACKUP_WORD = "backup"
HALF_WORD = "half-backup"
UNFINISHED = "unfinished_purge"
"""The fact that somebody was removed from a file that has not been written anew since."""

SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE people (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, created TEXT NOT NULL, changed TEXT NOT NULL);
CREATE TABLE recordings (
    id INTEGER PRIMARY KEY, person INTEGER NOT NULL REFERENCES people (id) ON DELETE CASCADE, source TEXT NOT NULL,
    seconds REAL NOT NULL, speech_seconds REAL NOT NULL, weight REAL NOT NULL, warnings TEXT NOT NULL,
    added TEXT NOT NULL, embedding BLOB NOT NULL, checksum INTEGER NOT NULL);
CREATE INDEX recordings_of_people ON recordings (person);
"""


class StoreError(FileError):
    """A store of people that cannot be used; the message names the file and what to do."""


@contextlib.contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Turn SQLite's errors in the block into one sentence that names the file and what to do.

    Raises:
        StoreError: instead of any error of SQLite.
    """
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(f"{path}: {_advice(str(error), path)}") from error


def open_store_file(path: Path, *, is_made: bool) -> sqlite3.Connection:
    """A connection to a store, checked; usable from every thread, by one at a time.

    Args:
        path: of the file.
        is_made: whether a missing or empty file becomes a new store.

    Raises:
        StoreError: missing, no store, damaged, of a newer version, or it cannot be opened.
    """
    _find(path, is_made=is_made)
    with store_errors(path):
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=rw",
            uri=True,
            timeout=BUSY_SECONDS,
            check_same_thread=False,
            isolation_level=None,
        )
        try:
            # What is deleted is overwritten; a kill or a power cut loses no commit.
            for setting in ("secure_delete = ON", "synchronous = FULL", "foreign_keys = ON", "trusted_schema = OFF"):
                connection.execute(f"PRAGMA {setting}")
            # Asked of SQLite: where a process was killed while it made the file, this takes back what it had written.
            if not connection.execute("PRAGMA page_count").fetchone()[0]:
                if not is_made:
                    raise _empty(path)
                _make(connection)
            _check(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


@contextlib.contextmanager
def writing_to(connection: sqlite3.Connection, path: Path) -> Iterator[None]:
    """One transaction that writes, whole or not at all; other processes wait for it.

    Raises:
        StoreError: the store cannot be written.
    """
    with store_errors(path):
        # At once: a lock that is taken later may find what was read out of date.
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise


def back_up(connection: sqlite3.Connection, path: Path) -> Path:
    """Copy a store beside itself, whole; returns the copy.

    Raises:
        StoreError: the copy cannot be written.
    """
    copy = free_name(path, f"{BACKUP_WORD}-{time.strftime('%Y%m%d')}")
    # Under its name only when it is whole.
    half = path.with_name(f"{path.name}.{HALF_WORD}-{os.getpid()}")
    try:
        remove_half_backups(path)
        os.close(os.open(half, os.O_CREAT | os.O_EXCL | os.O_WRONLY, PRIVATE))
        with store_errors(half), contextlib.closing(sqlite3.connect(half)) as target:
            # What is left of it after a kill is thrown away, not taken back.
            target.execute("PRAGMA journal_mode = OFF")
            connection.backup(target)
        half.rename(copy)
    except BaseException as error:
        with contextlib.suppress(OSError):
            half.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise StoreError(f"{copy}: the backup cannot be written ({error.strerror}); nothing was changed") from error
        raise
    return copy


def remove_half_backups(path: Path) -> None:
    """Throw away what killed processes left of backups.

    Raises:
        OSError: they cannot be removed.
    """
    for one in path.parent.glob(f"{glob.escape(path.name)}.{HALF_WORD}-*"):
        one.unlink(missing_ok=True)


def backups_of(path: Path) -> list[Path]:
    """The copies that `back_up` made of a store."""
    begin = f"{path.name}.{BACKUP_WORD}-"
    return sorted(
        one for one in path.parent.iterdir() if one.name.startswith(begin) and not one.name.endswith("-journal")
    )


def wipe(connection: sqlite3.Connection, path: Path, name: str) -> int:
    """Remove a person so that nothing of them can be read in the file; returns how many recordings there were.

    Raises:
        StoreError: the store cannot be written.
    """
    with writing_to(connection, path):
        count = count_of(connection, name)
        connection.execute("DELETE FROM people WHERE name = ?", [name])
        # Somebody is gone, but not yet every trace: whoever is stopped here can begin again.
        connection.execute("INSERT OR REPLACE INTO facts VALUES (?, 1)", [UNFINISHED])
    with store_errors(path):
        # Another program may have turned a write-ahead log on, which would keep what was written earlier.
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("PRAGMA journal_mode = DELETE")
        # Pages that only moved leave copies of their rows behind.
        connection.execute("VACUUM")
    with writing_to(connection, path):
        connection.execute("DELETE FROM facts WHERE name = ?", [UNFINISHED])
    return count


def has_to_be_wiped(connection: sqlite3.Connection, name: str) -> bool:
    """Whether a person is there, or traces of one whose removal was cut short."""
    asked = "SELECT 1 FROM people WHERE name = ? UNION SELECT 1 FROM facts WHERE name = ?"
    return connection.execute(asked, [name, UNFINISHED]).fetchone() is not None


def count_of(connection: sqlite3.Connection, name: str) -> int:
    """How many recordings of a person there are."""
    counted = "SELECT COUNT(*) FROM recordings JOIN people ON person = people.id WHERE people.name = ?"
    return int(connection.execute(counted, [name]).fetchone()[0])


def _find(path: Path, *, is_made: bool) -> None:
    """See that there is a file of SQLite or an empty one, which a missing one becomes with `is_made`."""
    if path.is_dir():
        raise StoreError(f"{path}: a folder; name a file in it, such as {path / 'people.db'}")
    if not path.exists():
        if not is_made:
            raise StoreError(f"{path}: no such store; make one with `speakernet enroll NAME FILES --store {path}`")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, PRIVATE))
        except OSError as error:
            raise StoreError(f"{path}: cannot be made ({error.strerror}); choose another place") from error
        return
    try:
        with open_regular(path) as file:
            begin = file.read(len(SQLITE_MARK))
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror}); mend the rights, or name another") from error
    if begin and begin != SQLITE_MARK:
        raise StoreError(f"{path}: no store of people but another kind of file; name the file that enroll made")
    # An empty one is what a process leaves that was killed while it made it.
    if not begin and not is_made:
        raise _empty(path)


def _empty(path: Path) -> StoreError:
    return StoreError(f"{path}: an empty file, no store of people; name the file that enroll made")


def _make(connection: sqlite3.Connection) -> None:
    # Another process may make it at the same moment: whoever comes second finds it made.
    connection.execute("BEGIN IMMEDIATE")
    if not connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        for statement in SCHEMA.split(";"):
            connection.execute(statement)
    connection.execute("COMMIT")


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse what is no store of this version, or a damaged one."""
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise StoreError(f"{path}: a database of another program; name the file that enroll made")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path}: a store of version {version}; this speakernet reads up to {SCHEMA_VERSION}: upgrade it"
        )
    problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if problem != "ok":
        raise StoreError(f"{path}: {_advice(f'malformed: {problem}', path)}")


def _advice(reason: str, path: Path) -> str:
    """What SQLite says, in one line, and what to do."""
    reason = " ".join(reason.split())
    if "locked" in reason or "busy" in reason:
        return f"another process has been writing for {BUSY_SECONDS:g} s; wait for it or end it, then try again"
    if "readonly" in reason or "unable to open" in reason:
        return f"cannot be written here ({reason}); mend the rights of file and folder, or copy it to another place"
    if "full" in reason:
        return "the disk is full, nothing was changed; free some space, then give the same command again"
    kept = ", ".join(str(one) for one in backups_of(path)[-1:]) if path.parent.is_dir() else ""
    return (
        f"damaged ({reason}); it was left as it is. Take a copy of your own"
        f"{f', or the backup {kept}' if kept else ''}, or enrol again into another file"
    )
