"""The SQLite file of a store of people: its tables, its connections, its backups, and how its
embeddings are encrypted (AES-GCM, with a key derived by scrypt).

Every action opens the file, so that it may be replaced at any time. It uses a rollback journal
rather than a write-ahead log: there is one extra file during a write and none afterwards, so
network disks and read-only folders work too. SQLite overwrites deleted data (`secure_delete`).
"""

import contextlib
import functools
import glob
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
except ImportError:  # Only encrypted stores need it.
    AESGCM = None  # type: ignore[assignment,misc]

from speakernet.files import FileError, open_regular, reading

APPLICATION_ID = 0x53504B4E  # "SPKN", which `file` also shows
SCHEMA_VERSION = 3
"""Version 2, of speakernet 0.3.0, has checksums over embedding and name alone. Version 1, of 0.2.0,
has no digests either, and its encryption binds embeddings only to a person's number."""
BUSY_SECONDS = 30.0
"""Time that a process waits while another one writes."""
PRIVATE = 0o600
"""Voices are personal data, so a new store is readable by its owner only."""
SQLITE_MARK = b"SQLite format 3\0"
BACKUP_WORD = "backup"
HALF_WORD = "half-backup"
EXPECTED = "a store of people, created by `speakernet enroll NAME FILES --store FILE`"

SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE people (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, created TEXT NOT NULL,
    changed TEXT NOT NULL);
CREATE TABLE recordings (
    id INTEGER PRIMARY KEY, person INTEGER NOT NULL REFERENCES people (id) ON DELETE CASCADE,
    source TEXT NOT NULL, seconds REAL NOT NULL, speech_seconds REAL NOT NULL,
    weight REAL NOT NULL, warnings TEXT NOT NULL,
    added TEXT NOT NULL, embedding BLOB NOT NULL, checksum INTEGER NOT NULL);
CREATE INDEX recordings_of_people ON recordings (person)
"""
ADD_DIGESTS = """
ALTER TABLE recordings ADD COLUMN digest TEXT NOT NULL DEFAULT '';
CREATE UNIQUE INDEX recordings_once ON recordings (person, digest) WHERE digest != ''
"""
NEW_STORE = (
    f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = "
    f"{SCHEMA_VERSION};{SCHEMA};{ADD_DIGESTS}"
)
# Word in SQLite's message -> what to do; the last one fits every message.
SQLITE_ADVICE = {
    "locked": "end the process that writes it",
    "full": "free space on the disk",
    "readonly": "allow writing to the file and its folder",
    "malformed": f"the file is damaged, so use a backup (FILE.{BACKUP_WORD}-…)",
    "": f"if the file is damaged, use a backup (FILE.{BACKUP_WORD}-…)",
}
NUM_TABLES = "SELECT COUNT(*) FROM sqlite_master"

SALT_BYTES = 16
NONCE_BYTES = 12
KEY_BYTES = 32
PROOF = b"speakernet people store"
SCRYPT_COST = 1 << 15
"""Recommended by OWASP for scrypt with r = 8: 32 MiB and about a tenth of a second."""


class StoreError(FileError):
    """A store of people cannot be used; the message names the file and what to do."""


class StoreKeyError(FileError):
    """The key of a store is missing, wrong or superfluous."""


def backups_of(path: Path) -> list[Path]:
    """The backups of a store."""
    # Escaped, because brackets in the path would be taken for a pattern.
    backups = path.parent.glob(f"{glob.escape(path.name)}.{BACKUP_WORD}-*")
    return sorted(backup for backup in backups if not backup.name.endswith("-journal"))


def remove_half_backups(path: Path) -> None:
    """Remove incomplete backups left by killed processes."""
    for leftover in path.parent.glob(f"{glob.escape(path.name)}.{HALF_WORD}-*"):
        leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def open_database(path: Path, *, is_empty: bool = False) -> Iterator[sqlite3.Connection]:
    """A connection to a store, or with `is_empty` to a file that may become one."""
    with reading(path, EXPECTED, StoreError), open_regular(path) as file:
        start = file.read(len(SQLITE_MARK))
    if start not in (b"", SQLITE_MARK):
        raise StoreError(f"{path}: not an SQLite file; expected {EXPECTED}")
    # `mode=rw`, because SQLite would otherwise create an empty database at a mistyped path.
    uri = f"{path.absolute().as_uri()}?mode=rw"
    try:
        with contextlib.closing(
            sqlite3.connect(uri, BUSY_SECONDS, isolation_level=None, uri=True)
        ) as connection:
            # Deleted data is overwritten; a kill or a power cut loses no commit.
            for setting in (
                "secure_delete = ON",
                "synchronous = FULL",
                "foreign_keys = ON",
                "trusted_schema = OFF",
            ):
                connection.execute(f"PRAGMA {setting}")
            program, version = (
                value_of(connection, f"PRAGMA {fact}")
                for fact in ("application_id", "user_version")
            )
            # Only this query rolls back the unfinished transaction of a killed process.
            if not is_empty and not value_of(connection, "PRAGMA page_count"):
                raise StoreError(f"{path}: an empty file; expected {EXPECTED}")
            if not is_empty and (program != APPLICATION_ID or not 1 <= version <= SCHEMA_VERSION):
                raise StoreError(
                    f"{path}: not a store of people that this speakernet can read (version "
                    f"{version}; it reads up to {SCHEMA_VERSION}); expected {EXPECTED}"
                )
            yield connection
    except sqlite3.Error as error:
        reason = " ".join(str(error).split())
        advice = next(text for word, text in SQLITE_ADVICE.items() if word in reason)
        raise StoreError(
            f"{path} cannot be used ({reason}), and nothing was changed; {advice}"
        ) from error


def value_of(connection: sqlite3.Connection, query: str, *values: Any) -> Any:
    """The first value of the first row."""
    return connection.execute(query, values).fetchone()[0]


def facts_of(connection: sqlite3.Connection) -> dict[str, Any]:
    return dict(connection.execute("SELECT name, value FROM facts"))


@functools.lru_cache(maxsize=4)
def derive_cipher(key: str | bytes, salt: bytes) -> Any:
    """AES-GCM with a key derived by scrypt from the passphrase and the store's salt."""
    if not key:
        raise StoreKeyError(
            "the key is empty; give a passphrase, or no key for an unencrypted store"
        )
    if AESGCM is None:
        raise StoreKeyError(
            "encryption needs an additional package: pip install 'speakernet[encryption]'"
        )
    # An environment variable may hold bytes that are not UTF-8; they are used unchanged.
    secret = key.encode("utf-8", "surrogateescape") if isinstance(key, str) else key
    return AESGCM(Scrypt(salt=salt, length=KEY_BYTES, n=SCRYPT_COST, r=8, p=1).derive(secret))


def seal(aead: Any, content: bytes, place: bytes) -> bytes:
    """Encrypt with a new nonce, bound to `place`: bytes that are moved to a different row cannot be
    decrypted.
    """
    # Random rather than a counter, because several processes write and a backup may be restored. Of
    # 96 bits, no nonce repeats in a store of any realistic size.
    nonce = os.urandom(NONCE_BYTES)
    return nonce + bytes(aead.encrypt(nonce, content, place))


def unseal(path: Path, aead: Any, sealed: bytes, place: bytes) -> bytes:
    try:
        return bytes(aead.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], place))
    except (InvalidTag, ValueError) as error:
        raise StoreKeyError(
            f"{path}: decryption failed; the key is wrong, or the store was tampered with"
        ) from error
