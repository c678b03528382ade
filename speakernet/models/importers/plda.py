"""Reads PLDA and transforms of Kaldi (binary and text) and PLDA of wespeaker (HDF5, needs h5py) as
arrays.

wespeaker's pickles of processing chains are not supported, because pickles can run code.

Source: Kaldi's `ivector/plda.cc` and `matrix/kaldi-matrix.cc`; wespeaker's
`utils/plda/two_cov_plda.py`.
"""

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy import ndarray

from speakernet.checkpoint import CheckpointError
from speakernet.files import open_regular, reading

BINARY = b"\0B"
START = b"<Plda>"
END = b"</Plda>"
HDF5 = b"\x89HDF\r\n\x1a\n"
EXPECTED = "Kaldi's PLDA, vector or matrix, binary or text, or wespeaker's PLDA as HDF5"
TYPES: dict[bytes, np.dtype] = {b"F": np.dtype("<f4"), b"D": np.dtype("<f8")}
MAX_BYTES = 1 << 30
"""A PLDA of 2,000 dimensions in float64 is 32 MB."""


@dataclass(frozen=True)
class ForeignPlda:
    """The PLDA in a file; `transform` makes the within-speaker covariance the identity."""

    transform: ndarray
    """(dim, dim)"""
    offset: ndarray
    """(dim,) added after the transform: minus the transformed mean."""
    between: ndarray
    """(dim,) between-speaker variances."""
    is_kaldi: bool
    """Kaldi weights the length by the variances, wespeaker does not."""


def read_plda(path: str | Path) -> ForeignPlda:
    """A PLDA of Kaldi or wespeaker.

    Raises:
        CheckpointError: a different kind of file, a damaged file, or arrays of inconsistent sizes.
    """
    with reading(path, EXPECTED, CheckpointError):
        content = _content(path)
        is_kaldi = not content.startswith(HDF5)
        if is_kaldi:
            if START not in content[:16]:
                raise CheckpointError(f"{path} is not a PLDA; expected {EXPECTED}")
            arrays = _arrays(content, path)
            if len(arrays) != 3:
                raise CheckpointError(
                    f"{path}: the PLDA has {len(arrays)} arrays; expected mean, transform, "
                    "variances"
                )
            # (dim,), (dim, dim), (dim,)
            mean, transform, between = arrays
            offset = -transform @ mean
        else:
            transform, offset, between = _read_hdf5(path)
        _check(path, transform, offset, between)
    return ForeignPlda(transform, offset, between, is_kaldi)


def read_array(path: str | Path) -> ndarray:
    """A vector (dim,) or matrix (rows, columns) of Kaldi, such as `mean.vec` or `transform.mat`.

    Raises:
        CheckpointError: a different kind of file, or a damaged file.
    """
    with reading(path, EXPECTED, CheckpointError):
        arrays = _arrays(_content(path), path)
        if len(arrays) != 1 or not arrays[0].size or not np.isfinite(arrays[0]).all():
            raise CheckpointError(
                f"{path}: expected one vector or matrix of finite numbers, as Kaldi writes it"
            )
    return arrays[0]


def _content(path: str | Path) -> bytes:
    with open_regular(path) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise CheckpointError(f"{path} has more than {MAX_BYTES >> 20} MiB; expected {EXPECTED}")
    return content


def _check(path: str | Path, transform: ndarray, offset: ndarray, between: ndarray) -> None:
    is_plda = transform.size > 0 and np.isfinite(transform).all()
    for vector in (offset, between):
        is_plda &= vector.ndim == 1 and transform.shape == (vector.size, vector.size)
        is_plda &= np.isfinite(vector).all()
    if not is_plda:
        raise CheckpointError(
            f"{path}: expected the arrays of a PLDA, with consistent sizes and finite numbers"
        )
    if (between < 0).any():
        raise CheckpointError(f"{path}: negative between-speaker variances; expected 0 or more")


def _arrays(content: bytes, path: str | Path) -> list[ndarray]:
    """All vectors and matrices, in order, in float64."""
    if not content.startswith(BINARY):
        return _parse_arrays(content.decode("ascii"))
    # Binary: the tokens <Plda> and </Plda> around arrays. An array starts with F or D for 32 or 64
    # bits, and V or M for vector or matrix; then come its sizes and its values by rows.
    arrays = []
    place = len(BINARY)
    while place < len(content):
        if content.startswith((START, END), place):
            # A space follows the bracket.
            place = content.index(b">", place) + 2
            continue
        dtype = TYPES.get(content[place : place + 1])
        form = content[place + 1 : place + 3]
        if dtype is None or form not in (b"V ", b"M "):
            raise CheckpointError(
                f"{path}: found {content[place : place + 3]!r} at byte {place}; expected {EXPECTED}"
            )
        place += 3
        # A matrix has two sizes, each an int32 behind a byte with its width.
        sizes = []
        for _ in range(2 if form == b"M " else 1):
            sizes.append(struct.unpack_from("<bi", content, place)[1])
            place += 5
        # Not numpy's product, which damaged sizes could overflow.
        count = math.prod(sizes)
        num_bytes = count * dtype.itemsize
        # A damaged size must not allocate more than the file can hold.
        if min(sizes) < 0 or num_bytes > len(content) - place:
            raise CheckpointError(
                f"{path} is truncated: it has fewer than the declared {count} numbers; copy it "
                "again"
            )
        values = np.frombuffer(content, dtype, count, place)
        arrays.append(values.astype(np.float64).reshape(sizes))
        place += num_bytes
    return arrays


def _parse_arrays(text: str) -> list[ndarray]:
    """All vectors and matrices of a text file."""
    arrays = []
    for block in re.findall(r"\[([^\]]*)\]", text):
        rows = [row.split() for row in block.splitlines() if row.strip()]
        array = np.array(rows, dtype=np.float64)
        # A matrix starts on the line after its bracket, a vector on the same line. Otherwise they
        # look alike, since a matrix may have a single row.
        is_matrix = block.lstrip(" ").startswith("\n")
        arrays.append(array if is_matrix else array.reshape(-1))
    return arrays


def _read_hdf5(path: str | Path) -> tuple[ndarray, ndarray, ndarray]:
    try:
        # Imported late: only wespeaker's PLDA needs it.
        import h5py
    except ModuleNotFoundError as error:
        raise CheckpointError(f"{path} is HDF5, which needs h5py: pip install h5py") from error
    with h5py.File(path, "r") as file:
        entries = [file["transform"], file["offset"], file["psi"]]
        sizes = [entry.size for entry in entries]
        # As float64.
        if max(sizes) * 8 > MAX_BYTES:
            raise CheckpointError(f"{path} has arrays of {sizes} numbers, too large for a PLDA")
        transform, offset, between = (np.asarray(entry[()], dtype=np.float64) for entry in entries)
    return transform, offset, between
