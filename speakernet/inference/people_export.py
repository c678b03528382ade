"""A store of people written out, for another program or for the person who asks what is kept of them."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from speakernet.files import atomic_write, check_writable
from speakernet.inference.store_file import PRIVATE, StoreError
from speakernet.inference.store_rows import StoredRecording

FORMS = (".json", ".npz")


def export_recordings(path: Path, facts: dict[str, Any], recordings: Sequence[StoredRecording]) -> None:
    """Write everything that is kept of these recordings; embeddings come out readable, also of an encrypted store.

    Args:
        path: ends in `.json`, or in `.npz` for plain arrays, a row for each recording.
        facts: of the store.
        recordings: what to write.

    Raises:
        StoreError: another ending.
        FileError: nothing can be written there.
    """
    if path.suffix not in FORMS:
        raise StoreError(f"{path}: expected a file that ends in {' or '.join(FORMS)}")
    check_writable(path)
    if path.suffix == ".json":
        rows = [{**asdict(one), "embedding": [float(value) for value in one.embedding]} for one in recordings]
        with atomic_write(path) as file:
            json.dump({**facts, "recordings": rows}, file, ensure_ascii=False, indent=1)
    else:
        names = ("name", "weight", "source", "seconds", "speech_seconds", "warnings", "added")
        columns: dict[str, Any] = {name: np.array([getattr(one, name) for one in recordings]) for name in names}
        embeddings = np.array([one.embedding for one in recordings], dtype=np.float32)
        with atomic_write(path, "wb") as file:
            np.savez(file, **columns, embeddings=embeddings, fingerprint=np.array(str(facts["fingerprint"])))
    path.chmod(PRIVATE)
