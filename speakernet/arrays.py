"""NumPy's `.npz` files, read with every size checked against the file before memory is taken.

Such files lie in caches, run folders and corpora, where a broken copy or another program may have changed them. Pickled
objects are never read.
"""

import math
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from speakernet.files import FileError, open_regular, reading

DEFLATE_LIMIT = 1033
"""No deflated byte stands for more bytes than this."""
_HEADERS: dict[tuple[int, int], Callable] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_arrays(path: str | Path, expected: str, kind: type[FileError] = FileError) -> dict[str, np.ndarray]:
    """Every array of an `.npz` file by its name.

    Args:
        path: of the file.
        expected: as `files.reading` takes it.
        kind: the error of the room.

    Raises:
        FileError: of that kind; not such a file, damaged, or an array claims another size than the file has for it.
    """
    with reading(path, expected, kind), open_regular(path) as file, zipfile.ZipFile(file) as archive:
        return {
            member.filename.removesuffix(".npy"): _read_array(archive, member, path, expected, kind)
            for member in archive.infolist()
        }


def _read_array(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: str | Path, expected: str, kind: type[FileError]
) -> np.ndarray:
    name = member.filename
    if member.file_size > DEFLATE_LIMIT * member.compress_size + DEFLATE_LIMIT:
        raise kind(
            f"{path}: {name} claims {member.file_size:,} bytes packed in {member.compress_size:,}; expected {expected}"
        )
    with archive.open(member) as stream:
        shape, _, dtype = _HEADERS[np.lib.format.read_magic(stream)](stream)
        claimed, there = math.prod(shape) * dtype.itemsize, member.file_size - stream.tell()
    if dtype.hasobject or claimed != there:
        what = "holds Python objects" if dtype.hasobject else f"claims {claimed:,} bytes and has {there:,}"
        raise kind(f"{path}: {name} {what}; expected {expected}")
    with archive.open(member) as stream:
        array = np.lib.format.read_array(stream, allow_pickle=False)
        # Only at the end of a member its checksum is compared.
        stream.read(1)
    return array
