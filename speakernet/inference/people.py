"""People who are known by their voice: names and embeddings in one SQLite file, and who of them a recording is.

Each recording's embedding is kept as the network gave it, never audio; a person is the weighted mean of theirs. For
`identify` all people stand in one matrix in memory, which follows the file when another process has changed it. The
file itself is `store_file.py`'s.
"""

import contextlib
import dataclasses
import difflib
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from speakernet.evaluation.scoring import mean_embeddings
from speakernet.files import writing
from speakernet.inference.people_export import export_recordings
from speakernet.inference.store_file import (
    StoreError,
    back_up,
    backups_of,
    count_of,
    has_to_be_wiped,
    open_store_file,
    remove_half_backups,
    store_errors,
    wipe,
    writing_to,
)
from speakernet.inference.store_rows import Person, StoredRecording, StoreRows, checked_name, stored_recordings
from speakernet.inference.voices import Voices, voices_of
from speakernet.terminal import MAX_NAMED

TOP = 5


class PeopleStore:
    """A file of people, open; made where it is missing. It may be used by several threads at once.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with PeopleStore(Path(folder, "people.db"), fingerprint="a model", embedding_dim=2) as store:
    ...     store.enroll("Ada", np.array([[1.0, 0.0], [0.8, 0.6]]), [3.0, 1.0])
    ...     store.enroll("Bo", np.array([[0.0, 2.0]]))
    ...     [name for name, score in store.identify(np.array([0.9, 0.1]))]
    2
    1
    ['Ada', 'Bo']

    Args:
        path: of the file.
        fingerprint: of the model whose embeddings are kept; None opens a store of any model, to list, remove, export or
            reembed, but makes none.
        embedding_dim: numbers in an embedding; None with no fingerprint.
        key: encrypts the embeddings; the same one is needed ever after.
        mean: (dim,) subtracted before scoring, as the model file says.
        model: name of the model file, kept for messages.

    Raises:
        StoreError: not a store, damaged, newer, of another model, or it cannot be opened.
        StoreKeyError: it is encrypted and the key is missing or another one, or a key was given and it is not.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        fingerprint: str | None,
        embedding_dim: int | None,
        key: str | bytes | None = None,
        mean: np.ndarray | None = None,
        model: str = "",
    ) -> None:
        self.path = Path(path)
        self._fingerprint, self._mean = fingerprint, mean
        self._lock = threading.RLock()
        self._voices: Voices | None = None
        self._version = -1
        self._connection = open_store_file(self.path, is_made=fingerprint is not None)
        self._rows = StoreRows(self._connection, self.path)
        try:
            with store_errors(self.path):
                self._rows.begin(fingerprint, embedding_dim, key, model)
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> "PeopleStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        with self._lock, store_errors(self.path):
            return int(self._connection.execute("SELECT COUNT(*) FROM people").fetchone()[0])

    def embedding_of(self, name: str) -> np.ndarray:
        """Somebody's voice, (1, dim): the weighted mean of their embeddings at length 1, as `identify` compares it.

        The mean that the model file subtracts is added again, so that `SpeakerVerifier.compare` may subtract it.

        Raises:
            StoreError: nobody of that name.
        """
        name = checked_name(name)
        with self._lock:
            found = self._load(name)
        if not len(found):
            raise StoreError(self._nobody(name))
        unit = found.row(name)[None]
        return unit if self._mean is None else unit + self._mean

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._connection.close()

    @property
    def facts(self) -> dict[str, Any]:
        """What the store says of itself: fingerprint, embedding_dim, model, created, is_encrypted."""
        with self._lock, store_errors(self.path):
            return self._rows.facts()

    def enroll(
        self,
        name: str,
        embeddings: np.ndarray,
        weights: Sequence[float] | np.ndarray | None = None,
        details: Sequence[Mapping[str, Any]] = (),
    ) -> int:
        """Add recordings of somebody, who is new or was there before; returns how many they have now.

        Args:
            name: any text of one line, up to 200 letters, but `unknown`.
            embeddings: (recordings, dim), as the network gave them.
            weights: (recordings,) above 0, in the person's mean; all alike where left out.
            details: for each recording `source`, `seconds`, `speech_seconds`, `warnings`.

        Raises:
            StoreError: a name that none is, embeddings of another size or with NaN, or a file that cannot be written.
        """
        return self.enroll_many([(name, embeddings, weights, details)])[0]

    def enroll_many(
        self, people: Iterable[tuple[str, np.ndarray, Sequence[float] | np.ndarray | None, Sequence[Mapping[str, Any]]]]
    ) -> list[int]:
        """`enroll` for many people, all or none of them.

        Raises:
            StoreError: as `enroll`.
        """
        rows = []
        for name, embeddings, weights, details in people:
            name = checked_name(name)
            rows.append((name, stored_recordings(name, self._checked(embeddings), weights, details)))
        with self._lock:
            with writing_to(self._connection, self.path):
                self._check_model()
                for name, recordings in rows:
                    self._rows.insert(name, recordings)
            return [self._follow(name) for name, _ in rows]

    def identify(self, embedding: np.ndarray, top: int = TOP) -> list[tuple[str, float]]:
        """The people whose voices are nearest, best first, each with the cosine; empty where there is nobody.

        Args:
            embedding: (dim,) or (1, dim), as the network gave it.
            top: how many, at most.

        Raises:
            StoreError: an embedding of another size or with NaN, or the file is damaged.
        """
        unit = mean_embeddings(self._checked(np.asarray(embedding).reshape(1, -1)), self._mean)[0]
        with self._lock:
            return self._current().nearest(unit, top)

    def people(self) -> list[Person]:
        """Everybody, by name."""
        with self._lock, store_errors(self.path):
            return self._rows.people()

    def recordings(self, name: str | None = None) -> list[StoredRecording]:
        """What is kept of one person's recordings, or of everybody's, those of one person beside each other.

        Raises:
            StoreError: the file is damaged.
            StoreKeyError: it is encrypted and was opened without its key.
        """
        with self._lock, store_errors(self.path):
            return self._rows.select(None if name is None else checked_name(name))

    def remove(self, name: str) -> int:
        """Forget somebody; backups keep them (`purge` does not). Returns how many recordings there were.

        Raises:
            StoreError: nobody of that name.
        """
        name = checked_name(name)
        with self._lock:
            with writing_to(self._connection, self.path):
                count = count_of(self._connection, name)
                if not self._connection.execute("DELETE FROM people WHERE name = ?", [name]).rowcount:
                    raise StoreError(self._nobody(name))
            self._follow(name)
        return count

    def purge(self, name: str) -> list[Path]:
        """Forget somebody so that nothing of them can be read in the store or in its backups; returns these files.

        One that was cut short is finished by the next, of whomever.

        Raises:
            StoreError: nobody of that name in any of them, or one of them cannot be written.
        """
        name = checked_name(name)
        with self._lock:
            found = []
            with writing(self.path, "mend the rights of its folder"):
                remove_half_backups(self.path)
            # Backups first: a purge that fails half way is seen in the store, and is begun again.
            for path in backups_of(self.path):
                with contextlib.closing(open_store_file(path, is_made=False)) as backup, store_errors(path):
                    if has_to_be_wiped(backup, name):
                        found.append(path)
                        wipe(backup, path, name)
            with store_errors(self.path):
                is_here = has_to_be_wiped(self._connection, name)
            if is_here:
                wipe(self._connection, self.path, name)
                found.append(self.path)
                self._follow(name)
        if not found:
            raise StoreError(self._nobody(name))
        return found

    def export(self, path: str | os.PathLike, name: str | None = None) -> int:
        """Write everybody, or one person, to a `.json` or `.npz` file; returns how many recordings.

        Raises:
            StoreError: nobody of that name, or another ending.
            StoreKeyError: the store is encrypted and was opened without its key.
        """
        recordings = self.recordings(name)
        if name is not None and not recordings:
            raise StoreError(self._nobody(name))
        export_recordings(Path(path), self.facts, recordings)
        return len(recordings)

    def reembed(
        self,
        embed: Callable[[StoredRecording], np.ndarray],
        *,
        fingerprint: str,
        embedding_dim: int,
        mean: np.ndarray | None = None,
        model: str = "",
        drops_missing: bool = False,
    ) -> list[str]:
        """Go over to another model: every recording is embedded anew from its file, and the store backed up first.

        Args:
            embed: (dim,) of a recording; raises ValueError where its file cannot be read.
            fingerprint: of the new model.
            embedding_dim: of the new model.
            mean: subtracted before scoring.
            model: name of the new model's file.
            drops_missing: leave out recordings that cannot be read, else nothing is changed.

        Returns:
            What was left out, a sentence each.

        Raises:
            StoreError: recordings that cannot be read (the first ten are named), or the file cannot be written.
        """
        with self._lock:
            version = self._data_version()
            kept = self.recordings()
            made, problems = _embedded_again(kept, embed)
            if problems and not drops_missing:
                shown = "; ".join(problems[:MAX_NAMED])
                raise StoreError(
                    f"{self.path}: {len(problems)} of {len(kept)} recordings cannot be embedded again, nothing was "
                    f"changed: {shown}{' …' if len(problems) > MAX_NAMED else ''}"
                )
            back_up(self._connection, self.path)
            with writing_to(self._connection, self.path):
                if self._data_version() != version:
                    raise StoreError(f"{self.path}: another process has changed it meanwhile; do the same again")
                self._connection.execute("DELETE FROM recordings")
                self._rows.write_facts(fingerprint=fingerprint, embedding_dim=embedding_dim, model=model)
                for name, recordings in itertools.groupby(sorted(made, key=lambda one: one.name), lambda one: one.name):
                    self._rows.insert(name, recordings)
                self._connection.execute("DELETE FROM people WHERE id NOT IN (SELECT person FROM recordings)")
            self._fingerprint, self._rows.embedding_dim = fingerprint, embedding_dim
            self._mean, self._voices = mean, None
        return problems

    def _current(self) -> Voices:
        """Everybody's voice, as the file has it now."""
        version = self._data_version()
        if self._voices is None or version != self._version:
            self._check_model()
            self._voices, self._version = self._load(), version
        return self._voices

    def _check_model(self) -> None:
        """Refuse to go on where another process has gone over to another model."""
        if self._fingerprint is not None and self.facts["fingerprint"] != self._fingerprint:
            raise StoreError(f"{self.path} went over to another model meanwhile; open it again with that model")

    def _load(self, name: str | None = None) -> Voices:
        """Voices of everybody, or of one person, from the file."""
        with store_errors(self.path):
            kept = self._rows.select(name)
        embeddings = np.empty((len(kept), self._rows.embedding_dim), dtype=np.float32)
        for row, one in enumerate(kept):
            embeddings[row] = one.embedding
        weights = np.array([one.weight for one in kept], dtype=np.float32)
        return voices_of([one.name for one in kept], mean_embeddings(embeddings, self._mean), weights)

    def _follow(self, name: str) -> int:
        """Do in memory what was done in the file to one person; how many recordings they have."""
        if self._voices is not None:
            found = self._load(name)
            if len(found):
                self._voices.put(name, found.row(name))
            else:
                self._voices.drop(name)
        with store_errors(self.path):
            return count_of(self._connection, name)

    def _data_version(self) -> int:
        """Another number whenever another connection has changed the file."""
        with store_errors(self.path):
            return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

    def _checked(self, embeddings: np.ndarray) -> np.ndarray:
        """(recordings, dim) float32."""
        found = np.asarray(embeddings, dtype=np.float32)
        if found.ndim != 2 or found.shape[1] != self._rows.embedding_dim or not len(found):
            raise StoreError(f"embeddings of shape {found.shape}; expected (recordings, {self._rows.embedding_dim})")
        if not np.isfinite(found).all():
            raise StoreError("an embedding with NaN or infinite values; expected finite ones")
        return found

    def _nobody(self, name: str) -> str:
        near = difflib.get_close_matches(name, [one.name for one in self.people()], n=3)
        nearest = f"; nearest: {', '.join(near)}" if near else ""
        return f"{self.path}: nobody is called {name!r}{nearest}; `speakernet people list` shows everybody"


def _embedded_again(
    kept: Sequence[StoredRecording], embed: Callable[[StoredRecording], np.ndarray]
) -> tuple[list[StoredRecording], list[str]]:
    """Recordings with other embeddings, and why some have none."""
    made, problems = [], []
    for one in kept:
        try:
            made.append(dataclasses.replace(one, embedding=np.asarray(embed(one), dtype=np.float32).reshape(-1)))
        except ValueError as error:
            problems.append(f"{one.name}: {error}")
    return made, problems
