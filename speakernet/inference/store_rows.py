"""The rows of a store of people: what is kept of a person and of a recording, checked and, with a key, sealed.

Works on a connection that somebody else opens, locks and commits.
"""

import os
import sqlite3
import time
import unicodedata
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speakernet.inference.keys import PROOF, SALT_BYTES, Cipher, StoreKeyError
from speakernet.inference.store_file import StoreError, writing_to

UNKNOWN = "unknown"
"""What is answered for a stranger, and so nobody's name."""
LONGEST_NAME = 200
FACTS = ("fingerprint", "embedding_dim", "model", "created")


@dataclass(frozen=True)
class Person:
    """Somebody in a store.

    Attributes:
        name: as it was given.
        recordings: how many embeddings are kept.
        speech_seconds: of speech in these recordings.
        created: date and time of the first enrolment, UTC.
        changed: of the last.
    """

    name: str
    recordings: int
    speech_seconds: float
    created: str
    changed: str


@dataclass(frozen=True)
class StoredRecording:
    """What is kept of one recording.

    Attributes:
        name: of the person.
        embedding: (dim,) float32, as the network gave it.
        weight: in the person's mean.
        source: where the audio lay, for `reembed`; empty where there was no file.
        seconds: duration.
        speech_seconds: of speech.
        warnings: what was wrong with it.
        added: date and time, UTC.
    """

    name: str
    embedding: np.ndarray
    weight: float
    source: str = ""
    seconds: float = 0.0
    speech_seconds: float = 0.0
    warnings: str = ""
    added: str = ""


class StoreRows:
    """Reads and writes the rows of one store.

    Args:
        connection: open, to a checked file.
        path: of that file, for messages.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.connection, self.path = connection, path
        self.embedding_dim = 0
        self._cipher: Cipher | None = None

    def facts(self) -> dict[str, Any]:
        """What the store says of itself: fingerprint, embedding_dim, model, created, is_encrypted."""
        kept = dict(self.connection.execute("SELECT name, value FROM facts"))
        return {name: kept.get(name) for name in FACTS} | {"is_encrypted": "salt" in kept}

    def begin(self, fingerprint: str | None, embedding_dim: int | None, key: str | bytes | None, model: str) -> None:
        """Write what a new store says of itself, or compare it with what is asked for.

        Raises:
            StoreError: of another model.
            StoreKeyError: the key is missing, another one, or not wanted.
        """
        if not self.facts()["fingerprint"]:
            with writing_to(self.connection, self.path):
                self._begin_new(fingerprint, embedding_dim, key, model)
        facts = self.facts()
        self.embedding_dim = int(facts["embedding_dim"])
        if fingerprint is not None and (facts["fingerprint"], self.embedding_dim) != (fingerprint, embedding_dim):
            raise StoreError(
                f"{self.path} is of another model: {facts['model'] or 'a model'} with the fingerprint "
                f"{facts['fingerprint'][:12]}, this one is {model or 'a model'} with {fingerprint[:12]}; use that "
                f"model, or go over to this one: `speakernet people reembed --model {model or 'MODEL'} "
                f"--store {self.path}`"
            )
        # Who lists or removes people needs no key.
        if fingerprint is not None or key is not None:
            self._cipher = self._cipher_of(key)

    def _begin_new(
        self, fingerprint: str | None, embedding_dim: int | None, key: str | bytes | None, model: str
    ) -> None:
        # Asked again inside the transaction: another process may have been first.
        if self.facts()["fingerprint"]:
            return
        if fingerprint is None:
            raise StoreError(f"{self.path}: an empty store, of no model yet; enrol somebody first")
        self.write_facts(fingerprint=fingerprint, embedding_dim=embedding_dim, model=model, created=now())
        if key is not None:
            salt = os.urandom(SALT_BYTES)
            self.write_facts(salt=salt, proof=Cipher(key, salt).seal(PROOF, PROOF))

    def _cipher_of(self, key: str | bytes | None) -> Cipher | None:
        kept = dict(self.connection.execute("SELECT name, value FROM facts WHERE name IN ('salt', 'proof')"))
        if "salt" not in kept:
            if key is not None:
                raise StoreKeyError(f"{self.path} is not encrypted, but a key was given; leave the key out")
            return None
        if key is None:
            raise self._without_key()
        cipher = Cipher(key, kept["salt"])
        try:
            cipher.open(kept["proof"], PROOF)
        except StoreKeyError as error:
            raise StoreKeyError(f"{self.path}: {error}") from error
        return cipher

    def _without_key(self) -> StoreKeyError:
        return StoreKeyError(f"{self.path} is encrypted; give its key (--key-file FILE, in Python key=…)")

    def write_facts(self, **facts: Any) -> None:
        """Replace some of the facts, inside a transaction."""
        self.connection.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts.items())

    def insert(self, name: str, recordings: Iterable[StoredRecording]) -> None:
        """Recordings of one person, who is new or was there before; inside a transaction."""
        changed = now()
        self.connection.execute(
            "INSERT INTO people (name, created, changed) VALUES (?, ?, ?) "
            "ON CONFLICT (name) DO UPDATE SET changed = excluded.changed",
            [name, changed, changed],
        )
        person = self.connection.execute("SELECT id FROM people WHERE name = ?", [name]).fetchone()[0]
        for one in recordings:
            content = np.ascontiguousarray(one.embedding, dtype="<f4").tobytes()
            if self._cipher is not None:
                content = self._cipher.seal(content, _place(person))
            row = (person, one.source, one.seconds, one.speech_seconds, one.weight, one.warnings, one.added or changed)
            self.connection.execute(
                "INSERT INTO recordings (person, source, seconds, speech_seconds, weight, warnings, added, embedding, "
                "checksum) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*row, content, _checksum(name, content)),
            )

    def select(self, name: str | None = None) -> list[StoredRecording]:
        """Recordings of one person, or of everybody, those of one person beside each other.

        Raises:
            StoreError: a row is damaged.
            StoreKeyError: they are sealed and there is no key.
        """
        chosen, values = ("", []) if name is None else ("WHERE people.name = ?", [name])
        rows = self.connection.execute(
            "SELECT people.name, weight, source, seconds, speech_seconds, warnings, added, embedding, person, checksum "
            f"FROM recordings JOIN people ON person = people.id {chosen} ORDER BY person, recordings.id",
            values,
        )
        if self._cipher is None and self.facts()["is_encrypted"]:
            raise self._without_key()
        return [StoredRecording(row[0], self._opened(row[0], *row[7:]), *row[1:7]) for row in rows]

    def people(self) -> list[Person]:
        """Everybody, by name."""
        found = self.connection.execute(
            "SELECT name, COUNT(recordings.id), TOTAL(speech_seconds), created, changed FROM people "
            "LEFT JOIN recordings ON person = people.id GROUP BY people.id ORDER BY name"
        )
        return [Person(*row) for row in found]

    def _opened(self, name: str, content: bytes, person: int, checksum: int) -> np.ndarray:
        """An embedding that was kept, (dim,) float32."""
        if _checksum(name, content) != checksum:
            raise StoreError(
                f"{self.path}: a recording of {name!r} is damaged (its checksum is another); take a backup, or remove "
                "and enrol this person again"
            )
        if self._cipher is not None:
            content = self._cipher.open(content, _place(person))
        embedding = np.frombuffer(content, dtype="<f4")
        if len(embedding) != self.embedding_dim:
            raise StoreError(
                f"{self.path}: a recording of {name!r} has {len(embedding)} numbers, expected {self.embedding_dim}; "
                "take a backup"
            )
        return embedding.astype(np.float32)


def checked_name(name: str) -> str:
    r"""A person's name as it is kept: composed Unicode without white space around it.

    Raises:
        StoreError: empty, too long, of several lines, with control characters, or the word for strangers.

    >>> checked_name(" Zoe\u0308 "), checked_name("O'Brien; DROP TABLE")
    ('Zo\xeb', "O'Brien; DROP TABLE")
    """
    found = unicodedata.normalize("NFC", name).strip()
    if not found or len(found) > LONGEST_NAME:
        raise StoreError(f"a name of {len(found)} letters; expected 1 to {LONGEST_NAME}")
    odd = [letter for letter in found if unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp")]
    if odd:
        raise StoreError(f"the name {found!r} has control characters, line ends or broken bytes; expected one line")
    if found.casefold() == UNKNOWN:
        raise StoreError(f"nobody can be called {found!r}: it is what `identify` answers for a stranger")
    return found


def stored_recordings(
    name: str,
    embeddings: np.ndarray,
    weights: Sequence[float] | np.ndarray | None,
    details: Sequence[Mapping[str, Any]],
) -> list[StoredRecording]:
    """What is kept of each of a person's embeddings.

    Raises:
        StoreError: another number of weights or details, or a weight of 0 or below.
    """
    found = np.ones(len(embeddings)) if weights is None else np.asarray(weights, dtype=np.float64)
    if found.shape != (len(embeddings),) or not (np.isfinite(found) & (found > 0)).all():
        raise StoreError(f"weights {np.array2string(found, threshold=5)}; expected {len(embeddings)} numbers above 0")
    if details and len(details) != len(embeddings):
        raise StoreError(
            f"details of {len(details)} recordings for {len(embeddings)} embeddings; expected one for each"
        )
    return [
        StoredRecording(name, embedding, float(weight), **dict(detail))
        for embedding, weight, detail in zip(embeddings, found, details or [{}] * len(embeddings), strict=True)
    ]


def _place(person: int) -> bytes:
    """Where an embedding belongs: sealed for one person it does not open as another's."""
    return b"person %d" % person


def _checksum(name: str, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(name.encode()))


def now() -> str:
    """Date and time, UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
