"""Embeddings kept on disk with their names, and taken again while model, audio and settings are unchanged.

One `.npz` of plain arrays for each list and mode; its key covers the weights, the settings and, for every utterance,
name, size and time of change of its audio. Anything else than an equal key means: embed again.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speakernet.data.lists import StringTable
from speakernet.data.lookup import LookupTable
from speakernet.files import FileError, atomic_write, read_arrays, reading

logger = logging.getLogger(__name__)


def weights_digest(weights: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names and values of a state dictionary."""
    digest = hashlib.sha256()
    # Sorted: the digest is of the weights, not of the order in which a file holds them.
    for name in sorted(weights):
        value = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return digest.hexdigest()


def store_key(model_digest: str, names: StringTable, lookup: LookupTable, settings: Mapping[str, Any]) -> str:
    """What embeddings depend on, as one SHA-256."""
    digest = hashlib.sha256(model_digest.encode())
    digest.update(json.dumps(settings, sort_keys=True).encode())
    # The lookup table holds sizes and times of change: audio that was replaced under its name is embedded anew.
    for array in (names.content, names.offsets, *(column.array for column in lookup.columns.values())):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def load_embeddings(path: Path, key: str) -> np.ndarray | None:
    """The kept embeddings, or None if there are none, they belong to something else, or the file is damaged."""
    if not path.is_file():
        return None
    try:
        with reading(path, "kept embeddings"):
            kept = read_arrays(path, "kept embeddings")
            found, embeddings = str(kept["key"]), kept["embeddings"]
    except FileError as error:
        logger.warning("%s; embedding again", error)
        return None
    return embeddings if found == key else None


def save_embeddings(path: Path, key: str, names: StringTable, embeddings: np.ndarray) -> None:
    """Keep embeddings (utterances, crops, dim) with their names: UTF-8 bytes and offsets, and a key."""
    with atomic_write(path, "wb") as file:
        np.savez(file, key=np.array(key), names=names.content, name_offsets=names.offsets, embeddings=embeddings)
