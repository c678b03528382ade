"""People known by their voice: names and embeddings in an SQLite file, and identification among
them.

The store holds raw embeddings, never audio; a person is represented by the weighted mean of their
scores. `identify` keeps everybody in one matrix in memory, which is reloaded when another
process has changed the file.

The file itself (tables, connections, backups) is in `speakernet.inference.store_file`.
"""

import contextlib
import functools
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
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from speakernet.evaluation.scoring import WHOLE, Plda, mean_embeddings
from speakernet.evaluation.several import NOT_STRETCHED, SeveralRecordings
from speakernet.files import (
    atomic_write,
    check_writable,
    free_name,
    open_regular,
    reading,
    writing,
)
from speakernet.inference.store_file import (
    ADD_DIGESTS,
    BACKUP_WORD,
    EXPECTED,
    HALF_WORD,
    NEW_STORE,
    NUM_TABLES,
    PRIVATE,
    PROOF,
    SALT_BYTES,
    SCHEMA_VERSION,
    StoreError,
    StoreKeyError,
    backups_of,
    derive_cipher,
    facts_of,
    open_database,
    remove_half_backups,
    seal,
    unseal,
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


@dataclass(frozen=True)
class StoreModel:
    """The model whose embeddings a store holds, and how it scores them."""

    fingerprint: str
    embedding_dim: int
    name: str = ""
    """Name of its file, for messages."""
    speech: str = WHOLE.speech
    """What is embedded: `detected` speech or `whole` recordings."""
    mean: ndarray | None = None
    """(dim,) subtracted before scoring; None subtracts nothing."""
    plda: Plda | None = None
    """Replaces the cosine as the score."""
    several: SeveralRecordings = NOT_STRETCHED
    """Puts scores against several recordings on the scale of scores against one."""


@dataclass(frozen=True)
class Voices:
    """Everybody's recordings, as they are scored.

    A person's score is the mean score with their recordings, weighted. For cosines that is one
    product with the weighted mean of the units, which is not scaled to unit length.
    """

    names: list[str]
    """Of the people."""
    starts: ndarray
    """First recording of each person, (people,)."""
    units: ndarray
    """(recordings, dim), unit length."""
    weights: ndarray
    """(recordings,)."""

    @property
    def owners(self) -> ndarray:
        """The person of each recording, (recordings,)."""
        counts = np.diff(np.append(self.starts, len(self.units)))
        return np.repeat(np.arange(len(self.names)), counts)

    @functools.cached_property
    def totals(self) -> ndarray:
        """Sums of weights, (people,)."""
        return np.add.reduceat(self.weights, self.starts)

    @functools.cached_property
    def means(self) -> ndarray:
        """Weighted means of the units, (people, dim)."""
        sums = np.add.reduceat(self.units * self.weights[:, None], self.starts, axis=0)
        return np.asarray(sums / self.totals[:, None])

    @functools.cached_property
    def squared_lengths(self) -> ndarray:
        """Of these means, (people,)."""
        return np.asarray(np.square(self.means).sum(axis=1))

    def mean_scores(self, tests: ndarray, plda: Plda | None) -> ndarray:
        """Mean scores, (tests, people), of embeddings (tests, dim) of unit length."""
        if plda is None:
            return tests @ self.means.T
        scores = plda.scores(tests, self.units) * self.weights
        return np.asarray(np.add.reduceat(scores, self.starts, axis=1) / self.totals)


NOBODY = Voices([], np.empty(0, dtype=np.int64), np.empty((0, 0)), np.empty(0))
ANY_MODEL = StoreModel("", 0)
"""Opens a store of any model, to list, remove, export or reembed."""


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
    embedding: ndarray
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
        >>> with PeopleStore(path, StoreModel("a fingerprint", 2)) as store:
        ...     store.enroll("Ada", np.array([[1.0, 0.0], [0.8, 0.6]]), [3.0, 1.0])
        ...     store.enroll("Bo", np.array([[0.0, 2.0]]))
        ...     [name for name, score in store.identify(np.array([0.9, 0.1]))]
        2
        1
        ['Ada', 'Bo']

    Args:
        path: the file.
        model: the model whose embeddings are stored; `ANY_MODEL` creates no store.
        key: encrypts the embeddings; the same key is needed from then on.
        must_exist: refuse a missing or empty file instead of creating a store.

    Raises:
        StoreError: the file is not a store, is damaged, newer or for a different model, or cannot
            be opened.
        StoreKeyError: the key is missing, wrong or superfluous.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        model: StoreModel = ANY_MODEL,
        *,
        key: str | bytes | None = None,
        must_exist: bool = False,
    ) -> None:
        self.path = Path(path)
        self._model = model
        self._key = key
        self._aead: Any = None
        self._dim = model.embedding_dim
        self._voices: tuple[tuple[Any, ...], Voices] = (), NOBODY
        """State of the file when read, and everybody in it."""
        # The first enrolment creates the store, but `identify` with a mistyped path must not create
        # an empty one.
        if model.fingerprint and not must_exist:
            self._make(model)
        with self._session() as connection:
            # Only once per opened store, because it reads the whole file.
            problem = value_of(connection, "PRAGMA quick_check(1)")
            if problem != "ok":
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
        embeddings: ndarray,
        weights: Sequence[float] | ndarray | None = None,
    ) -> int:
        """Add embeddings of a new or known person; returns how many the person has now.

        Args:
            name: one line of text, up to 200 characters, except `unknown`.
            embeddings: (recordings, dim), unnormalised.
            weights: (recordings,) weights above 0 in the person's mean; equal by default.

        Raises:
            StoreError: as for `add`.
        """
        name = checked_name(name)
        if weights is None:
            weights = np.ones(len(embeddings))
        if len(weights) != len(embeddings):
            raise StoreError(f"{len(weights)} weights; expected {len(embeddings)}")
        recordings = []
        for embedding, weight in zip(embeddings, weights, strict=True):
            recordings.append(StoredRecording(name, np.asarray(embedding), float(weight)))
        return self.add(recordings)

    def add(self, recordings: Sequence[StoredRecording]) -> int:
        """Add recordings of one person, whose name is checked; returns how many the person has now.

        A recording with a digest that the person already has is skipped.

        Raises:
            StoreError: embeddings of the wrong size or with NaN, weights that are not above 0, or a
                file that cannot be written.
        """
        if not recordings:
            raise StoreError("no embeddings; expected at least one")
        for recording in recordings:
            # All are checked before the transaction: a person is enrolled with all recordings or
            # none.
            self._check_embedding(recording.embedding)
            if not 0 < recording.weight < math.inf:
                raise StoreError(f"the weight is {recording.weight}; expected a number above 0")
        with self._session(writes=True) as connection:
            self._insert(connection, recordings)
            return _count(connection, recordings[0].name)

    def identify(self, embedding: ndarray, top: int = TOP) -> list[tuple[str, float]]:
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
        unit = mean_embeddings(self._check_embedding(embedding)[None], self._model.mean)[0]
        state = self._state()
        if self._voices[0] != state:
            self._voices = state, voices_of(self.recordings(), self._model.mean)
        voices = self._voices[1]
        names = voices.names
        count = min(max(0, top), len(names))
        if not count:
            return []
        means = voices.mean_scores(unit[None], self._model.plda)[0]
        scores = self._model.several.as_one(means, voices.squared_lengths)
        if self._model.plda is None:
            scores = np.clip(scores, -1.0, 1.0)
        # Sorting everybody would take longer than scoring everybody.
        first = len(names) - count
        nearest = np.argpartition(scores, first)[first:].tolist()
        scored = [(names[row], float(scores[row])) for row in nearest]
        return sorted(scored, key=lambda person: (-person[1], person[0]))

    def people(self) -> list[Person]:
        """Everybody, by name."""
        with self._session() as connection:
            rows = connection.execute(
                "SELECT name, COUNT(recordings.id), TOTAL(speech_seconds), created, changed FROM "
                "people LEFT JOIN recordings ON person = people.id GROUP BY people.id ORDER BY name"
            )
            return [Person(*row) for row in rows]

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
        # The store comes last: after a kill in between, the person is still listed and can be
        # purged again.
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
        """Write everybody, or one person, to a `.json` file; returns the number of recordings.

        Raises:
            StoreError: nobody has that name, or the suffix is not .json.
            StoreKeyError: the store is encrypted and was opened without its key.
        """
        path = Path(path)
        if path.suffix != ".json":
            raise StoreError(f"{path}: expected a file name ending in .json")
        # Before the embeddings are read and decrypted.
        check_writable(path)
        recordings = self.recordings(name)
        if name is not None and not recordings:
            raise self._nobody(name)
        content = {**self.facts, "recordings": list(map(vars, recordings))}
        with atomic_write(path) as file:
            json.dump(content, file, default=ndarray.tolist, ensure_ascii=False, indent=1)
        # Embeddings are personal data, and an export is not encrypted.
        path.chmod(PRIVATE)
        return len(recordings)

    def reembed(
        self,
        embed: Callable[[StoredRecording], ndarray],
        model: StoreModel,
        *,
        drops_missing: bool = False,
    ) -> list[str]:
        """Switch to a different model: embed every recording again from its file, back up the
        store, and update it.

        Args:
            embed: returns the embedding (dim,) of a recording; raises ValueError if its file cannot
                be read.
            model: the new model.
            drops_missing: drop recordings that cannot be read; otherwise any such recording is an
                error.

        Returns:
            A sentence for each recording that was left out.

        Raises:
            StoreError: recordings that cannot be read (the first ten are named), or the file cannot
                be written.
        """
        # Embedding takes minutes, during which others may use the store, so it is not locked.
        # Instead its state is compared in the transaction that replaces everything; a store that
        # has changed is left as it is.
        made: list[StoredRecording] = []
        problems = []
        state = self._state()
        kept = self.recordings()
        for recording in kept:
            try:
                embedding = np.asarray(embed(recording), dtype=np.float32).reshape(-1)
            except ValueError as error:
                problems.append(f"{recording.name}: {error}")
            else:
                made.append(replace(recording, embedding=embedding))
        if problems and not drops_missing:
            raise StoreError(
                f"{self.path}: {len(problems)} of {len(kept)} recordings cannot be embedded again; "
                f"nothing was changed: {'; '.join(problems[:MAX_NAMED])}"
            )
        # A backup first, because the old embeddings cannot be computed again without the old model.
        self._back_up()
        with self._session(writes=True) as connection:
            if self._state() != state:
                raise StoreError(
                    f"{self.path}: another process has just changed the store; try again"
                )
            connection.execute("DELETE FROM recordings")
            connection.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", _facts(model))
            self._insert(connection, made)
            # A person whose recordings are all gone would be a name without a voice.
            connection.execute("DELETE FROM people WHERE id NOT IN (SELECT person FROM recordings)")
        self._model = model
        self._dim = model.embedding_dim
        return problems

    @contextlib.contextmanager
    def _session(self, *, writes: bool = False) -> Iterator[sqlite3.Connection]:
        """A connection to the store, with `writes` in one transaction."""
        # Opened for each action and checked each time: in between, another process may have
        # switched the store to another model, or somebody have put a backup in its place.
        with open_database(self.path) as connection, connection:
            if writes:
                # Lock now: before a later lock, another process could change what was read.
                connection.execute("BEGIN IMMEDIATE")
            self._check(facts_of(connection))
            yield connection

    def _make(self, model: StoreModel) -> None:
        """Create a store in a missing or empty file."""
        with reading(self.path, EXPECTED, StoreError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self.path.exists():
                self.path.touch(PRIVATE)
        with open_database(self.path, is_empty=True) as connection:
            # A process killed while creating a store leaves only an empty file.
            if value_of(connection, NUM_TABLES):
                return
            facts: list[tuple[str, Any]] = [*_facts(model), ("created", _now())]
            if self._key is not None:
                # The proof is a known text: decrypting it shows a wrong key before anybody is
                # enrolled under it.
                salt = os.urandom(SALT_BYTES)
                proof = seal(derive_cipher(self._key, salt), PROOF, PROOF)
                facts += [("salt", salt), ("proof", proof)]
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                # Another process may have created it first.
                if not value_of(connection, NUM_TABLES):
                    for statement in NEW_STORE.split(";"):
                        connection.execute(statement)
                    connection.executemany("INSERT INTO facts VALUES (?, ?)", facts)

    def _check(self, facts: Mapping[str, Any]) -> None:
        """Check that the store matches the expected model and key."""
        # Checked at every action, because the file may have been replaced since the last one.
        # Scores against embeddings of another model look plausible and mean nothing, and a store
        # with a key must never hold an unencrypted row.
        if "fingerprint" not in facts:
            raise StoreError(
                f"{self.path}: the store is empty and names no model; remove the file and enrol "
                "again"
            )
        dim = int(facts["embedding_dim"])
        model = self._model
        is_known = (facts["fingerprint"], dim) == (model.fingerprint, model.embedding_dim)
        if model.fingerprint and not is_known:
            name = model.name or "MODEL"
            raise StoreError(
                f"{self.path} belongs to a different model, {facts['model']} (fingerprint "
                f"{facts['fingerprint'][:12]}; {name} has {model.fingerprint[:12]}); use that "
                f"model, or switch with `speakernet people reembed --model {name} --store "
                f"{shlex.quote(str(self.path))}`"
            )
        self._dim = dim
        if "salt" not in facts and self._key is not None:
            raise StoreKeyError(
                f"{self.path} is not encrypted, but a key was given; leave the key out"
            )
        # Without a model, people are only listed or removed, which needs no key.
        if "salt" in facts and self._key is None and model.fingerprint:
            raise self._without_key()
        # A single assignment: everything that another thread writes meanwhile must be encrypted.
        self._aead = None if self._key is None else derive_cipher(self._key, facts["salt"])
        if self._aead is not None:
            unseal(self.path, self._aead, facts["proof"], PROOF)

    def _state(self) -> tuple[Any, ...]:
        """A value that changes whenever the file is changed or replaced."""
        with self._session(), open_regular(self.path) as file:
            # Taken from the open file: the path may already belong to a file that replaced it.
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
        # An older store is upgraded by the first write, not by opening it, so that the older
        # program can still read a store that is only looked at. Checksums and encryption of its
        # recordings are renewed in the same transaction.
        version = value_of(connection, "PRAGMA user_version")
        if version < SCHEMA_VERSION:
            kept = self._select(connection)
            if version == 1:
                for statement in ADD_DIGESTS.split(";"):
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.executemany(
                "UPDATE recordings SET embedding = ?, checksum = ? WHERE id = ?",
                [(*self._seal(person, recording), row) for row, person, recording in kept],
            )
        now = _now()
        for name, several in itertools.groupby(recordings, key=attrgetter("name")):
            connection.execute(
                "INSERT INTO people (name, created, changed) VALUES (?1, ?2, ?2) "
                "ON CONFLICT (name) DO UPDATE SET changed = excluded.changed",
                [name, now],
            )
            person = value_of(connection, "SELECT id FROM people WHERE name = ?", name)
            for recording in several:
                content, checksum = self._seal(person, recording)
                row = vars(recording) | {"person": person, "added": recording.added or now}
                row |= {"embedding": content, "checksum": checksum}
                connection.execute(
                    "INSERT INTO recordings (person, source, seconds, speech_seconds, weight, "
                    "warnings, added, digest, embedding, checksum) VALUES (:person, :source, "
                    ":seconds, :speech_seconds, :weight, :warnings, :added, :digest, :embedding, "
                    ":checksum) ON CONFLICT (person, digest) WHERE digest != '' DO NOTHING",
                    row,
                )

    def _seal(self, person: int, recording: StoredRecording) -> tuple[bytes, int]:
        """An embedding as stored, and its checksum."""
        # Little-endian on every machine, since a store may be copied to another one.
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
        digest = "''" if version == 1 else "digest"
        where = "" if name is None else "WHERE people.name = ?"
        # Ordered by person, as `voices_of` needs them.
        names = [] if name is None else [normal_name(name)]
        rows = connection.execute(
            "SELECT recordings.id, person, embedding, checksum, people.name, weight, source, "
            f"seconds, speech_seconds, warnings, added, {digest} "
            "FROM recordings JOIN people ON person = people.id "
            f"{where} ORDER BY person, recordings.id",
            names,
        )
        selected = []
        for row, person, content, checksum, owner, *kept in rows:
            recording = StoredRecording(owner, np.empty(0), *kept)
            # Each version binds an embedding to more of its row than the one before, so that rows
            # cannot be exchanged by whoever can write the file but does not have the key.
            place = _place(person, recording)
            # What checksum and encryption covered before version 3.
            covered = place if version == SCHEMA_VERSION else owner.encode()
            is_whole = zlib.crc32(content, zlib.crc32(covered)) == checksum
            is_whole &= 0 < recording.weight < math.inf
            if is_whole and self._aead is not None:
                if version == 1:
                    place = b"person %d" % person
                content = unseal(self.path, self._aead, content, place)
            if not is_whole or len(content) != 4 * self._dim:
                raise StoreError(
                    f"{self.path}: a recording of {owner!r} is damaged; use a backup, or "
                    "remove this person and enrol them again"
                )
            embedding = np.frombuffer(content, dtype="<f4").astype(np.float32)
            selected.append((row, person, replace(recording, embedding=embedding)))
        return selected

    def _back_up(self) -> None:
        """Copy the store to a file beside it, which gets its name only when complete."""
        copy = free_name(self.path, f"{BACKUP_WORD}-{time.strftime('%Y%m%d')}")
        half = self.path.with_name(f"{self.path.name}.{HALF_WORD}-{os.getpid()}")
        with writing(copy, "nothing was changed"), self._session() as connection:
            remove_half_backups(self.path)
            # Created here with private permissions, because SQLite would make it readable for
            # everybody.
            half.touch(PRIVATE, exist_ok=False)
            try:
                connection.execute("VACUUM INTO ?", [str(half)])
                half.rename(copy)
            finally:
                half.unlink(missing_ok=True)

    def _check_embedding(self, embedding: ndarray) -> ndarray:
        """The embedding as float32, (dim,), or StoreError."""
        row = np.asarray(embedding, dtype=np.float32).reshape(-1)
        if row.shape != (self._dim,) or not np.isfinite(row).all():
            raise StoreError(
                f"an embedding of shape {row.shape}; expected {self._dim} finite numbers"
            )
        return row

    def _nobody(self, name: str, where: str = "in the store") -> StoreError:
        return StoreError(
            f"{self.path}: nobody is called {name!r} {where}; `speakernet people list` shows all "
            "names"
        )


def voices_of(recordings: Sequence[StoredRecording], mean: ndarray | None) -> Voices:
    """The voices of recordings that are grouped by person, after subtracting a mean, (dim,)."""
    if not recordings:
        return NOBODY
    units = mean_embeddings(np.stack([recording.embedding for recording in recordings]), mean)
    weights = np.array([recording.weight for recording in recordings], dtype=np.float32)
    # Recordings come grouped by person, so the groups are where the name changes.
    starts = [0]
    for row in range(1, len(recordings)):
        if recordings[row].name != recordings[row - 1].name:
            starts.append(row)
    names = [recordings[start].name for start in starts]
    return Voices(names, np.array(starts), units, weights)


def normal_name(name: str) -> str:
    """A name as stored: composed Unicode without surrounding white space."""
    return unicodedata.normalize("NFC", name).strip()


def checked_name(name: str) -> str:
    r"""A person's name as stored, after checking that it is allowed.

    Raises:
        StoreError: the name is empty, too long, `.`, `..`, `unknown` or `speaker N`, or has
            characters that cannot be printed.

    Examples:
        >>> checked_name(" Zoe\u0308 "), checked_name("O'Brien; DROP TABLE")
        ('Zo\xeb', "O'Brien; DROP TABLE")
    """
    normalised = normal_name(name)
    folded = normalised.casefold()
    # The answer for a stranger is `unknown`, and `who` calls unknown voices `speaker 1`, `speaker
    # 2`; a person of that name could not be told from them.
    is_taken = folded in ("", ".", "..", UNKNOWN) or re.fullmatch(r"speaker\s+\d+", folded)
    if is_taken or len(normalised) > LONGEST_NAME or not normalised.isprintable():
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


def _facts(model: StoreModel) -> list[tuple[str, Any]]:
    return [
        ("fingerprint", model.fingerprint),
        ("embedding_dim", model.embedding_dim),
        ("model", model.name),
        ("speech", model.speech),
    ]


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
