"""People known by their voice: names and embeddings in an SQLite file, and identification among
them.

The store holds raw embeddings, never audio; a person is represented by the weighted mean of their
embeddings. `identify` keeps everybody in one matrix in memory, which is reloaded when another
process has changed the file.

The file itself (tables, connections, backups) is in `speakernet.inference.store_file`.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import shlex
import sqlite3
import time
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from speakernet.evaluation.scoring import WHOLE, Plda, mean_embeddings, pair_scores
from speakernet.files import (
    atomic_write,
    check_writable,
    free_name,
    open_regular,
    reading,
    writing,
)
from speakernet.inference.encryption import (
    PROOF,
    SALT_BYTES,
    StoreKeyError,
    derive_cipher,
    seal,
    unseal,
)
from speakernet.inference.store_file import (
    ADD_DIGESTS,
    BACKUP_WORD,
    EXPECTED,
    HALF_WORD,
    NEW_STORE,
    NUM_TABLES,
    PRIVATE,
    SCHEMA_VERSION,
    StoreError,
    backups_of,
    facts_of,
    open_database,
    remove_half_backups,
    value_of,
)
from speakernet.terminal import MAX_NAMED

TOP = 5
CHANGES = slice(24, 28)
"""The change counter in the header of an SQLite file."""
UNKNOWN = "unknown"
"""The answer for a stranger, and therefore not allowed as a name."""
LONGEST_NAME = 200
FACTS = ("fingerprint", "embedding_dim", "model", "created", "speech")

INVISIBLE_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
INVISIBLE_LETTERS = {
    0x034F,
    0x115F,
    0x1160,
    0x17B4,
    0x17B5,
    0x2800,
    0x3164,
    0xFFA0,
    *range(0xFE00, 0xFE10),
}
LOOKALIKES = str.maketrans(
    "\u03c5\u057d\u03b7\u03bd\u043f\u0578\u043a\u03ba\u01380\u043e\u03bf\u0585\u051d\u0461\u03c9\u0448\u0561",
    "uunnnnkkkoooowwwww",
)
"""Greek, Cyrillic and Armenian letters that look like those of `UNKNOWN`."""


@dataclass(frozen=True)
class Person:
    """A person in a store; the dates (UTC) are of the first enrolment and of the last change."""

    name: str
    recordings: int
    speech_seconds: float
    created: str
    changed: str


@dataclass(frozen=True)
class StoredRecording:
    """What a store keeps about a recording.

    Attributes:
        name: the person.
        embedding: (dim,) float32, unnormalised.
        weight: weight in the person's mean.
        source: path of the audio, for `reembed`; empty if it was not a file.
        seconds: duration.
        speech_seconds: duration of speech.
        warnings: problems found in it.
        added: date and time, UTC.
        digest: SHA-256 of the samples, which detects duplicates; empty if unknown.
    """

    name: str
    embedding: np.ndarray
    weight: float
    source: str = ""
    seconds: float = 0.0
    speech_seconds: float = 0.0
    warnings: str = ""
    added: str = ""
    digest: str = ""


class PeopleStore(contextlib.AbstractContextManager):
    """A store of people in one file, created if missing. Several threads may use it.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "people.db")
        >>> with PeopleStore(path, fingerprint="a model", embedding_dim=2) as store:
        ...     store.enroll("Ada", np.array([[1.0, 0.0], [0.8, 0.6]]), [3.0, 1.0])
        ...     store.enroll("Bo", np.array([[0.0, 2.0]]))
        ...     [name for name, score in store.identify(np.array([0.9, 0.1]))]
        2
        1
        ['Ada', 'Bo']

    Args:
        path: the file.
        fingerprint: fingerprint of the model whose embeddings are stored; None opens a store for
            any model, to list, remove, export or reembed, but does not create one.
        embedding_dim: size of an embedding; None without a fingerprint.
        key: encrypts the embeddings; the same key is needed from then on.
        mean: (dim,) subtracted before scoring, from the model file.
        plda: replaces the cosine as the score; from the model file.
        model: name of the model file, for messages.
        speech: what is embedded, `detected` speech or `whole` recordings, written into a new store.
        must_exist: refuse a missing or empty file instead of creating a store.

    Raises:
        StoreError: the file is not a store, is damaged, newer or for a different model, or cannot
            be opened.
        StoreKeyError: the key is missing, wrong or superfluous.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        fingerprint: str | None,
        embedding_dim: int | None,
        key: str | bytes | None = None,
        mean: np.ndarray | None = None,
        plda: Plda | None = None,
        model: str = "",
        speech: str = WHOLE.speech,
        must_exist: bool = False,
    ) -> None:
        self.path = Path(path)
        self._fingerprint = fingerprint
        self._dim = embedding_dim
        self._mean = mean
        self._plda = plda
        self._key = key
        self._model = model
        self._speech = speech
        self._aead: Any = None
        self._voices: tuple[tuple[Any, ...], list[str], np.ndarray] = (), [], np.empty((0, 0))
        """State of the file when read, names, and the unit-length mean embedding of each person,
        (people, dim)."""
        if fingerprint is not None and not must_exist:
            self._make()
        with self._session() as connection:
            if (problem := value_of(connection, "PRAGMA quick_check(1)")) != "ok":
                raise sqlite3.DatabaseError(f"malformed: {problem}")

    def __exit__(self, *_: object) -> None:
        """Nothing to close: the file is not open between calls."""

    def __len__(self) -> int:
        return len(self.people())

    @property
    def facts(self) -> dict[str, Any]:
        """Properties of the store: fingerprint, embedding_dim, model, created, speech,
        is_encrypted.
        """
        with self._session() as connection:
            # Stores from before version 0.4.0 have embeddings of whole recordings.
            kept = {"speech": "whole", **facts_of(connection)}
        return {name: kept.get(name) for name in FACTS} | {"is_encrypted": "salt" in kept}

    def enroll(
        self,
        name: str,
        embeddings: np.ndarray,
        weights: Sequence[float] | np.ndarray | None = None,
        details: Sequence[Mapping[str, Any]] = (),
    ) -> int:
        """Add recordings of a new or known person; returns how many the person has now.

        A recording with a digest that the person already has is skipped.

        Args:
            name: one line of text, up to 200 characters, except `unknown`.
            embeddings: (recordings, dim), unnormalised.
            weights: (recordings,) weights above 0 in the person's mean; equal by default.
            details: for each recording `source`, `seconds`, `speech_seconds`, `warnings`, `digest`.

        Raises:
            StoreError: a bad name, embeddings of the wrong size or with NaN, or a file that cannot
                be written.
        """
        name = checked_name(name)
        embeddings = self._checked(embeddings)
        count = len(embeddings)
        weighted = np.ones(count) if weights is None else np.asarray(weights, dtype=np.float64)
        if weighted.shape != (count,) or not (np.isfinite(weighted) & (weighted > 0)).all():
            raise StoreError(f"weights {weighted}; expected {count} numbers above 0")
        rows = zip(embeddings, weighted, details or [{}] * count, strict=True)
        with self._session(writes=True) as connection:
            self._insert(
                connection,
                [
                    StoredRecording(name, embedding, float(weight), **how)
                    for embedding, weight, how in rows
                ],
            )
            return _count(connection, name)

    def identify(self, embedding: np.ndarray, top: int = TOP) -> list[tuple[str, float]]:
        """The nearest people with their scores, best first; empty for an empty store.

        Args:
            embedding: (dim,) or (1, dim), unnormalised.
            top: the maximum number of people to return.

        Raises:
            StoreError: an embedding of the wrong size or with NaN, or the file is damaged.
        """
        # Reading everybody from the file takes much longer than scoring them. So the matrix is
        # kept, together with the state of the file at the time of reading. The state is
        # taken before reading: if another process writes in between, the next call reads again.
        unit = mean_embeddings(self._checked(np.asarray(embedding).reshape(1, -1)), self._mean)[0]
        state = self._state()
        if self._voices[0] != state:
            self._voices = (state, *self._read_voices())
        _, names, rows = self._voices
        count = min(max(0, top), len(names))
        if not count:
            return []
        if self._plda:
            scores = pair_scores(unit[None], rows, self._plda)[0]
        else:
            scores = np.clip(rows @ unit, -1.0, 1.0)
        # Sorting everybody would take longer than scoring everybody.
        first = len(names) - count
        nearest = np.argpartition(scores, first)[first:].tolist()
        return sorted(
            ((names[row], float(scores[row])) for row in nearest),
            key=lambda scored: (-scored[1], scored[0]),
        )

    def people(self) -> list[Person]:
        """Everybody, by name."""
        with self._session() as connection:
            found = connection.execute(
                "SELECT name, COUNT(recordings.id), TOTAL(speech_seconds), created, changed FROM "
                "people LEFT JOIN recordings ON person = people.id GROUP BY people.id ORDER BY name"
            )
            return [Person(*row) for row in found]

    def recordings(self, name: str | None = None) -> list[StoredRecording]:
        """The stored recordings of one person, or of everybody grouped by person.

        Raises:
            StoreError: the file is damaged.
            StoreKeyError: it is encrypted and was opened without its key.
        """
        with self._session() as connection:
            return [recording for _, _, recording in self._select(connection, name)]

    def remove(self, name: str) -> int:
        """Remove a person, but not from backups (see `purge`); returns how many recordings were
        removed.
        """
        name = normal_name(name)
        with self._session(writes=True) as connection:
            count = _count(connection, name)
            if not connection.execute("DELETE FROM people WHERE name = ?", [name]).rowcount:
                raise self._nobody(name)
            return count

    def purge(self, name: str) -> list[Path]:
        """Remove a person from the store and its backups, leaving no readable traces; returns the
        files they were in.

        If it is killed, running it again finishes the purge.

        Raises:
            StoreError: nobody has that name in any of the files, or one of them cannot be written.
        """
        name = normal_name(name)
        purged = []
        remove_half_backups(self.path)
        for path in [*backups_of(self.path), self.path]:
            with open_database(path) as connection:
                # Another program may have enabled a write-ahead log, which keeps earlier pages.
                connection.execute("PRAGMA journal_mode = DELETE")
                if connection.execute("DELETE FROM people WHERE name = ?", [name]).rowcount:
                    purged.append(path)
                # Moved pages leave copies of their rows, perhaps since an earlier purge that was
                # killed before this.
                connection.execute("VACUUM")
        if not purged:
            raise self._nobody(name, "in the store or in a backup")
        return purged

    def export(self, path: str | os.PathLike, name: str | None = None) -> int:
        """Write everybody, or one person, to a `.json` or `.npz` file; returns the number of
        recordings.

        Raises:
            StoreError: nobody has that name, or the suffix is neither .json nor .npz.
            StoreKeyError: the store is encrypted and was opened without its key.
        """
        path = Path(path)
        if path.suffix not in (".json", ".npz"):
            raise StoreError(f"{path}: expected a file name ending in .json or .npz")
        check_writable(path)
        recordings = self.recordings(name)
        facts = self.facts
        is_json = path.suffix == ".json"
        if name is not None and not recordings:
            raise self._nobody(name)
        rows = [dataclasses.asdict(recording) for recording in recordings]
        with atomic_write(path, "w" if is_json else "wb") as file:
            if is_json:
                json.dump(
                    {**facts, "recordings": rows},
                    file,
                    default=np.ndarray.tolist,
                    ensure_ascii=False,
                    indent=1,
                )
            else:
                columns: dict[str, Any] = {
                    field.name: [row[field.name] for row in rows]
                    for field in dataclasses.fields(StoredRecording)
                }
                np.savez(
                    file,
                    embeddings=columns.pop("embedding"),
                    fingerprint=facts["fingerprint"],
                    **columns,
                )
        path.chmod(PRIVATE)
        return len(recordings)

    def reembed(
        self,
        embed: Callable[[StoredRecording], np.ndarray],
        *,
        fingerprint: str,
        embedding_dim: int,
        mean: np.ndarray | None = None,
        plda: Plda | None = None,
        model: str = "",
        speech: str = WHOLE.speech,
        drops_missing: bool = False,
    ) -> list[str]:
        """Switch to a different model: embed every recording again from its file, back up the
        store, and update it.

        Args:
            embed: returns the embedding (dim,) of a recording; raises ValueError if its file cannot
                be read.
            fingerprint: fingerprint of the new model.
            embedding_dim: embedding size of the new model.
            mean: subtracted before scoring.
            plda: replaces the cosine as the score.
            model: name of the new model file.
            speech: what `embed` embeds, `detected` speech or `whole` recordings.
            drops_missing: drop recordings that cannot be read; otherwise any such recording is an
                error.

        Returns:
            A sentence for each recording that was left out.

        Raises:
            StoreError: recordings that cannot be read (the first ten are named), or the file cannot
                be written.
        """
        made: list[StoredRecording] = []
        problems = []
        state = self._state()
        kept = self.recordings()
        for recording in kept:
            try:
                made.append(
                    dataclasses.replace(
                        recording,
                        embedding=np.asarray(embed(recording), dtype=np.float32).reshape(-1),
                    )
                )
            except ValueError as error:
                problems.append(f"{recording.name}: {error}")
        if problems and not drops_missing:
            raise StoreError(
                f"{self.path}: {len(problems)} of {len(kept)} recordings cannot be embedded again; "
                "nothing was changed: "
                f"{'; '.join(problems[:MAX_NAMED])}{' …' if len(problems) > MAX_NAMED else ''}"
            )
        self._back_up()
        with self._session(writes=True) as connection:
            if self._state() != state:
                raise StoreError(
                    f"{self.path}: another process has just changed the store; try again"
                )
            connection.execute("DELETE FROM recordings")
            new = {
                "fingerprint": fingerprint,
                "embedding_dim": embedding_dim,
                "model": model,
                "speech": speech,
            }
            connection.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", new.items())
            self._insert(connection, made)
            connection.execute("DELETE FROM people WHERE id NOT IN (SELECT person FROM recordings)")
        self._fingerprint = fingerprint
        self._dim = embedding_dim
        self._mean = mean
        self._plda = plda
        return problems

    @contextlib.contextmanager
    def _session(self, *, writes: bool = False) -> Iterator[sqlite3.Connection]:
        """A connection to the store, with `writes` in one transaction."""
        with open_database(self.path) as connection, connection:
            if writes:
                # Lock now: before a later lock, another process could change what was read.
                connection.execute("BEGIN IMMEDIATE")
            self._check(facts_of(connection))
            yield connection

    def _make(self) -> None:
        """Create a store in a missing or empty file."""
        with reading(self.path, EXPECTED, StoreError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self.path.exists():
                self.path.touch(PRIVATE)
        salt = os.urandom(SALT_BYTES)
        values = self._fingerprint, self._dim, self._model, _now(), self._speech
        facts: dict[str, Any] = dict(zip(FACTS, values, strict=True))
        with open_database(self.path, is_empty=True) as connection:
            # A process killed while creating a store leaves only an empty file.
            if value_of(connection, NUM_TABLES):
                return
            if self._key is not None:
                facts |= {"salt": salt, "proof": seal(derive_cipher(self._key, salt), PROOF, PROOF)}
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                # Another process may have created it first.
                if not value_of(connection, NUM_TABLES):
                    for statement in NEW_STORE.split(";"):
                        connection.execute(statement)
                    connection.executemany("INSERT INTO facts VALUES (?, ?)", facts.items())

    def _check(self, facts: Mapping[str, Any]) -> None:
        """Check that the store matches the expected model and key."""
        if "fingerprint" not in facts:
            raise StoreError(
                f"{self.path}: the store is empty and names no model; remove the file and enrol "
                "again"
            )
        if self._fingerprint is None:
            self._dim = int(facts["embedding_dim"])
        elif (facts["fingerprint"], facts["embedding_dim"]) != (self._fingerprint, self._dim):
            model = self._model or "MODEL"
            raise StoreError(
                f"{self.path} belongs to a different model, {facts['model']} (fingerprint "
                f"{facts['fingerprint'][:12]}; {model} has {self._fingerprint[:12]}); use that "
                f"model, or switch with `speakernet people reembed --model {model} --store "
                f"{shlex.quote(str(self.path))}`"
            )
        if "salt" not in facts and self._key is not None:
            raise StoreKeyError(
                f"{self.path} is not encrypted, but a key was given; leave the key out"
            )
        # Without a fingerprint, people are only listed or removed, which needs no key.
        if "salt" in facts and self._key is None and self._fingerprint is not None:
            raise self._without_key()
        # A single assignment: everything that another thread writes meanwhile must be encrypted.
        self._aead = None if self._key is None else derive_cipher(self._key, facts["salt"])
        if self._aead is not None:
            unseal(self.path, self._aead, facts["proof"], PROOF)

    def _state(self) -> tuple[Any, ...]:
        """A value that changes whenever the file is changed or replaced."""
        with self._session(), open_regular(self.path) as file:
            status = os.fstat(file.fileno())
            # SQLite's change counter, since modification times are coarser.
            counted = file.read(CHANGES.stop)[CHANGES]
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, counted

    def _without_key(self) -> StoreKeyError:
        return StoreKeyError(
            f"{self.path} is encrypted; give its key (--key-file FILE, in Python key=…)"
        )

    def _insert(
        self, connection: sqlite3.Connection, recordings: Iterable[StoredRecording]
    ) -> None:
        """Add recordings without duplicates inside a transaction; a store of an older version is
        upgraded.
        """
        version = value_of(connection, "PRAGMA user_version")
        if version < SCHEMA_VERSION:
            kept = self._select(connection)
            for statement in ADD_DIGESTS.split(";") if version == 1 else ():
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            sealed = [(*self._sealed(person, recording), row) for row, person, recording in kept]
            connection.executemany(
                "UPDATE recordings SET embedding = ?, checksum = ? WHERE id = ?", sealed
            )
        now = _now()
        for name, several in itertools.groupby(recordings, key=attrgetter("name")):
            connection.execute(
                "INSERT INTO people (name, created, changed) VALUES (?, ?, ?) "
                "ON CONFLICT (name) DO UPDATE SET changed = excluded.changed",
                [name, now, now],
            )
            person = value_of(connection, "SELECT id FROM people WHERE name = ?", name)
            for recording in several:
                row = (
                    person,
                    recording.source,
                    recording.seconds,
                    recording.speech_seconds,
                    recording.weight,
                    recording.warnings,
                    recording.added or now,
                )
                connection.execute(
                    "INSERT INTO recordings (person, source, seconds, speech_seconds, weight, "
                    "warnings, added, digest, embedding, checksum) VALUES (?, ?, ?, ?, ?, ?, ?, ?, "
                    "?, ?) ON CONFLICT (person, digest) WHERE digest != '' DO NOTHING",
                    (*row, recording.digest, *self._sealed(person, recording)),
                )

    def _sealed(self, person: int, recording: StoredRecording) -> tuple[bytes, int]:
        """An embedding as stored, and its checksum."""
        content = np.ascontiguousarray(recording.embedding, dtype="<f4").tobytes()
        if self._aead is not None:
            content = seal(self._aead, content, _place(person, recording))
        return content, zlib.crc32(content, zlib.crc32(_place(person, recording)))

    def _select(
        self, connection: sqlite3.Connection, name: str | None = None
    ) -> list[tuple[int, int, StoredRecording]]:
        """Row number, person number and recording, for one person or for everybody."""
        if self._aead is None and "salt" in facts_of(connection):
            raise self._without_key()
        version = value_of(connection, "PRAGMA user_version")
        rows = connection.execute(
            "SELECT recordings.id, person, embedding, checksum, people.name, weight, source, "
            f"seconds, speech_seconds, warnings, added, {repr('') if version == 1 else 'digest'} "
            "FROM recordings JOIN people ON person = people.id "
            f"{'' if name is None else 'WHERE people.name = ?'} ORDER BY person, recordings.id",
            [] if name is None else [normal_name(name)],
        )
        selected = []
        for row, person, content, checksum, *kept in rows:
            recording = StoredRecording(kept[0], np.empty(0), *kept[1:])
            covered = (
                recording.name.encode() if version < SCHEMA_VERSION else _place(person, recording)
            )
            is_whole = (
                zlib.crc32(content, zlib.crc32(covered)) == checksum
                and 0 < recording.weight < math.inf
            )
            if is_whole and self._aead is not None:
                place = b"person %d" % person if version == 1 else _place(person, recording)
                content = unseal(self.path, self._aead, content, place)
            if not is_whole or len(content) != 4 * (self._dim or 0):
                raise StoreError(
                    f"{self.path}: a recording of {recording.name!r} is damaged; use a backup, or "
                    "remove this person and enrol them again"
                )
            embedding = np.frombuffer(content, dtype="<f4").astype(np.float32)
            selected.append((row, person, dataclasses.replace(recording, embedding=embedding)))
        return selected

    def _read_voices(self) -> tuple[list[str], np.ndarray]:
        """All names, and the unit-length weighted mean of each person's recordings, (people,
        dim).
        """
        kept = self.recordings()
        if not kept:
            return [], np.empty((0, self._dim or 0), dtype=np.float32)
        units = mean_embeddings(np.stack([recording.embedding for recording in kept]), self._mean)
        weighted = (
            units * np.array([recording.weight for recording in kept], dtype=np.float32)[:, None]
        )
        starts = [
            row
            for row, recording in enumerate(kept)
            if not row or recording.name != kept[row - 1].name
        ]
        return [kept[start].name for start in starts], mean_embeddings(
            np.add.reduceat(weighted, starts, axis=0)
        )

    def _back_up(self) -> None:
        """Copy the store to a file beside it, which gets its name only when complete."""
        copy = free_name(self.path, f"{BACKUP_WORD}-{time.strftime('%Y%m%d')}")
        half = self.path.with_name(f"{self.path.name}.{HALF_WORD}-{os.getpid()}")
        with writing(copy, "nothing was changed"), self._session() as connection:
            remove_half_backups(self.path)
            half.touch(PRIVATE, exist_ok=False)
            try:
                connection.execute("VACUUM INTO ?", [str(half)])
                half.rename(copy)
            finally:
                half.unlink(missing_ok=True)

    def _checked(self, embeddings: np.ndarray) -> np.ndarray:
        """The embeddings as float32, or StoreError."""
        rows = np.asarray(embeddings, dtype=np.float32)
        if (
            rows.ndim != 2
            or rows.shape[1] != self._dim
            or not len(rows)
            or not np.isfinite(rows).all()
        ):
            raise StoreError(
                f"embeddings of shape {rows.shape}; expected (recordings, {self._dim}) finite "
                "numbers"
            )
        return rows

    def _nobody(self, name: str, where: str = "in the store") -> StoreError:
        return StoreError(
            f"{self.path}: nobody is called {name!r} {where}; `speakernet people list` shows all "
            "names"
        )


def normal_name(name: str) -> str:
    """A name as stored: composed Unicode without surrounding white space."""
    return unicodedata.normalize("NFC", name).strip()


def checked_name(name: str) -> str:
    r"""A person's name as stored, after checking that it is allowed.

    Raises:
        StoreError: the name is empty, too long, `.`, `..`, similar to `unknown`, or `speaker N`, or
            has invisible characters.

    Examples:
        >>> checked_name(" Zoe\u0308 "), checked_name("O'Brien; DROP TABLE")
        ('Zo\xeb', "O'Brien; DROP TABLE")
    """
    normalised = normal_name(name)
    letters = unicodedata.normalize("NFKD", normalised).casefold().translate(LOOKALIKES)
    is_hidden = any(
        ord(letter) in INVISIBLE_LETTERS or unicodedata.category(letter) in INVISIBLE_CATEGORIES
        for letter in normalised
    )
    shown = "".join(letter for letter in letters if not unicodedata.combining(letter))
    is_taken = shown in ("", ".", "..", UNKNOWN) or re.fullmatch(
        r"speaker\s+\d+", normalised.casefold()
    )
    if is_hidden or len(normalised) > LONGEST_NAME or is_taken:
        raise StoreError(
            f"the name {normalised[:20]!a} ({len(normalised)} characters) is not allowed; expected "
            f"1 to {LONGEST_NAME} visible characters in one line, but not '.', '..', {UNKNOWN!r} "
            "or 'speaker N' (the last two denote strangers)"
        )
    return normalised


def _count(connection: sqlite3.Connection, name: str) -> int:
    counted = (
        "SELECT COUNT(*) FROM recordings JOIN people ON person = people.id WHERE people.name = ?"
    )
    return int(value_of(connection, counted, name))


def _place(person: int, recording: StoredRecording) -> bytes:
    """What checksum and encryption bind an embedding to: its person's number and name, its weight
    and its digest.
    """
    return f"person {person} {recording.weight!r} {recording.digest} {recording.name}".encode()


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
